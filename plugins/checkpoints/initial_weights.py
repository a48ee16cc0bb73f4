"""Weights that a run starts from: a checkpoint of ours, a Hugging Face folder, a safetensors file or a GGUF file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.contracts import HasTokenizer, Network
from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.checkpoints.finding import resolve
from plugins.checkpoints.foreign import is_foreign, open_foreign, read_text
from plugins.checkpoints.matching import form_of, has_own_names, pieces_of, stored_data
from plugins.checkpoints.remote_copies import shown
from toolkit.hugging_face import HasHuggingFaceForm
from toolkit.initial_weights import MayLackWeights
from toolkit.local_paths import is_url
from toolkit.ranks import launched_rank
from toolkit.safetensors_files import LazyTensor
from toolkit.token_ids import other_ids


@technique(
    paper="new rows as the mean of the old: J. Hewitt, 2021, Initializing New Word Embeddings for Pretrained LMs",
    offers=("initial_weights",),
)
class InitialWeights:
    """Starts a run from weights alone, with another objective, optimizer, data or vocabulary.

    Optimizer, schedule, step and position in the data start from the beginning. Tensors are read one by one and cast to the data type of
    the network. If the network has a larger vocabulary, the new rows of embedding and head are the mean of the old ones.
    Parts that a network may lack in stored weights, such as BERT's head, begin as new ones, and a message says so; where the
    network is without them, stored ones are not read. A resumed run takes the checkpoint's weights instead.
    Where the weights have a tokenizer with them, the data need to have the same token for each id that both know.

    Args:
        path: A checkpoint, a run folder (its newest checkpoint), a URL of either on object storage, a folder with
            config.json and safetensors files, a safetensors file with names of transformers or of the network, or a GGUF
            file.

    Raises:
        ConfigError: If a tensor is missing, left over or has another shape, the weights cannot be read, or the data have
            another tokenizer.

    Example:
        model:
          weights: runs/base        # read by InitialWeights
    """

    def __init__(self, path: str) -> None:
        self.path = _of_url(path) if is_url(path) else Path(path).expanduser()
        self.name = shown(self.path)
        if not is_url(path) and not self.path.exists():
            around = self.path.parent if self.path.parent.is_dir() else Path()
            hint = nearest(self.path.name, {entry.name for entry in around.iterdir()})
            raise ConfigError(
                f"model.weights: there is no file or folder {path}.{hint}\nSet --model.weights to the place of the weights."
            )

    def change_network(self, network: Network, trainer: Any = None) -> None:
        """Fills a network that was just built; on the meta device names and shapes are checked, and no weights read.

        Args:
            network: The network.
            trainer: Of the run; the tokenizer of its data is compared with that of the weights.
        """
        own = network.state_dict(keep_vars=True)
        found, grown = self._checked(network, own)
        if any(value.is_meta for value in own.values()):
            return
        self._check_data(trainer)
        with torch.no_grad():
            for name in own.keys() & found.keys():
                _fill(own[name], found[name].read())
        self._say(own, found, grown)

    def readers(self, network: Network, trainer: Any) -> dict[str, Callable[[], Tensor]]:
        """Returns name -> what reads a tensor as the network has it, whole, on the CPU; of those that are stored.

        Args:
            network: On the meta device; names, shapes and the tokenizer of the data are checked.
            trainer: Of the run.
        """
        own = network.state_dict(keep_vars=True)
        found, grown = self._checked(network, own)
        self._check_data(trainer)
        self._say(own, found, grown)
        return {name: partial(_read, found[name], own[name]) for name in own.keys() & found.keys()}

    def tensors(self, network: Network) -> dict[str, LazyTensor]:
        """Returns the stored tensors by the network's names, with its shapes; none is read yet.

        Args:
            network: On the meta device; names and shapes are checked.
        """
        own = network.state_dict(keep_vars=True)
        found, grown = self._checked(network, own)
        self._say(own, found, grown)
        whole = {
            name: LazyTensor(tuple(own[name].shape), own[name].dtype, partial(_read, found[name], own[name]))
            for name in grown
        }
        return {name: whole.get(name, found[name]) for name in own.keys() & found.keys()}

    def _checked(
        self, network: Network, own: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, LazyTensor], list[str]]:
        found = self._found(network, {name: tuple(value.shape) for name, value in own.items()})
        return found, self._check(network, own, found)

    def _check_data(self, trainer: Any) -> None:
        if isinstance(data := getattr(trainer, "datamodule", None), HasTokenizer):
            self._check_tokenizer(data.tokenizer_json)

    def _say(self, own: Mapping[str, Tensor], found: Mapping[str, LazyTensor], grown: list[str]) -> None:
        if launched_rank() in (None, 0):
            rows = f"; new rows in {', '.join(grown)} are the mean of the old ones" if grown else ""
            new = [name for name in own if name not in found]
            rows += f"; {', '.join(new)} are not there and are initialised" if new else ""
            print(
                f"Weights: {len(own) - len(new)} tensors from {self.name}{rows}", file=sys.stderr, flush=True
            )

    def _found(self, network: Network, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, LazyTensor]:
        """Returns the stored tensors under the network's names."""
        if not is_foreign(self.path):
            from plugins.checkpoints.stored_network import own_tensors  # which needs this to read the base

            return own_tensors(resolve(str(self.path), self.path))
        foreign = open_foreign(self.path)
        form = form_of(network, foreign.config)
        if has_own_names(foreign, form, shapes):
            return foreign.tensors
        if (
            isinstance(network, HasHuggingFaceForm) and form is not network.hugging_face
        ):  # one of a network without these parts
            lacks = _may_lack(network)
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(lacks)}
        if form is None:
            there = (foreign.config or {}).get("architectures", ["another network"])
            raise ConfigError(f"{self.name} holds {there}, which {type(network).__name__} is not.")
        absent = _absent(network, shapes)
        unused = [rename.theirs for rename in form.renames if f"{rename.ours}.".startswith(absent)]
        return pieces_of(foreign, form, shapes, tuple(unused))

    def _check_tokenizer(self, of_data: str) -> None:
        """Raises a ConfigError if ids mean other tokens in the data than they did in the training of the weights."""
        text = tokenizer_of(self.path)
        if text is None:
            return
        try:
            other = other_ids(of_data, text)
        except ValueError as error:
            raise ConfigError(f"model.weights: {self.name} has a damaged tokenizer: {error}.") from error
        if other:
            known = self.path if is_foreign(self.path) else "the folder that `export` writes"
            raise ConfigError(
                f"model.weights: {self.name} has another tokenizer than the data: {other}.\n"
                f"Set --data.tokenizer=PretrainedTokenizer and --data.tokenizer.path={known}; or name a .safetensors file, "
                "which has no tokenizer."
            )

    def _check(
        self, network: Network, own: Mapping[str, Tensor], found: Mapping[str, LazyTensor]
    ) -> list[str]:
        """Returns the names of what has more rows than is stored, and may; refuses any other difference."""
        head = f"model.weights: {self.name}"
        lacks = _may_lack(network)
        if missing := [name for name in own if name not in found and not name.startswith(lacks)]:
            raise ConfigError(
                f"{head} has no {missing[0]} ({len(missing)} of {len(own)} tensors are missing).{nearest(missing[0], set(found))}\n"
                "Give the network the kind and arguments that it was stored with."
            )
        if left := [name for name in found if name not in own and not name.startswith(_absent(network, own))]:
            raise ConfigError(
                f"{head} has {left[0]}, which the network has not.{nearest(left[0], set(own))}\n"
                "Give the network the kind and arguments that it was stored with."
            )
        vocabulary, grown = _vocabulary(network), []
        for name, target in own.items():
            if name not in found:
                continue
            here, there = tuple(target.shape), found[name].shape
            if here == there:
                continue
            if name not in vocabulary or here[1:] != there[1:] or not 0 < there[0] < here[0]:
                more = f"\nSet vocab_size to {there[0]} or more." if name in vocabulary else ""
                raise ConfigError(f"{head}: {name} is {there} there and {here} in the network.{more}")
            grown.append(name)
        return grown


