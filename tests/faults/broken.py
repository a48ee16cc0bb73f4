"""Parts with bugs, as they come from somebody's own package: what the faults of the kit put into a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from core.contracts import IGNORED_LABEL, Batch, PackedBatches, Packing
from core.training.shards import gradients
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.olmoe import OLMoE

# -- data ------------------------------------------------------------------------------------------------


class OfAnother(Packing):
    """A packing whose batches another one has read and a bug has changed.

    Args:
        packing: What reads the rows.
        bug: Which one; the derived class lists them.
        amount: How much of it.
    """

    def __init__(self, packing: Packing, bug: str, amount: float = 1.0) -> None:
        self.packing, self.bug, self.amount = packing, bug, amount


class Altered(OfAnother):
    """The bugs of `CHANGES`, `CHANGES_EVERYWHERE`, `SELECTIONS` and `FOLDERS`, "sequential" and "validation_in_training"."""

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        if self.bug in FOLDERS:
            folder = FOLDERS[self.bug](folder, self.amount)
        if self.bug == "sequential":
            order["shuffle"] = False
        inner: Any = self.packing.batches(folder, **order)
        read, take, bug, amount, pad = inner.read, inner.take, self.bug, self.amount, inner.pad
        if bug in CHANGES and not pad:
            inner.read = lambda rows, own: CHANGES[bug](read(rows, own), amount)
        if bug in CHANGES_EVERYWHERE:
            inner.read = lambda rows, own: CHANGES_EVERYWHERE[bug](read(rows, own), amount)
        if bug in SELECTIONS and not pad:
            inner.take = lambda cursor, count: SELECTIONS[bug](take, cursor, count, amount)
        if bug == "validation_in_training" and pad:
            return _with(inner, self.packing.batches(folder.parent / "train", **order), amount)
        return inner  # type: ignore[no-any-return]


def _with(inner: Any, training: Any, amount: float) -> Any:
    """Returns validation batches of which a share of the rows are training rows."""
    read = inner.read

    def mixed(rows: Any, own: slice) -> Batch:
        taken, _ = training.take(training.cursor, len(rows))
        batch, others = read(rows, own), training.read(taken, own)
        count = round(amount * len(batch["input_ids"]))
        for name, value in batch.items():
            value[:count] = others[name][:count]
        return batch

    inner.read = mixed
    return inner


def _shifted(batch: Batch, amount: float) -> Batch:
    """Labels are the tokens themselves (0), or the ones after the next (2)."""
    ids, labels = batch["input_ids"], torch.full_like(batch["labels"], IGNORED_LABEL)
    by = int(amount)
    labels[:, : ids.shape[1] - by] = ids[:, by:]
    return batch | {"labels": labels}


def _few_labels(batch: Batch, amount: float) -> Batch:
    """Only the first share of each row has labels."""
    labels = batch["labels"].clone()
    labels[:, max(1, round(amount * labels.shape[1])) :] = IGNORED_LABEL
    return batch | {"labels": labels}


def _permuted(batch: Batch, amount: float) -> Batch:
    """Token ids of another tokenizer: a permutation, or, with an amount above 1, shifted by that."""
    size = 288
    order = torch.as_tensor(np.random.default_rng(7).permutation(size)) if amount <= 1 else None

    def other(ids: torch.Tensor) -> torch.Tensor:
        mapped = order[ids.clamp(min=0)] if order is not None else (ids + int(amount)) % size
        return torch.where(ids < 0, ids, mapped)

    return batch | {"input_ids": other(batch["input_ids"]), "labels": other(batch["labels"])}


def _no_mask(batch: Batch, amount: float) -> Batch:
    """Documents of a row are said to be one, though positions restart."""
    return batch | {"document_ids": torch.zeros_like(batch["document_ids"])}


def _running_positions(batch: Batch, amount: float) -> Batch:
    """Positions: those of the row (1), all the same (0), or counted in twos (2)."""
    length = batch["input_ids"].shape[1]
    if amount == 2:
        positions = (batch["position_ids"] * 2).clamp(max=length - 1)
    else:
        positions = (torch.arange(length) * int(amount)).expand_as(batch["input_ids"]).contiguous()
    return batch | {"position_ids": positions}


def _slow(batch: Batch, amount: float) -> Batch:
    """Reading takes so many milliseconds."""
    time.sleep(amount / 1e3)
    return batch


_seen = 0


def _unevenly_slow(batch: Batch, amount: float) -> Batch:
    """Every fourth batch takes four times as long."""
    global _seen
    _seen += 1
    time.sleep(0.0 if _seen % 4 else 4 * amount / 1e3)
    return batch


CHANGES: dict[str, Callable[[Batch, float], Batch]] = {
    "slow": _slow,
    "unevenly_slow": _unevenly_slow,
    "few_labels": _few_labels,
}
"""Of training batches."""

CHANGES_EVERYWHERE: dict[str, Callable[[Batch, float], Batch]] = {
    "shifted": _shifted,
    "permuted": _permuted,
    "no_mask": _no_mask,
    "positions": _running_positions,
}
"""Of training and validation batches."""


def _repeated(take: Any, cursor: Any, count: int, amount: float) -> Any:
    """Each row comes so many times in a batch."""
    rows, after = take(cursor, count)
    rows = list(rows)
    distinct = rows[: max(1, int(len(rows) / amount))]
    return [distinct[index % len(distinct)] for index in range(len(rows))], after


_first: dict[int, Any] = {}


def _same_few(take: Any, cursor: Any, count: int, amount: float) -> Any:
    """Half of the rows of each batch are those of the run's first batch."""
    rows, after = take(cursor, count)
    rows = list(rows)
    kept = _first.setdefault(id(take), rows)
    return [kept[i % len(kept)] if i < amount * len(rows) else row for i, row in enumerate(rows)], after


