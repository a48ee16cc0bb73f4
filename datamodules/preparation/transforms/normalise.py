"""Normalizes Unicode, white space and control characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pyarrow

from core.contracts import Transform
from core.technique import technique
from toolkit.arrow_columns import flags, strings

_LINE_ENDS = re.compile(r"\r\n?|[\v\f\x85\u2028\u2029]")
_SPACES = re.compile(r"[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_BLANK_LINES = re.compile(r"\n{3,}")
# control characters except white space, the byte order mark, noncharacters
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff\ufdd0-\ufdef\ufffe\uffff]")
_ASCII_CONTROL = bytes([*range(0x09), *range(0x0E, 0x20), 0x7F])
_UNUSUAL = re.compile(f"{_SPACES.pattern[:-1]}{_CONTROL.pattern[1:-1]}\\x85\\u2028\\u2029]")


@technique(paper="Unicode Standard Annex 15, unicode.org/reports/tr15: normalisation forms")
class Normalise(Transform):
    """Normalises Unicode, line ends, spaces and control characters of each document.

    In this order: control characters (except white space), byte order marks and noncharacters are removed; the
    Unicode form is applied; line ends (CR LF, CR, form feed, U+2028...) become a newline and spaces (no-break, thin,
    ideographic...) a plain one; spaces and tabs before a newline, and repeated empty lines, are removed. The
    transform is idempotent. Documents that become empty are dropped.

    Args:
        form: Unicode normalisation form. NFC keeps what a text says; NFKC also replaces ligatures, full-width
            letters and superscripts; None leaves characters as they are.
        whitespace: Whether spaces and newlines are normalised.
        control: Whether control characters are removed.
        lower: Whether letters are lower-cased.

    Example:
        data:
          init_args:
            transforms:
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
        """Returns the options and the version of the Unicode tables, which determine the forms."""
        return vars(self) | {"unicode": unicodedata.unidata_version}

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Normalises each text; drops the empty ones."""
        texts = [self.normalised(text) for text in batch["text"].to_pylist()]
        column = strings(texts)
        batch = batch.set_column(batch.schema.get_field_index("text"), "text", column)
        if "" in texts:
            drop("empty", [row for row, text in enumerate(texts) if not text])
            batch = batch.filter(flags([bool(text) for text in texts]))
        return batch

    def normalised(self, text: str) -> str:
        """Returns one document's text, normalised."""
        unusual = not text.isascii() and _UNUSUAL.search(text) is not None  # one pass for most texts
        if self.control and text.isascii():
            text = text.encode().translate(None, _ASCII_CONTROL).decode()
        elif self.control and unusual:
            text = _CONTROL.sub("", text)
        text = self._formed(text)
        if self.lower:
            text = self._formed(text.lower())  # lower-casing may change the form
        if self.whitespace:
            text = _single_spaced(text, unusual or self.form in ("NFKC", "NFKD"))
        return text

    def _formed(self, text: str) -> str:
        return unicodedata.normalize(self.form, text) if self.form and not text.isascii() else text


def _single_spaced(text: str, unusual: bool) -> str:
    if unusual or any(end in text for end in "\r\v\f"):
        text = _SPACES.sub(" ", _LINE_ENDS.sub("\n", text))
    if " \n" in text or "\t\n" in text:
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    text = text.rstrip(" \t\n").lstrip("\n")
    return _BLANK_LINES.sub("\n\n", text) if "\n\n\n" in text else text
