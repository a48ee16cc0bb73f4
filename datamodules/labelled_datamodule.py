"""Texts with labels, for classification, regression and the classification of words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from core.contracts import IGNORED_LABEL
from core.errors import ConfigError, nearest
from core.technique import technique
from datamodules.preparation.tokenizers.library_tokenizer import threads
from datamodules.records.chats import WrongRecord, field
from datamodules.records.encoding import TextEncoder
from datamodules.records.glue import FORMS, Form
from datamodules.records.labels import AtLabels, LabelNames, class_weights, found_names, number_of
from datamodules.records.record_batches import RecordBatches
from datamodules.records.record_datamodule import RecordDataModule
from datamodules.records.record_files import Placed, Record, RecordFiles
from datamodules.records.record_store import Encoded
from toolkit.class_labels import give_labels
from toolkit.labelled_texts import LabelledTexts

TASKS = ("classes", "values", "several", "words")
POSITIONS = ("last", "first")
BALANCES = ("sample", "weights")


@technique(
    paper="GPT, Radford et al. 2018, section 3.3 (the last token); BERT, arXiv:1810.04805, section 4 (the first; first pieces of "
    "words); GLUE, arXiv:1804.07461",
    offers=("exact_resume", "labels"),
)
class LabelledDataModule(RecordDataModule):
    """Texts or pairs of texts whose labels are at one token, or at the first token of each word.

    `labels` (B, T) is the id of the class at that token and -100 elsewhere, so that a network's output there is trained, on
    any strategy. Of `task`:

    - `classes`: one class for a record;
    - `values`: a number; `labels` is 0 at its token, and `targets` (B, T), float32, has the number there;
    - `several`: a list of classes; `labels` is 0 at its token, and `targets` (B, T, C), float32, has 1 for each of them;
    - `words`: the text is a list of words and the label a list of as many classes, at the first token of each word.

    A text begins and ends as the tokenizer's post-processor says, such as with [CLS] and [SEP], a pair too. Where it puts nothing
    behind a text, the end-of-text token ends it, and `separator` is between the texts of a pair.

    Args:
        task: What a label is.
        form: A data set whose fields and labels are known: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli (.tsv), boolq, cb,
            copa, multirc, record, super_rte, wic, wsc (.jsonl). Each answer of multirc, and each entity of record, is a
            record; `group_by: paragraph` or `passage` keeps those of a text in one split. None: the fields named here.
        text_field: Field of the text.
        pair_field: Field of the second text; None: there is none.
        label_field: Field of the label.
        labels: Names of the classes, in the order of their ids. None: those of the training records, sorted.
        position: Where the label of a text is: at its `last` token, for decoders, or its `first`, for encoders such as BERT.
        separator: Between the texts of a pair, where the tokenizer has nothing there.
        balance: For training on classes of unequal size: `sample` takes as many records of each class, of small ones more than
            once in an epoch; `weights` adds `weights` (B, T), float32, with n / (C n_c) at the label, of n records in C classes,
            n_c of this one. None: neither.
        pack: Whether several records share a row.

    Attributes:
        label_names: The classes, after `setup`; empty for `values`.

    Raises:
        ConfigError: If a name is unknown, or arguments do not go together.

    Example:
        data:
          class_path: LabelledDataModule
          init_args:
            source: reviews.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 256
            batch_size: 16
    """

    def __init__(
        self,
        *args: Any,
        task: str = "classes",
        form: str | None = None,
        text_field: str = "text",
        pair_field: str | None = None,
        label_field: str = "label",
        labels: Sequence[str] | None = None,
        position: str = "last",
        separator: str = "\n",
        balance: str | None = None,
        pack: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        known = {"task": (task, TASKS), "position": (position, POSITIONS)}
        known |= {"form": (form, tuple(FORMS))} if form else {}
        known |= {"balance": (balance, BALANCES)} if balance else {}
        for name, (value, choices) in known.items():
            if value not in choices:
                raise ConfigError(
                    f"data.{name} is {value!r}; it is one of {', '.join(choices)}.{nearest(str(value), choices)}"
                )
        self.form = (
            FORMS[form]
            if form
            else Form(text_field, pair_field, label_field, tuple(labels) if labels else None)
        )
        self.task = "values" if form and self.form.names is None else task
        self.columns, self.position, self.separator = self.form.columns, position, separator
        self.balance, self.pack = balance, pack
        if balance and self.task != "classes":
            raise ConfigError(f"data.balance={balance} is for task=classes, not {self.task}.")
        if balance == "sample" and not self.shuffle:
            raise ConfigError("data.balance=sample takes records in random order: set data.shuffle=true.")
        if self.task == "several" and not self.form.names:
            raise ConfigError("data.task=several needs the names of all classes: data.labels=[...].")
        self.values = {"values": 1, "several": len(self.form.names or ())}.get(self.task, 0)
        self.label_names: list[str] = []

    def files_of(self, source: str) -> RecordFiles:
        """Returns the records of a source, in the fields of `form`."""
        return RecordFiles(source, self.columns, self.form.spread)

    def options(self) -> Mapping[str, Any]:
        """Returns what decides the ids and labels of a record."""
        form = self.form._replace(spread=self.form.spread and self.form.spread.__name__)  # type: ignore[arg-type]
        return {"task": self.task, "form": form, "position": self.position, "separator": self.separator}

    def learnt(self) -> Mapping[str, Any]:
        """Returns the classes."""
        return {"label_names": self.label_names}

    def begin(self, encoder: TextEncoder, records: Iterable[Placed]) -> None:
        """Finds the classes.

        Raises:
            ConfigError: If there are fewer than two.
        """
        self._texts = LabelledTexts(encoder.tokenizer_json, encoder.end, self.position, self.separator)
        names = self.form.names
        if names is None and self.task != "values":
            names = tuple(found_names(self._labels(records), self.form.label))
        self.label_names = list(names or ())
        self._names = LabelNames(self.label_names, positions=self.form.names is not None)

    def _labels(self, records: Iterable[Placed]) -> Iterator[Any]:
        for _, record in records:
            found = record.get(self.form.label)
            for label in found if isinstance(found, list) else [found]:
                if isinstance(label, str | int):
                    yield label

    def encode(self, record: Record) -> tuple[Any, list[int], list[float]]:
        """Returns the text or pair of texts, its labels with their characters' places, and its numbers."""
        form = self.form
        if self.task == "words":
            return self._words(record)
        text = field(record, form.text)
        if form.before:
            text = f"{field(record, form.before)}: {text}"
        given = (text, field(record, form.pair)) if form.pair else text
        if self.task == "values":
            return given, [0], [number_of(record, form.label)]
        if self.task == "several":
            chosen = {self._names.id(label) for label in field(record, form.label, list)}
            return given, [0], [float(number in chosen) for number in range(self.values)]
        label = record.get(form.label)
        return given, [self._names.id(field(record, form.label) if label is None else label)], []

    def _words(self, record: Record) -> tuple[Any, list[int], list[float]]:
        words, labels = field(record, self.form.text, list), field(record, self.form.label, list)
        if len(words) != len(labels) or not all(isinstance(word, str) and word.strip() for word in words):
            raise WrongRecord(
                "words and labels do not fit",
                f"{len(words)} words, {len(labels)} labels, each word with a character",
            )
        return words, [self._names.id(label) for label in labels], []

    def finish(
        self, encoder: TextEncoder, found: Sequence[tuple[Any, list[int], list[float]]]
    ) -> Iterator[Encoded]:
        """Yields the ids of each record, with its labels at their tokens."""
        with threads():
            encoded = self._texts.encode([given for given, _, _ in found])
        for (ids, places), (_, labels, values) in zip(encoded, found, strict=True):
            at = np.full(len(ids), IGNORED_LABEL, np.int64)
            if len(places) == len(labels) and ids:
                at[places] = labels
            yield Encoded([(np.array(ids, np.int64), at)] if (at >= 0).any() else [], values)

    def setup(self, stage: str | None = None) -> None:
        """Reads the classes; see the base class."""
        super().setup(stage)
        self.label_names = list(self.manifest["learnt"]["label_names"])
        if self.trainer is not None and self.label_names:
            give_labels(self.trainer.lightning_module, self.label_names)

    def packed(self, split: str, **order: Any) -> RecordBatches:
        """Returns the batches of a split; those for training are balanced."""
        found = super().packed(split, **order)
        found.keep_end = self.task != "words"
        if self.task in ("values", "several"):
            found.further = AtLabels("targets", single=self.task == "values")
        if self.balance and split == "train":
            classes = self._stores[split].label_of_each()
            if self.balance == "weights":
                counts = np.bincount(classes, minlength=len(self.label_names))
                found.further = AtLabels("weights", class_weights(counts))
            else:
                found.members = [np.flatnonzero(classes == kind) for kind in np.unique(classes)]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, the tokenizer, the classes, and how texts are read: enough to find the class of a text."""
        texts = {"task": self.task, "position": self.position, "separator": self.separator}
        fields = {"text": self.form.text, "pair": self.form.pair, "before": self.form.before}
        return super().state_dict() | {"label_names": self.label_names, "texts": texts | fields}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position over.

        Raises:
            ConfigError: If the ids of classes mean others than in the checkpoint.
        """
        super().load_state_dict(state_dict)
        if (then := state_dict.get("label_names", self.label_names)) != self.label_names:
            raise ConfigError(
                f"The checkpoint's classes are {', '.join(then)[:200]}; those of the data are {', '.join(self.label_names)[:200]}.\n"
                "Name them in their order: data.labels=[...]."
            )
