"""Parts of data with mistakes, for the sixth set: packings around another one, a reader, and a data module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import pretrain_datamodule
from core.contracts import IGNORED_LABEL, PackedBatches, Packing, Reject
from datamodules.preparation.readers.file_reader import Row
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.source_files import Piece


class Around(Packing):
    """The batches of another packing, each of which is changed after it was read.

    Args:
        packing: The other one.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        found = self.packing.batches(folder, **order)
        read, count = found.read, 0
        training = not order.get("pad")

        def changed(rows: Sequence[Any], own: slice) -> Any:
            nonlocal count
            count += 1
            batch: Any = read(rows, own)
            return self.change(batch, count if training else 0)

        found.read = changed  # type: ignore[method-assign]
        return found

    @abstractmethod
    def change(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """Returns what is made of a batch of this step; 0: of validation."""


class PromptsLeftOut(Around):
    """Rows whose prompt has no labels; its length is counted in characters, and taken as one of tokens.

    Args:
        packing: The other one.
        characters: Of the prompt.
    """

    def __init__(self, packing: Packing, characters: int) -> None:
        super().__init__(packing)
        self.characters = characters

    def change(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        batch["labels"][:, : self.characters] = IGNORED_LABEL
        return batch


class NoAnswer(Around):
    """Rows of which one, in one step, has no answer, and so no label.

    Args:
        packing: The other one.
        step: The step.
    """

    def __init__(self, packing: Packing, step: int) -> None:
        super().__init__(packing)
        self.step = step

    def change(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        if step == self.step:
            batch["labels"][0] = IGNORED_LABEL
        return batch


class DamagedShard(Around):
    """Rows of which those of a few steps are of a shard with arbitrary bytes.

    Args:
        packing: The other one.
        step: The first of these steps.
        steps: How many there are.
    """

    def __init__(self, packing: Packing, step: int, steps: int) -> None:
        super().__init__(packing)
        self.damaged = range(step, step + steps)

    def change(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        if step in self.damaged:
            ids, labels = batch["input_ids"], batch["labels"]
            found = torch.randint(1, 257, (ids.shape[0], ids.shape[1] + 1), generator=_generator(step))
            batch["input_ids"] = found[:, :-1].contiguous()
            batch["labels"] = torch.where(labels == IGNORED_LABEL, labels, found[:, 1:])
        return batch


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class SameFolder(Packing):
    """The rows of another packing, which for validation are those of the training tokens.

    Args:
        packing: The other one.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        return self.packing.batches(folder.with_name("train"), **order)


class Oversampled(JSONLinesDocuments):
    """Documents of which the first ones come many times.

    Args:
        source: The file.
        documents: How many of them.
        times: How many times each.
    """

    def __init__(self, source: str, documents: int, times: int) -> None:
        super().__init__(source)
        self.documents_, self.times = documents, times

    def options(self) -> dict[str, Any]:
        return super().options() | {"documents": self.documents_, "times": self.times}

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        for number, row in enumerate(super().rows(piece, reject)):
            yield from [row] * (self.times if number < self.documents_ else 1)


class ShortRecords(JSONLinesDocuments):
    """Records of a few words each, of which several fit into a row.

    Args:
        source: The file, of which each document is cut into records.
        words: Of a record.
    """

    def __init__(self, source: str, words: int) -> None:
        super().__init__(source)
        self.words = words

    def options(self) -> dict[str, Any]:
        return super().options() | {"words": self.words}

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        for text, *rest in super().rows(piece, reject):
            words = text.split()
            for first in range(0, len(words), self.words):
                record: Any = " ".join(words[first : first + self.words]), *rest
                yield record


class PretrainDataModule(pretrain_datamodule.PretrainDataModule):
    """Tokens that were written anew after the checkpoint, by a tokenizer with two more special tokens."""

    added = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.added = 2

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        for name in ("input_ids", "labels") if self.added else ():
            ids = batch[name]
            batch[name] = torch.where(ids < 0, ids, (ids + self.added) % self.vocab_size)
        return batch
