"""Answers that are preferred to others, or that were found good or bad, for fine-tuning on preferences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from core.errors import ConfigError
from core.technique import technique
from datamodules.packing.grouped import Row
from datamodules.records.chat_datamodule import ChatDataModule
from datamodules.records.chats import Rendered, WrongRecord, field, plain, renderer_of, side_of, tools_of
from datamodules.records.encoding import TextEncoder
from datamodules.records.labels import number_of
from datamodules.records.preferences import dialogue, is_dialogue, last_turn, split_prompt
from datamodules.records.record_batches import Arrays, RecordBatches
from datamodules.records.record_files import Placed, Record
from datamodules.records.record_store import Encoded, RecordStore
from datamodules.records.templates import find_template
from toolkit.references import RECORDS, REFERENCE


@technique(
    paper="Bai et al., arXiv:2204.05862 (pairs of dialogues); DPO, arXiv:2305.18290; KTO, arXiv:2402.01306, section 4 (single "
    "answers)",
    offers=("exact_resume", "preference_pairs"),
)
class PreferenceDataModule(ChatDataModule):
    """Pairs of answers to a prompt, the chosen and the rejected one, or single answers that are desirable or not.

    A pair is a record with `chosen` and `rejected`, and

    - `prompt`: a text, or a list of messages; the answers are alike;
    - no prompt: two lists of messages, or two texts of `Human:` and `Assistant:` in turn as in Anthropic's hh-rlhf. The
      prompt is what both have in common.

    A batch of B pairs has 2 B rows: row 2 i is the chosen answer of pair i with its prompt, row 2 i + 1 the rejected one.
    `batch_size` counts pairs, and a batch that is split is split after an even number of rows. `input_ids`, `labels`,
    `document_ids` (-1 in padding) and `position_ids` are (2 B, T), int64; labels are -100 in the prompt. Where records have a
    number `margin`, by which the chosen answer should be better, `margin` (2 B, T), float32, holds it at each position of both.
    `records` has the number of the row's record, and `reference` the log-probability of the row's labels once
    ReferenceLogProbabilities has computed it, both at each position.

    A single answer (`paired: false`) is a record with `prompt`, `completion` and `label`, true or false. Row 2 i is the answer;
    row 2 i + 1 is the same prompt with the answer of the record before it in the files, from which KTO estimates how far the
    network has moved. `desirable` (2 B, T), bool, holds the label at each of their positions.

    T is the longest row's length, rounded up to 8. A record of which one row is too long is left out, or both rows are cut.

    Args:
        template: As for InstructionDataModule.
        paired: Whether records are pairs, or single answers.

    Raises:
        ConfigError: If there is no template, or no such file.

    Example:
        data:
          class_path: PreferenceDataModule
          init_args:
            source: pairs.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 1024
            batch_size: 4
    """

    sequences, values = 2, 1

    def __init__(self, *args: Any, template: str | None = None, paired: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.template, self.paired = find_template(template, self.tokenizer), paired
        self.references: dict[str, torch.Tensor] = {}
        self._before: tuple[np.ndarray, np.ndarray] | None = None

    def options(self) -> Mapping[str, Any]:
        """Returns the template, and whether records are pairs."""
        return {"template": self.described_template(), "paired": self.paired} | (
            {"margin": "margin"} if self.paired else {"rows": 2}
        )

    def begin(self, encoder: TextEncoder, records: Iterable[Placed]) -> None:
        """Takes the encoder for texts of users.

        Raises:
            ConfigError: If the special tokens of ChatML are none of the tokenizer's.
        """
        self._encoder = encoder.prompts
        self._renderer = self.template and renderer_of(
            self.template, encoder.prompts, ("assistant",), last_only=False
        )
        self._before = None

    def encode(self, record: Record) -> tuple[list[Rendered], list[float]]:
        """Returns the texts of a record, and the margin of a pair, or whether a single answer is desirable."""
        if not self.paired:
            label = field(record, "label", bool)
            return [
                self._rendered(record, {"prompt": record.get("prompt"), "answer": record.get("completion")})
            ], [float(label)]
        sides = split_prompt(record)
        texts = [self._rendered(record, sides | {"answer": sides[name]}) for name in ("chosen", "rejected")]
        if texts[0] == texts[1]:
            raise WrongRecord("chosen and rejected are the same", "once the chat template has rendered them")
        return texts, [0.0 if record.get("margin") is None else number_of(record, "margin")]

    def _rendered(self, record: Record, sides: Mapping[str, Any]) -> Rendered:
        if not self._renderer:
            return plain(self._encoder, field(sides, "prompt"), field(sides, "answer"))
        prompt = (
            dialogue(sides["prompt"]) if is_dialogue(sides["prompt"]) else side_of(sides, "prompt", "user")
        )
        answer = sides["answer"]
        answer = last_turn(answer) if is_dialogue(sides["prompt"]) else side_of(sides, "answer", "assistant")
        return self._renderer.render([*prompt, *answer], tools_of(record), first=len(prompt))

    def finish(
        self, encoder: TextEncoder, found: Sequence[tuple[list[Rendered], list[float]]]
    ) -> Iterator[Encoded]:
        """Yields the sequences of each record, if all of them have labels."""
        encoded = iter(encoder.encode([text for texts, _ in found for text in texts]))
        records = [([next(encoded) for _ in texts], values) for texts, values in found]
        usable = [all((labels >= 0).any() for _, labels in sequences) for sequences, _ in records]
        if not self.paired and self._before is None:
            self._before = next((records[n][0][0] for n in reversed(range(len(records))) if usable[n]), None)
        for (sequences, values), use in zip(records, usable, strict=True):
            if use and not self.paired:
                (own,), other = sequences, self._before
                assert other is not None
                sequences, self._before = [own, with_answer_of(other, own)], own
            yield Encoded(sequences if use else [], values)

    def setup(self, stage: str | None = None) -> None:
        """Maps the encoded records; a run of training forgets the references of an earlier one."""
        super().setup(stage)
        if stage == "fit":
            self.references = {}

    def packed(self, split: str, **order: Any) -> RecordBatches:
        """Returns the batches of a split."""
        found = super().packed(split, **order)
        named = "desirable"
        if self.paired:
            named = "margin" if self._stores[split].all_values().any() else ""
        found.further = Further(split, self.references, named)
        return found

    def every_record(self) -> Iterator[tuple[str, tuple[int, int], Iterable[Any]]]:
        """Yields each split with its records and rows of a record, and this rank's batches of it, each record once."""
        for split, store in self._stores.items():
            yield split, (store.number_of_documents, store.sequences), self._loader(split, pad=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and the references."""
        return super().state_dict() | ({"references": dict(self.references)} if self.references else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over position and references.

        Raises:
            ConfigError: If the data has other records than the checkpoint's.
        """
        super().load_state_dict(state_dict)
        found = state_dict.get("references", {})
        for split, store in self._stores.items() if found else ():
            here = (store.number_of_documents, store.sequences)
            if (there := tuple(getattr(found.get(split), "shape", ()))) != here:
                raise ConfigError(
                    f"The checkpoint has reference log-probabilities of {there} records of {split} and rows of each, the data has "
                    f"{here}.\nTake data.source and data.validation_fraction from the run that wrote it."
                )
        self.references.clear()
        self.references.update(found)


class Further:
    """Adds to a batch the numbers of its records, their references if these are known, and margins or labels.

    Args:
        split: Whose records these are.
        references: Of the data module: they may become known later.
        named: What the number is that is stored of a record: margin, desirable or nothing.
    """

    def __init__(self, split: str, references: Mapping[str, torch.Tensor], named: str) -> None:
        self.split, self.references, self.named = split, references, named

    def __call__(self, store: RecordStore, rows: Sequence[Row], batch: Arrays) -> Arrays:
        """Returns a batch with these arrays, each (2 B, T) and the same at all positions of a row."""
        here = np.array([row[0][0] if row else -1 for row in rows], np.int64)
        shape, each = batch["labels"].shape, store.sequences

        def spread(values: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(np.broadcast_to(values[:, None], shape))

        more = {RECORDS: spread(here.repeat(each))}
        if (table := self.references.get(self.split)) is not None:
            more[REFERENCE] = spread(
                np.where(here[:, None] < 0, np.float32(0), np.from_dlpack(table)[here]).flatten()
            )
        if self.named:
            first = np.array([store.values(max(record, 0))[0] for record in here.tolist()], np.float32)
            stored = spread(first.repeat(each))
            values = np.where(batch["document_ids"] >= 0, stored, np.float32(0))
            more[self.named] = values > 0 if self.named == "desirable" else values
        return batch | more


def with_answer_of(other: tuple[Any, Any], own: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and labels of the prompt of one text with the answer of another."""
    (other_ids, other_labels), (ids, labels) = other, own
    begin, prompt = (int(np.argmax(np.asarray(found) >= 0)) for found in (other_labels, labels))
    return (
        np.concatenate((ids[: prompt + 1], other_ids[begin + 1 :])),
        np.concatenate((labels[:prompt], other_labels[begin:])),
    )
