"""The files of GLUE and SuperGLUE: which fields have the texts and the label, and what the labels are called."""

from __future__ import annotations

from typing import NamedTuple

from datamodules.records import nested
from datamodules.records.record_files import Spread


class Form(NamedTuple):
    """Where a data set has its texts and labels.

    Attributes:
        text: Field of the text.
        pair: Field of the second text; None: there is none.
        label: Field of the label.
        names: Of the classes, in the order of their ids; None: the label is a number.
        columns: Names of the fields where no line of the file names them.
        before: Field that is put in front of the text.
        spread: Yields the records with these fields that one of the file holds; None: it has them itself.
    """

    text: str
    pair: str | None
    label: str
    names: tuple[str, ...] | None
    columns: tuple[str, ...] | None = None
    before: str | None = None
    spread: Spread | None = None


ENTAILMENT = ("entailment", "not_entailment")
BOOLEAN = ("false", "true")

FORMS = {
    "cola": Form(
        "sentence", None, "label", ("unacceptable", "acceptable"), ("source", "label", "mark", "sentence")
    ),
    "sst2": Form("sentence", None, "label", ("negative", "positive")),
    "mrpc": Form("#1 String", "#2 String", "Quality", ("not_equivalent", "equivalent")),
    "qqp": Form("question1", "question2", "is_duplicate", ("not_duplicate", "duplicate")),
    "stsb": Form("sentence1", "sentence2", "score", None),
    "mnli": Form("sentence1", "sentence2", "gold_label", ("entailment", "neutral", "contradiction")),
    "qnli": Form("question", "sentence", "label", ENTAILMENT),
    "rte": Form("sentence1", "sentence2", "label", ENTAILMENT),
    "wnli": Form("sentence1", "sentence2", "label", ("not_entailment", "entailment")),
    "boolq": Form("question", "passage", "label", BOOLEAN),
    "cb": Form("premise", "hypothesis", "label", ("entailment", "contradiction", "neutral")),
    "copa": Form("text", None, "label", ("choice1", "choice2"), spread=nested.copa),
    "multirc": Form("paragraph", "answer", "label", BOOLEAN, spread=nested.multirc),
    "record": Form("passage", "query", "label", BOOLEAN, spread=nested.record),
    "super_rte": Form("premise", "hypothesis", "label", ENTAILMENT),
    "wic": Form("sentence1", "sentence2", "label", BOOLEAN, before="word"),
    "wsc": Form("text", "name", "label", BOOLEAN, spread=nested.wsc),
}
"""Name -> its form: .tsv files as gluebenchmark.com has them, .jsonl files as super.gluebenchmark.com does."""