SELECTIONS: dict[str, Callable[..., Any]] = {"repeated": _repeated, "same_few": _same_few}
"""Of which rows are read."""

FOLDERS: dict[str, Callable[[Path, float], Path]] = {
    "validation_is_training": lambda folder, amount: folder.parent / "train",
}
"""Of where tokens are read."""


# -- networks --------------------------------------------------------------------------------------------


class _Sees:
    """Attention that is not causal, in all blocks or the last."""

    blocks_at_fault = "all"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        blocks: Any = self.blocks  # type: ignore[attr-defined]
        for block in blocks if self.blocks_at_fault == "all" else blocks[-1:]:
            attend = block.attention.attend
            block.attention.attend = lambda q, k, v, mask=None, dropout=0.0, attend=attend, **more: attend(
                q, k, v, None, dropout, **{**more, "is_causal": False}
            )


class _SeesInOneBlock(_Sees):
    blocks_at_fault = "last"


class SeeingGPT(_Sees, GPT):
    pass


class SeeingLlama(_Sees, Llama):
    pass


class SeeingOLMoE(_Sees, OLMoE):
    pass


class HalfSeeingGPT(_SeesInOneBlock, GPT):
    pass


class HalfSeeingLlama(_SeesInOneBlock, Llama):
    pass


class HalfSeeingOLMoE(_SeesInOneBlock, OLMoE):
    pass


class Initialised(Callback):
    """Changes a network's weights before the first step; a bug in somebody's initialisation.

    Args:
        bug: "scaled", "zero_block", "dead", "sharp_attention", "masked_experts", "equal_experts", "deep_gain", "deep_fade".
        amount: How much of it.
    """

    def __init__(self, bug: str, amount: float = 1.0) -> None:
        self.bug, self.amount = bug, amount

    @torch.no_grad()
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        network, amount = pl_module.network, self.amount
        blocks = network.blocks
        if self.bug == "scaled":
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(amount)
        if self.bug == "zero_block":
            for parameter in blocks[int(amount)].parameters():
                parameter.zero_()
        if self.bug == "dead":
            for block in blocks:
                block.mlp.up_proj.bias.fill_(-amount)
        if self.bug == "sharp_attention":
            for block in blocks:
                for projection in (block.attention.q_proj, block.attention.k_proj):
                    projection.weight.mul_(amount)
        if self.bug == "masked_experts":
            for router in network.routers:
                router._choose = _without_last(router._choose, int(amount))
        if self.bug == "equal_experts":  # nothing chooses: ties go to the first ones
            for router in network.routers:
                router.weight.zero_()
                router.weight.requires_grad_(False)
        if self.bug in ("deep_gain", "deep_fade"):
            for index, block in enumerate(blocks):
                scale = amount ** (1 if index else 0)
                gain = scale if self.bug == "deep_gain" else 1 / scale
                block.register_forward_pre_hook(_gain_of(gain))


def _without_last(choose: Any, count: int) -> Any:
    """Returns a choice of experts that never takes the last ones."""
    return lambda scores: choose(torch.cat((scores[:, :-count], scores[:, -count:] - 1e9), dim=1))


