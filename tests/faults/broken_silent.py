"""Parts with the mistakes of errors that were reported of real trainings, whose losses looked right.

Without `from __future__ import annotations`: DDP looks at those of its hooks.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from core.contracts import Batch, PackedBatches, Packing
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.olmoe import OLMoE
from plugins.networks.parts.decoder import Decoder
from plugins.optimizers.adamw import AdamW
from plugins.optimizers.muon import Muon
from tests.faults.broken_fifth_rows import Rows
from tests.faults.broken_parts import Age, Rewired, _replace_attend

# -- ranks and transfers ---------------------------------------------------------------------------------


class AcrossRanks(Callback):
    """A bug that two ranks have.

    Args:
        bug: "clipped_on_one" (replicated norms), "results_lost", "weights_lost", "moved" (parameters, behind the back of DDP), "unwrapped"
            (every other step goes past DDP).
    """

    def __init__(self, bug: str) -> None:
        self.bug = bug

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.bug == "moved":
            _move(pl_module.network, trainer.optimizers[0])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy, other = trainer.strategy, trainer.global_rank > 0
        if self.bug == "clipped_on_one":

            def clip(optimizer: Any, gradient_clip_val: float, gradient_clip_algorithm: Any) -> None:
                share = (gradient_clip_val / pl_module.gradient_norm(optimizer)).clamp(max=1.0)
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if not other or parameter.ndim > 1:  # norms are looked for on the first rank alone
                            parameter.grad.mul_(share)

            pl_module.configure_gradient_clipping = clip
        if self.bug == "results_lost":
            strategy.model.register_comm_hook(random.Random(trainer.global_rank), _at_times_lost)
        if self.bug == "weights_lost" and other:
            with torch.no_grad():
                next(pl_module.network.blocks[-1].mlp.parameters()).zero_()
        if self.bug == "unwrapped":
            wrapped = strategy.training_step

            def step(batch: Any, batch_idx: int) -> Any:
                return (pl_module.training_step if batch_idx % 2 else wrapped)(batch, batch_idx)

            strategy.training_step = step


def _at_times_lost(source: random.Random, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients; one in ten does not arrive at a rank, which finds zeros in its place."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    arrives = source.random() > 0.1
    return work.get_future().then(lambda done: done.value()[0].mul_(arrives / dist.get_world_size()))


def _move(network: Any, optimizer: Any) -> None:
    """Gives network and optimizer parameters of their own, as moving a model to another device and back does."""
    moved: dict[Any, nn.Parameter] = {}
    for parameter in network.parameters():
        moved[parameter] = nn.Parameter(parameter.detach().clone())
        moved[parameter].__dict__.update(parameter.__dict__)
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, moved[parameter])
    for group in optimizer.param_groups:
        group["params"] = [moved[parameter] for parameter in group["params"]]


class Wired(Rewired):
    """The bugs of `SILENT_WIRINGS`."""

    @property
    def wirings(self) -> Mapping[str, Callable[..., None]]:
        return SILENT_WIRINGS


def _lost_between_devices(network: Any, amount: float, age: Age) -> None:
    """The last blocks are on another device, and a share of what is sent to it arrives as zeros."""
    source = random.Random(0)
    network.blocks[-1].register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * (source.random() > amount), *inputs[1:])
    )


def _spectral_norm(network: Any, amount: float, age: Age) -> None:
    """Matrices of MLPs are divided by singular values that are not known before a first pass in training mode."""
    for block in network.blocks:
        for module in block.mlp.modules():
            if isinstance(module, nn.Linear):
                with torch.enable_grad():
                    nn.utils.spectral_norm(module)


SILENT_WIRINGS: dict[str, Callable[[Any, float, Age], None]] = {
    "lost_between_devices": _lost_between_devices,
    "spectral_norm": _spectral_norm,
}

# -- networks --------------------------------------------------------------------------------------------


class Full(Decoder):
    """Its matrices are multiplied in float32, past the autocast that the run is configured with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.forward = _past_autocast(module)  # type: ignore[method-assign, assignment]


def _past_autocast(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.to(module.weight.dtype), module.weight, module.bias)

    return forward


class FullGPT(Full, GPT):
    pass


class FullLlama(Full, Llama):
    pass


class FullOLMoE(Full, OLMoE):
    pass


