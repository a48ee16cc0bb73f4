"""What adapters share: a frozen base that checkpoints leave out, its record, layers that are changed in place."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError
from core.training.weights import EXTRA_STATE
from toolkit.initial_values import cleared_rows

__all__ = ["Adapter", "HasPeftForm", "change_layer", "restore_layer"]

SAMPLES = 16
"""Values of each tensor that the record of a base has."""
TOLERANCE = {"rtol": 2**-7, "atol": 1e-6}
"""The base may be kept in bfloat16 or float16: two roundings, and rounding errors of values that are nearly 0."""


class _Base:
    """The parameters of a network before adapters changed it, of which a record is made as their values are seen.

    Args:
        network: The network; on the meta device its values are shown later.
    """

    def __init__(self, network: nn.Module) -> None:
        named = dict(network.named_parameters())
        text = "\n".join(f"{name} {tuple(parameter.shape)}" for name, parameter in named.items())
        self._names = hashlib.sha256(text.encode()).hexdigest()
        self._cleared = {n: cleared_rows(p) for n, p in named.items() if p.is_meta}
        self._samples = {n: None if p.is_meta else _samples(p) for n, p in named.items()}

    def see(self, name: str, value: Tensor) -> None:
        """Notes samples of a parameter, whole."""
        if name in self._samples:
            self._samples[name] = _samples(value, self._cleared.get(name, ()))

    @property
    def record(self) -> dict[str, Any] | None:
        """Names, shapes and samples; None: values are missing."""
        known = [samples for samples in self._samples.values() if samples is not None]
        complete = len(known) == len(self._samples)
        return {"names": self._names, "samples": torch.cat(known)} if complete else None


_bases: WeakKeyDictionary[nn.Module, _Base] = WeakKeyDictionary()
"""Networks that an adapter has frozen -> their base."""


class Adapter(Callback, ABC):
    """A callback that freezes a network and trains what it adds or chooses; the base class of all adapters.

    The first adapter of a run freezes the network, the others leave what is trained by then. Frozen parameters have no
    gradient and no optimizer state. If the run has `model.weights`, checkpoints hold only what is trained, buffers, and a
    record of the base: names, shapes and 16 values of each parameter. A resumed run, `generate` and `export` read the base
    from `model.weights` again, and compare it with the record. Without `model.weights` checkpoints hold all weights,
    because nothing else does.

    A class has an :meth:`adapt`, and a :meth:`merge` if what it trains can be expressed in the weights of the base.

    It declares `offers=("keeps_weights",)` if it calls `toolkit.initial_values.start_added` for all that it adds.

    Attributes:
        base: The record of the base; None: not known on this rank.
        base_is_elsewhere: Whether checkpoints leave out the base. Set before the network is built.
    """

    base: dict[str, Any] | None = None
    base_is_elsewhere = False

    @abstractmethod
    def adapt(self, network: Network) -> None:
        """Adds to a frozen network what is trained, or sets `requires_grad`; the network may be on the meta device.

        Names of parameters that are there stay, and so do the classes of modules that plans for sharding name.
        """

    def merge(self, network: Network) -> bool:
        """Moves what was trained into the weights of the base, so that the network is as its class builds it.

        Returns:
            Whether that is possible; if not, the network stays as it is.
        """
        return False

    def change_network(self, network: Network) -> None:
        """Freezes the network, unless another adapter has, and adapts it.

        Raises:
            ConfigError: If nothing is trained then.
        """
        if network not in _bases:
            _bases[network] = _Base(network)
            network.requires_grad_(False)
            self._leave_out_base(network)
        self._changed = _bases[network]
        self.base = self.base or self._changed.record
        self.adapt(network)
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise ConfigError(
                f"{type(self).__name__} leaves no trainable parameter in {type(network).__name__}: "
                "choose some of it to be trained."
            )

    def _leave_out_base(self, network: Network) -> None:
        def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            if self.base_is_elsewhere:
                kept = {prefix + name for name in _stored(module)}
                for name in [n for n in state if n.startswith(prefix) and n not in kept]:
                    if not name.endswith(EXTRA_STATE):
                        del state[name]

        def accept(module: nn.Module, keys: Any) -> None:
            if self.base_is_elsewhere:
                kept = tuple(f".{name}" for name in _stored(module))
                keys.missing_keys[:] = [n for n in keys.missing_keys if f".{n}".endswith(kept)]

        network.register_state_dict_post_hook(leave_out)
        network.register_load_state_dict_post_hook(accept)

    # -- the run --------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Notes, before the network is built, whether the base can be read again."""
        module: Any = pl_module
        self.base_is_elsewhere = bool(module.weights)

    def see_weight(self, name: str, value: Tensor) -> None:
        """Adds a parameter to the record of the base; see `toolkit.initial_weights.SeesWeights`."""
        self._changed.see(name, value)
        self.base = self.base or self._changed.record

    def state_dict(self) -> dict[str, Any]:
        """Returns the record of the base, if checkpoints leave it out."""
        return {"base": self.base} if self.base_is_elsewhere and self.base else {}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuses, on every rank, a checkpoint that was trained on another base."""
        self.base = trainer.strategy.broadcast(self.base)
        self.check_base(checkpoint)

    def check_base(self, checkpoint: Mapping[str, Any]) -> None:
        """Compares the base of the network with the one that a checkpoint was trained on.

        Raises:
            ConfigError: If they are not the same.
        """
        record = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("base")
        if record is not None and self.base is not None and (other := _difference(record, self.base)):
            raise ConfigError(
                f"{type(self).__name__}: the checkpoint was trained on another base: {other}.\n"
                "Set model.weights to the weights that its run started from. Beside --adapter they are --ckpt_path; other commands look "
                "for them where that run did."
            )


@runtime_checkable
class HasPeftForm(Protocol):
    """An adapter that the peft library knows, too: `export --format peft` writes it."""

    def peft_form(self, network: Network) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns adapter_config.json, and key in adapter_model.safetensors -> name of a parameter of the network.

        Args:
            network: With the adapter in it; on the meta device.
        """


