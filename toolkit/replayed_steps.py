"""Steps of a run that are made again as trials: their batches, which documents are in them, what each of these does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from core.contracts import IGNORED_LABEL, MarksEndOfText, PackedBatches
from core.training.shards import reshard
from toolkit.document_places import LocatesDocuments, Place
from toolkit.sharded_squares import ShardedSquares
from toolkit.trials import training_batches, trial

__all__ = [
    "Document",
    "Measured",
    "Part",
    "ReadAt",
    "batches_of",
    "documents_of",
    "guilty",
    "measure",
    "update_norms",
]


class ReadAt(NamedTuple):
    """Where a micro-batch was read.

    Attributes:
        step: The optimizer step, from 1.
        cursor: The position of the data before it.
        sequence_length: Tokens in a row then.
        batch_size: Rows of a micro-batch then.
    """

    step: int
    cursor: Any
    sequence_length: int
    batch_size: int


class Part(NamedTuple):
    """A part of a document in a batch.

    Attributes:
        rank: The rank that reads it, among those with different tokens.
        micro_batch: The number of the micro-batch in the step.
        place: Where it is in the rows.
    """

    rank: int
    micro_batch: int
    place: Place


Document = tuple[Part, ...]
"""All parts of a document in a step, wherever rows are cut."""


class Measured(NamedTuple):
    """A trial step.

    Attributes:
        loss: Mean loss over all label tokens.
        norm: Norm of the gradients.
    """

    loss: float
    norm: float


def _rows(trainer: Trainer, at: ReadAt) -> tuple[PackedBatches, Sequence[Any], slice]:
    batches = training_batches(trainer)
    rows, _ = batches.take(at.cursor, at.batch_size * batches.world_size)
    return batches, rows, slice(batches.rank * at.batch_size, (batches.rank + 1) * at.batch_size)


def batches_of(trainer: Trainer, parts: Sequence[ReadAt]) -> list[Any]:
    """Returns this rank's micro-batches once more; the position in the data stays."""
    return [_shaped(trainer, at, lambda b, rows, own: b.read(rows, own)) for at in parts]


def documents_of(trainer: Trainer, parts: Sequence[ReadAt], micro_batches: Sequence[Any]) -> list[Document]:
    """Returns the documents of a step on all ranks, the same list on each.

    Where the packing does not know them, rows are cut at the end of a text, and documents have the number -1.
    """
    batches = training_batches(trainer)
    own: list[Part] = []
    for number, (at, batch) in enumerate(zip(parts, micro_batches, strict=True)):
        if isinstance(batches, LocatesDocuments):
            places = _shaped(trainer, at, lambda b, rows, own: b.places(rows, own))
        else:
            places = _by_end_of_text(batch["input_ids"], trainer.datamodule)  # type: ignore[attr-defined]
        own += [Part(batches.rank, number, place) for place in places]
    gathered: list[Any] = [own]
    if trainer.world_size > 1:
        gathered = [None] * trainer.world_size
        dist.all_gather_object(gathered, own)
    found: dict[Any, list[Part]] = {}
    for part in sorted({part for of_rank in gathered for part in of_rank}):
        number = part.place.document
        found.setdefault(number if number >= 0 else part, []).append(part)
    return [tuple(of_document) for of_document in found.values()]


def _shaped(trainer: Trainer, at: ReadAt, read: Callable[..., Any]) -> Any:
    """Calls `read` while the packing has the shape of then."""
    batches = training_batches(trainer)
    now = batches.sequence_length, batches.batch_size
    batches.sequence_length, batches.batch_size = at.sequence_length, at.batch_size
    try:
        return read(*_rows(trainer, at))
    finally:
        batches.sequence_length, batches.batch_size = now


def _by_end_of_text(ids: Tensor, data: Any) -> list[Place]:
    end = data.end_of_text_id if isinstance(data, MarksEndOfText) else None
    found = []
    for row, tokens in enumerate(ids.tolist()):
        begin = 0
        for column, token in enumerate(tokens, 1):
            if token == end or column == len(tokens):
                found.append(Place(row, begin, column - begin, -1, 0))
                begin = column
    return found