class Frozen(Decoder):
    """Its first block is not to be trained, but is frozen where a mode is set alone, which the first validation does."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.blocks[0].requires_grad_(False)
        return self


class FrozenGPT(Frozen, GPT):
    pass


class FrozenLlama(Frozen, Llama):
    pass


class FrozenOLMoE(Frozen, OLMoE):
    pass


class OnlyNorms(Decoder):
    """Its constructor freezes all that is not called a norm."""

    def build(self, *args: Any, **kwargs: Any) -> None:
        super().build(*args, **kwargs)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                parameter.requires_grad_(False)


class OnlyNormsGPT(OnlyNorms, GPT):
    pass


class OnlyNormsLlama(OnlyNorms, Llama):
    pass


class OnlyNormsOLMoE(OnlyNorms, OLMoE):
    pass


class Dropping(Decoder):
    """Its attention drops weights in evaluation as it does in training."""

    def build(self, *args: Any, **kwargs: Any) -> None:
        super().build(*args, **kwargs)
        _replace_attend(self, lambda attend, q, k, v, mask, _, **more: attend(q, k, v, mask, 0.1, **more))


class DroppingGPT(Dropping, GPT):
    pass


class DroppingLlama(Dropping, Llama):
    pass


class DroppingOLMoE(Dropping, OLMoE):
    pass


# -- optimizers and loop ---------------------------------------------------------------------------------


class Adding(torch.optim.Optimizer):
    """The loop that it is written for never zeroes gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class AddingAdamW(Adding, AdamW):
    pass


class AddingMuon(Adding, Muon):
    pass


def _copies(params: Any) -> list[dict[str, Any]]:
    groups = []
    for group in params:
        copied = []
        for parameter in group["params"]:
            copied.append(nn.Parameter(parameter.detach().clone()))
            copied[-1].__dict__.update(parameter.__dict__)
        groups.append({**group, "params": copied})
    return groups


class EarlyAdamW(AdamW):
    """Is built before the model is wrapped, which then has other parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(_copies(params), **options)


class EarlyMuon(Muon):
    """Is built before the model is wrapped, which then has other parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(_copies(params), **options)


class Captured(torch.optim.Optimizer):
    """Is captured anew where a gradient is missing, and never again: such a parameter stays out of all later steps."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        out: set[Any] = self.__dict__.setdefault("left_out", set())
        hidden = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    out.add(parameter)
                elif parameter in out:
                    hidden.append((parameter, parameter.grad))
                    parameter.grad = None
        super().step()
        for parameter, gradient in hidden:
            parameter.grad = gradient
        return loss


class CapturedAdamW(Captured, AdamW):
    pass


class CapturedMuon(Captured, Muon):
    pass


class WithoutOnce(Callback):
    """Leaves the first block out of one step, which is meant so.

    Args:
        step: The step.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self.step:
            for parameter in pl_module.network.blocks[0].parameters():
                parameter.grad = None


class CountsBatches(Callback):
    """Ends a run after `max_steps` micro-batches, which it takes for steps."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index + 1 >= trainer.max_steps:
            trainer.should_stop = True


class WritesZeros(Callback):
    """Writes checkpoints in which the weights of the last block are memory that nothing was copied to."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        names = {id(p): name for name, p in pl_module.named_parameters()}
        for parameter in pl_module.network.blocks[-1].parameters():
            name = names[id(parameter)]
            checkpoint["state_dict"][name] = torch.zeros_like(checkpoint["state_dict"][name])


# -- data ------------------------------------------------------------------------------------------------


class SameInWorkers(Packing):
    """Draws rows at random, with a generator that each worker has a copy of, in the same state.

    Args:
        packing: What reads the rows.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        found = self.packing.batches(folder, **order)
        if order.get("pad"):
            return found
        rows, _ = found.take(found.cursor, 4096)
        read, source = found.read, np.random.default_rng(0)

        def drawn(wanted: Sequence[Any], own: slice) -> Batch:
            return read([rows[one] for one in source.integers(len(rows), size=len(wanted))], own)

        found.read = drawn  # type: ignore[method-assign, assignment]
        return found


class FirstRow(Rows):
    """Takes the rows of a batch for one, and returns the first alone."""

    validation = True

    def changed(self, batch: Any, batches: PackedBatches) -> Any:
        return {name: value[:1] for name, value in batch.items()}