def _stored(network: nn.Module) -> set[str]:
    """Returns the names of what checkpoints hold beside a base that is elsewhere."""
    trained = {name for name, p in network.named_parameters(remove_duplicate=False) if p.requires_grad}
    return trained | {name for name, _ in network.named_buffers(remove_duplicate=False)}


# -- the record of a base -------------------------------------------------------------------------------


def _samples(parameter: Tensor, cleared: Sequence[int] = ()) -> Tensor:
    """Returns some of the values of a parameter, of which some rows are zero instead."""
    flat = parameter.detach().view(-1)
    count = min(SAMPLES, len(flat))
    places = torch.arange(count, device=flat.device) * len(flat) // max(count, 1)
    found = flat[places].float().cpu()
    for row in cleared:
        found[(places * len(parameter) // len(flat)).cpu() == row] = 0.0
    return found


def _difference(record: Any, base: Mapping[str, Any]) -> str | None:
    """Returns what differs between the record in a checkpoint, which may be damaged, and that of a network."""
    if not isinstance(record, Mapping) or record.get("names") != base["names"]:
        return "its parameters have other names or shapes"
    there, here = record.get("samples"), base["samples"]
    if not isinstance(there, Tensor) or there.shape != here.shape:
        return "its record is damaged"
    odd = ~torch.isclose(there.float(), here, **TOLERANCE, equal_nan=True)
    return f"{int(odd.sum()):,} of {len(odd):,} values that were compared differ" if odd.any() else None


# -- layers ---------------------------------------------------------------------------------------------


@cache
def _joined(kind: Any, layer: Any) -> Any:
    return type(f"{kind.__name__}_{layer.__name__}", (kind, layer), {})


def change_layer(layer: nn.Module, kind: type[nn.Module]) -> Any:
    """Makes a module an instance of a further class, in place: its names, hooks and parameters stay.

    Args:
        layer: For example an `nn.Linear`, or a subclass with quantised weights.
        kind: A subclass of what `layer` is one of; its `super().forward` is that of the layer.

    Returns:
        The same module.
    """
    pair: Any = kind, type(layer)  # for mypy a class of modules has no hash
    layer.__class__ = _joined(*pair)
    return layer


def restore_layer(layer: nn.Module, parameters: Iterable[str]) -> None:
    """Undoes :func:`change_layer`, and removes parameters that the further class added."""
    layer.__class__ = type(layer).__bases__[1]
    for name in parameters:
        delattr(layer, name)
