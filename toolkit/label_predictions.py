"""What an objective over labels finds in the texts of records, which are read as the run read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network
from core.errors import ConfigError, nearest
from toolkit.class_labels import Predicts
from toolkit.labelled_texts import LabelledTexts

__all__ = ["LabelPredictions"]


class LabelPredictions:
    """Finds the class or number of texts.

    Args:
        network: In eval mode, on any device.
        objective: As it was trained with it, in eval mode.
        tokenizer_json: The tokenizer.
        end_of_text_id: What ends a text; None: nothing does.
        form: How the run read texts: `texts` of what a checkpoint keeps of LabelledDataModule.

    Attributes:
        cut: How many texts were longer than the network takes.
        most: Tokens of the longest text that is not cut; None: of any.
    """

    def __init__(
        self,
        network: Network,
        objective: Predicts,
        tokenizer_json: str,
        end_of_text_id: int | None,
        form: Mapping[str, Any],
    ) -> None:
        self.network, self.objective, self.form = network, objective, form
        self.most, self.cut = network.max_sequence_length, 0
        self._texts = LabelledTexts(tokenizer_json, end_of_text_id or 0, form["position"], form["separator"])

    def predict(self, records: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Returns `prediction` and `probability` of each record; of words lists of both.

        Args:
            records: The place of each, for messages, and its fields; computed as one batch.

        Raises:
            ConfigError: If a record lacks a field, or it is no text.
        """
        encoded = self._texts.encode([self._text(*one) for one in records])
        rows = [self._row(*one) for one in encoded]
        self.cut += sum(self.most is not None and len(ids) > self.most for ids, _ in encoded)
        found = iter(self.objective.predict(self.network, self._batch(rows)))
        return [
            self._told([None if place is None else next(found) for place in places]) for _, places in rows
        ]

    def _text(self, place: str, record: Mapping[str, Any]) -> Any:
        """Returns the text, pair or list of words of a record."""
        names = [self.form[key] for key in ("text", "pair", "before") if self.form[key]]
        words = self.form["task"] == "words"
        for name in names:
            value = record.get(name)
            if name not in record:
                hint = nearest(name, set(record))
                raise ConfigError(
                    f'{place}: there is no field "{name}", which the run read texts from.{hint}\nIts fields: {", ".join(record)[:300]}.'
                )
            right = (
                isinstance(value, list) and all(isinstance(word, str) for word in value)
                if words
                else isinstance(value, str)
            )
            if not right:
                raise ConfigError(
                    f'{place}: the field "{name}" is no {"list of words" if words else "text"}.'
                )
        text = record[self.form["text"]]
        if self.form["before"]:
            text = f"{record[self.form['before']]}: {text}"
        return (text, record[self.form["pair"]]) if self.form["pair"] else text

    def _row(self, ids: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[int | None]]:
        """Returns ids and places of labels that fit into the network: the first tokens, and the last one."""
        if self.most is None or len(ids) <= self.most:
            return list(ids), list(places)
        last = self.most - 1
        if self.form["task"] == "words":
            return [*ids[:last], ids[-1]], [place if place < last else None for place in places]
        return [*ids[:last], ids[-1]], [min(place, last) for place in places]

    def _batch(self, rows: Sequence[tuple[list[int], list[int | None]]]) -> dict[str, Tensor]:
        shape = len(rows), max((1, *(len(ids) for ids, _ in rows)))
        ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        labels, documents = torch.full(shape, IGNORED_LABEL), torch.full(shape, -1)
        for row, (own, places) in enumerate(rows):
            ids[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
            positions[row, : len(own)] = torch.arange(len(own))
            documents[row, : len(own)] = 0
            labels[row, [place for place in places if place is not None]] = 0
        batch = {"input_ids": ids, "labels": labels, "document_ids": documents, "position_ids": positions}
        device = next(self.network.parameters()).device
        return {name: value.to(device) for name, value in batch.items()}

    def _told(self, found: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
        """Returns what is said of a record, given what was found at each of its labels."""
        if self.form["task"] != "words":
            return dict(found[0] or {}) if found else {"prediction": None}
        return {
            name: [None if one is None else one[name] for one in found]
            for name in ("prediction", "probability")
        }
