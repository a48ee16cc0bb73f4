"""Answers that are preferred to others, or that were found good or bad, for fine-tuning on preferences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from core.technique import technique
from datamodules.packing.grouped import Row
from datamodules.records.chats import Rendered, field, plain, renderer_of, side_of, tools_of
from datamodules.records.encoding import TextEncoder
from datamodules.records.labels import number_of
from datamodules.records.preferences import dialogue, is_dialogue, last_turn, split_prompt
from datamodules.records.record_batches import Arrays, RecordBatches
from datamodules.records.record_datamodule import RecordDataModule
from datamodules.records.record_files import Placed, Record
from datamodules.records.record_store import Encoded, RecordStore
from datamodules.records.templates import find_template


@technique(
    paper="Bai et al., arXiv:2204.05862 (pairs of dialogues); DPO, arXiv:2305.18290; KTO, arXiv:2402.01306, section 4 (single "
    "answers)",
    offers=("exact_resume", "preference_pairs"),
)
class PreferenceDataModule(RecordDataModule):
    """Pairs of answers to a prompt, the chosen and the rejected one, or single answers that are desirable or not.

    A pair is a record with `chosen` and `rejected`, and

    - `prompt`: a text, or a list of messages; the answers are alike;
    - no prompt: two lists of messages, or two texts of `Human:` and `Assistant:` in turn as in Anthropic's hh-rlhf. The
      prompt is what both have in common.

    A batch of B pairs has 2 B rows: row 2 i is the chosen answer of pair i with its prompt, row 2 i + 1 the rejected one.
    `batch_size` counts pairs, and a batch that is split is split after an even number of rows. `input_ids`, `labels`,
    `document_ids` (-1 in padding) and `position_ids` are (2 B, T), int64; labels are -100 in the prompt. Where records have a
    number `margin`, by which the chosen answer should be better, `margin` (2 B, T), float32, holds it at each position of both.

    A single answer (`paired: false`) is a record with `prompt`, `completion` and `label`, true or false. Then there is a row
    for each, and `desirable` (B, T), bool, holds its label at each of its positions.

    T is the longest row's length, rounded up to 8. A pair of which one answer is too long is left out, or both are cut.

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

    def __init__(self, *args: Any, template: str | None = None, paired: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.template, self.paired = find_template(template, self.tokenizer), paired
        self.sequences, self.values = (2 if paired else 1), 1

    def options(self) -> Mapping[str, Any]:
        """Returns the template, and whether records are pairs."""
        shown = (self.template.source, self.template.special) if self.template else None
        return {"template": shown, "paired": self.paired} | ({"margin": "margin"} if self.paired else {})

    def begin(self, encoder: TextEncoder, records: Iterable[Placed]) -> None:
        """Takes the encoder for texts of users.

        Raises:
            ConfigError: If the special tokens of ChatML are none of the tokenizer's.
        """
        self._encoder = encoder.prompts
        self._renderer = self.template and renderer_of(
            self.template, encoder.prompts, ("assistant",), last_only=False
        )

    def encode(self, record: Record) -> tuple[list[Rendered], list[float]]:
        """Returns the texts of a record, and the margin of a pair, or whether a single answer is desirable."""
        if not self.paired:
            label = field(record, "label", bool)
            return [
                self._rendered(record, {"prompt": record.get("prompt"), "answer": record.get("completion")})
            ], [float(label)]
        sides = split_prompt(record)
        return [self._rendered(record, sides | {"answer": sides[name]}) for name in ("chosen", "rejected")], [
            0.0 if record.get("margin") is None else number_of(record, "margin")
        ]

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
        for texts, values in found:
            sequences = [next(encoded) for _ in texts]
            usable = all((labels >= 0).any() for _, labels in sequences)
            yield Encoded(sequences if usable else [], values)

    def packed(self, split: str, **order: Any) -> RecordBatches:
        """Returns the batches of a split."""
        found = super().packed(split, **order)
        if not self.paired:
            found.further = with_desirable
        elif self._stores[split].values.any():
            found.further = with_margin
        return found


def with_margin(store: RecordStore, rows: Sequence[Row], batch: Arrays) -> Arrays:
    """Returns a batch of pairs with `margin`, (2 B, T); 0 in padding."""
    margins = np.array([store.values[row[0][0], 0] if row else 0.0 for row in rows], np.float32)
    return batch | {"margin": margins.repeat(2)[:, None] * (batch["document_ids"] >= 0)}


def with_desirable(store: RecordStore, rows: Sequence[Row], batch: Arrays) -> Arrays:
    """Returns a batch with `desirable`, (B, T) bool; false in padding."""
    desirable = np.array([bool(row) and store.values[row[0][0], 0] > 0 for row in rows])
    return batch | {"desirable": desirable[:, None] & (batch["document_ids"] >= 0)}