def _gain_of(gain: float) -> Any:
    """Returns a hook after which a block's input has the same values, and this many times the gradient."""

    def multiply(module: Any, inputs: Any) -> Any:
        x = inputs[0]
        return (x.detach() + gain * (x - x.detach()), *inputs[1:])

    return multiply


# -- training --------------------------------------------------------------------------------------------


class Frozen(Callback):
    """Weights that are not trained by mistake: no gradient ("frozen"), or unknown to the optimizer ("forgotten").

    Args:
        bug: Which.
        pattern: In their names.
    """

    def __init__(self, bug: str, pattern: str) -> None:
        self.bug, self.pattern = bug, pattern

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        chosen = [p for name, p in pl_module.network.named_parameters() if self.pattern in name]
        assert chosen
        if self.bug == "frozen":
            for parameter in chosen:
                parameter.requires_grad_(False)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.bug == "forgotten":
            chosen = {id(p) for name, p in pl_module.network.named_parameters() if self.pattern in name}
            for group in trainer.optimizers[0].param_groups:
                group["params"][:] = [p for p in group["params"] if id(p) not in chosen]


class Once(Callback):
    """Strikes in the steps from `first` to `last`, in each once: a run that goes back meets it no more.

    Args:
        first: The first step with it.
        last: The last step with it.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def strikes(self, trainer: Any) -> bool:
        step = trainer.global_step + 1
        struck = vars(self).setdefault("_struck", set())
        due = self.first <= step <= self.last and step not in struck
        if due and self.last < FOREVER:
            struck.add(step)
        return due


FOREVER = 10**9


class Gradients(Once):
    """A bug in how gradients are made.

    Args:
        bug: "scaled", "kept" (never zeroed), "half" (rounded to fp16), "noise", "nan", "inf", "clipped_values".
        amount: How much of it.
        first: The first step with it.
        last: The last step with it.
    """

    def __init__(self, bug: str, amount: float = 1.0, first: int = 1, last: int = FOREVER) -> None:
        self.bug, self.amount, self.first, self.last = bug, amount, first, last
        self._kept: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.strikes(trainer):
            return
        found = gradients(optimizer)
        if self.bug == "scaled":
            torch._foreach_mul_(found, self.amount)
        if self.bug == "kept":
            if self._kept:
                torch._foreach_add_(found, self._kept)
            self._kept = [one.clone() for one in found]
        if self.bug == "half":
            for one in found:
                one.copy_((one * self.amount).half().float() / self.amount)
        if self.bug in ("nan", "inf"):
            found[-1 if self.amount == 1 else 0].view(-1)[0] = float(self.bug)


class Optimizing(Once):
    """A bug around the optimizer.

    Args:
        bug: "forgets" (its state), "rate" (multiplied), "clear_once".
        amount: How much of it.
        first: The first step with it.
        every: Steps between two times.
        last: The last step with it.
    """

    def __init__(
        self, bug: str, amount: float = 1.0, first: int = 1, every: int = 1, last: int = FOREVER
    ) -> None:
        self.bug, self.amount, self.first, self.every, self.last = bug, amount, first, every, last

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        due = self.strikes(trainer) and (trainer.global_step + 1 - self.first) % self.every == 0
        if self.bug == "forgets" and due:
            trainer.optimizers[0].state.clear()
        if self.bug == "rate":
            pl_module.lr_factors["Optimizing"] = self.amount if due else 1.0


class Louder(Once):
    """The last norm becomes louder with each step.

    Args:
        factor: In each step.
        first: The first step with it.
        last: The last step with it.
    """

    def __init__(self, factor: float, first: int = 1, last: int = FOREVER) -> None:
        self.factor, self.first, self.last = factor, first, last

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.strikes(trainer):
            pl_module.network.norm.weight.mul_(self.factor)


class Garbage(Once):
    """Batches of some steps are no text: random tokens, or one token over and over.

    Args:
        first: The first step with it.
        last: The last step with it.
        repeated: Whether each row repeats one token.
    """

    def __init__(self, first: int, last: int, repeated: bool = False) -> None:
        self.first, self.last, self.repeated = first, last, repeated

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        if self.strikes(trainer):
            random = torch.Generator().manual_seed(step)
            for name in ("input_ids", "labels"):
                batch[name].random_(0, 288, generator=random)
                if self.repeated:
                    batch[name].copy_(batch[name][:, :1].expand_as(batch[name]))


class Stalls(Callback):
    """Saves a checkpoint every few steps, which takes its time."""

    def __init__(self, every: int, milliseconds: float) -> None:
        self.every, self.milliseconds = every, milliseconds

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        time.sleep(self.milliseconds / 1e3)