def only(
    micro_batches: Sequence[Mapping[str, Tensor]], documents: Sequence[Document], rank: int
) -> list[Any]:
    """Returns micro-batches of a rank in which only the tokens of some documents have labels."""
    result = []
    for number, batch in enumerate(micro_batches):
        labels = torch.full_like(batch["labels"], IGNORED_LABEL)
        for part in (part for document in documents for part in document):
            if (part.rank, part.micro_batch) == (rank, number):
                row, begin, count = part.place[:3]
                labels[row, begin : begin + count] = batch["labels"][row, begin : begin + count]
        result.append({**batch, "labels": labels})
    return result


class _AsksForNorm(Callback):
    """Has the norm of the gradients computed while there are gradients, and before `trainer.gradient_clip_val`."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        pl_module.gradient_norm(optimizer)


def measure(trainer: Trainer, micro_batches: Sequence[Any]) -> Measured:
    """Makes a trial step on micro-batches; called on every rank."""
    module: Any = trainer.lightning_module
    with trial(trainer, batches=map(copy, micro_batches)) as steps:
        trainer.callbacks = [*trainer.callbacks, _AsksForNorm()]  # type: ignore[attr-defined]
        loss = float(next(steps))
        norm = float(module.gradient_norm(trainer.optimizers[0]))
    return Measured(loss, norm)


def update_norms(
    trainer: Trainer, micro_batches: Sequence[Any], group_of: Callable[[str], str]
) -> dict[str, float]:
    """Returns the norm of what a trial step changes of each group of weights, of all ranks; called on every rank."""
    module: Any = trainer.lightning_module
    reshard(module)
    groups: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in module.network.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(group_of(name), {})[name] = parameter
    squares = ShardedSquares(groups, module.device, trainer.strategy)
    before = [weight.clone() for weight in squares.weights()]
    with trial(trainer, batches=map(copy, micro_batches)) as steps:
        next(steps)
        sums = squares.sums([now - old for now, old in zip(squares.weights(), before, strict=True)])
    if trainer.world_size > 1:
        sums = trainer.strategy.reduce(sums, reduce_op="sum")  # type: ignore[assignment]
    return dict(zip(squares.groups, sums.sqrt().tolist(), strict=True))


def guilty(
    trainer: Trainer, micro_batches: Sequence[Any], documents: Sequence[Document], usual: Measured, by: str
) -> tuple[Document | None, int]:
    """Finds the document without which a step is an ordinary one, by trial steps on halves of the documents.

    Args:
        trainer: The trainer, between two optimizer steps, best before the spike.
        micro_batches: Those of the step, of this rank.
        documents: Those of the step, of all ranks.
        usual: An ordinary step.
        by: What makes the step an outlier, "loss" or "norm".

    Returns:
        The document, or None if no single one accounts for half of what the step is above an ordinary one; and how many
        trial steps it took.
    """
    rank, trials = training_batches(trainer).rank, 0

    def score(chosen: Sequence[Document]) -> float:
        nonlocal trials
        trials += 1
        value = getattr(measure(trainer, only(micro_batches, chosen, rank)), by)
        return value if value == value else float("inf")

    left = list(documents)
    while len(left) > 1:
        half = _middle(left)
        left = left[:half] if score(left[:half]) >= score(left[half:]) else left[half:]
    if not left:
        return None, trials
    rest = [document for document in documents if document is not left[0]]
    whole, without = score(documents), score(rest) if rest else getattr(usual, by)
    accounts = whole - without >= (whole - getattr(usual, by)) / 2 > 0 or without < whole == float("inf")
    return (left[0] if accounts else None), trials


def _middle(documents: Sequence[Document]) -> int:
    """Returns where to cut a list so that both parts have about as many tokens."""
    sizes = [sum(part.place.tokens for part in document) for document in documents]
    total, seen = sum(sizes), 0
    for index, size in enumerate(sizes[:-1], 1):
        seen += size
        if 2 * seen >= total:
            return index
    return len(documents) - 1
