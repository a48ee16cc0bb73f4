"""Brings text that looks the same to the same characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pyarrow

from core.contracts import Transform
from core.technique import technique

_LINE_ENDS = re.compile(r"\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]")
_SPACES = re.compile(r"[^\S\n\t]")
_TRAILING = re.compile(r"[ \t]+(?=\n|\Z)")
_BLANK_LINES = re.compile(r"\n{3,}")
# Cc but tab and newline; the byte order mark; what has no meaning in text: noncharacters
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff\ufdd0-\ufdef\ufffe\uffff]")


@technique(paper="Unicode Standard Annex 15, unicode.org/reports/tr15: normalisation forms")
class Normalise(Transform):
    """Normalises unicode, line ends, spaces and control characters of each document.

    In this order: every line end (CR LF, CR, form feed, U+2028...) becomes one newline; control characters but
    tab and newline, byte order marks and noncharacters go; the unicode form is applied; other spaces (no-break,
    thin, ideographic...) become a plain one, those at line ends go, three or more newlines become two. Applying it
    twice is applying it once. Documents that are left empty are dropped.

    Args:
        form: Unicode normalisation form. NFC keeps what a text says; NFKC also replaces ligatures, full-width
            letters and superscripts; None leaves characters as they are.
        whitespace: Whether spaces and newlines are normalised.
        control: Whether control characters are taken out.
        lower: Whether letters are lower-cased.

    Example:
        data:
          init_args:
            stages:
              - class_path: Normalise
                init_args: {form: NFC, lower: false}
    """

    def __init__(
        self,
        form: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = "NFC",
        whitespace: bool = True,
        control: bool = True,
        lower: bool = False,
    ) -> None:
        self.form, self.whitespace, self.control, self.lower = form, whitespace, control, lower

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options, and the version of the unicode tables, which decide the forms."""
        return vars(self) | {"unicode": unicodedata.unidata_version}

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[[str, int], None]) -> pyarrow.RecordBatch:
        """Normalises each text; drops the empty ones."""
        texts = [self.normalised(text) for text in batch["text"].to_pylist()]
        column = pyarrow.array(texts, pyarrow.large_string())
        batch = batch.set_column(batch.schema.get_field_index("text"), "text", column)
        if "" in texts:
            drop("empty", texts.count(""))
            batch = batch.filter(pyarrow.array([bool(text) for text in texts]))
        return batch

    def normalised(self, text: str) -> str:
        """Returns one document's text, normalised."""
        if self.lower:
            text = text.lower()  # first: it may decompose what the form then composes
        if self.whitespace and not text.isascii() or "\r" in text or "\f" in text or "\v" in text:
            text = _LINE_ENDS.sub("\n", text) if self.whitespace else text
        if self.control:
            text = _CONTROL.sub("", text)
        if self.form and not text.isascii():
            text = unicodedata.normalize(self.form, text)
        if self.whitespace:
            text = text if text.isascii() else _SPACES.sub(" ", text)
            text = _BLANK_LINES.sub("\n\n", _TRAILING.sub("", text)).strip("\n")
        return text