def _of_url(url: str) -> Path:
    """Returns the copy of a checkpoint on object storage, whose tensors are downloaded when they are read."""
    if is_foreign(Path(url)):
        raise ConfigError(
            f"model.weights is {url}: weights of others are read from this machine's folders. Download them."
        )
    try:
        return resolve(url, Path())
    except ConfigError as error:
        raise ConfigError(str(error).replace("--ckpt_path", "model.weights")) from error


def tokenizer_of(path: Path) -> str | None:
    """Returns the tokenizer.json that a checkpoint, a run folder, or weights of others have with them; None: none is known."""
    if not is_foreign(path):
        return stored_data(resolve(str(path), path)).get("tokenizer")
    if path.is_dir():
        name = "tokenizer.json"
        return read_text(path, name) if (path / name).exists() else None
    return (open_foreign(path).files or {}).get("tokenizer.json")


def _vocabulary(network: Network) -> set[str]:
    """Returns the names of weights with a row for each token id: of the embedding and of the head."""
    ends = {id(module) for modules in network.ends or () for module in modules}
    return {
        f"{name}.{leaf}"
        for name, module in network.named_modules()
        if id(module) in ends and "position" not in name
        for leaf, weight in module.named_parameters(recurse=False)
        if len(weight) == network.vocab_size
    }


def _may_lack(network: Network) -> tuple[str, ...]:
    return tuple(network.may_lack) if isinstance(network, MayLackWeights) else ()


def _absent(network: Network, own: Iterable[str]) -> tuple[str, ...]:
    """Returns the beginnings of names of parts that it may lack, and lacks: of stored ones nothing is read."""
    names = tuple(own)
    return tuple(part for part in _may_lack(network) if not any(name.startswith(part) for name in names))


def _read(stored: LazyTensor, target: Tensor) -> Tensor:
    """Returns a stored tensor with the shape and the data type of a target."""
    found = torch.empty(target.shape, dtype=target.dtype, device="cpu")
    _fill(found, stored.read())
    return found


def _fill(target: Any, value: Tensor) -> None:
    rows = len(value) if value.ndim else 0
    if target.shape != value.shape:
        target[rows:] = value.float().mean(dim=0)
        target = target[:rows]
    target.copy_(value)
