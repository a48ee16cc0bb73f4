"""Reads translations from pairs of files with a sentence a line, tables and .sgm files, as WMT publishes them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from core.contracts import Reject
from core.errors import ConfigError
from datamodules.preparation.readers import json_lines_documents
from datamodules.preparation.readers.compressed_files import with_codecs
from datamodules.preparation.readers.opened_files import LONGEST, opened
from datamodules.preparation.readers.source_files import SourceFiles
from datamodules.records.record_files import READERS, Placed, RecordFiles, Spread, spread_out

_UNEQUAL = "the two files have another number of lines"


class ParallelFiles(RecordFiles):
    """Translations; a record is `{"translation": {"de": ..., "en": ...}}`, as in Hugging Face's sets of WMT.

    Read are, for the languages de and en, `NAME.de` beside `NAME.en` (also .gz and .zst); `NAME.de.sgm` beside
    `NAME.en.sgm`, where -src in a name becomes -ref, or the other way around; and `NAME.de-en.tsv` or `NAME.en-de.tsv`
    (also .gz and .zst), whose first two columns are these languages.

    Args:
        source: A file of the first language, a table, or a glob.
        languages: Their codes.
        spread: As for :class:`RecordFiles`.

    Raises:
        ConfigError: If there is no such file, or none of the other language beside it.
    """

    def __init__(self, source: str, languages: tuple[str, ...], spread: Spread) -> None:
        self.source, self.languages, self._spread = source, languages, spread
        self.files = SourceFiles(source, _suffixes(languages))
        self._pairs = [(path, self._partner(path)) for path in self.files.paths]
        self.files.restrict([path for pair in self._pairs for path in pair if path is not None])

    def _partner(self, path: Path) -> Path | None:
        """Returns the file of the other language; None: a table has both."""
        one, other = self.languages
        if ".tsv" in path.name.lower():
            return None
        begin, end = re.fullmatch(
            rf"(.*)\.{re.escape(one)}(\.sgm|\.gz|\.zst|)", path.name, flags=re.I | re.S
        ).groups()  # type: ignore[union-attr]  # that is how SourceFiles chose it
        if end.lower() == ".sgm":
            begin = re.sub("-(src|ref)$", lambda found: "-ref" if found[1] == "src" else "-src", begin)
        partner = path.with_name(f"{begin}.{other}{end}")
        if not partner.is_file():
            raise ConfigError(
                f"{path}: there is no {partner.name} beside it, with the translations into the other language."
            )
        return partner

    def records(self, reject: Reject) -> Iterator[Placed]:
        """Yields the pairs of sentences; rejects those with one side, and what follows where the files do not fit."""
        for path, partner in self._pairs:
            source = self.files.source_of(path)
            yield from spread_out(
                self._translations(path, partner, source, reject), self._spread, source, reject
            )

    def _translations(
        self, path: Path, partner: Path | None, source: str, reject: Reject
    ) -> Iterator[Placed]:
        for number, sides in enumerate(self._sides(path, partner, source, reject), 1):
            place = f"{path}:{number}"
            if None in sides:
                reject(source, place, _UNEQUAL, f"the other one is {partner}")
                return
            if all(sides):
                yield place, {"translation": dict(zip(self.languages, sides, strict=True))}
            elif any(sides):
                reject(source, place, "one side of a translation is blank", "")

    def _sides(
        self, path: Path, partner: Path | None, source: str, reject: Reject
    ) -> Iterator[tuple[str | None, str | None]]:
        if partner is None:
            return self._table(path, source, reject)
        read = _segments if path.name.lower().endswith(".sgm") else _lines
        return zip_longest(read(path, source, reject), read(partner, source, reject))

    def _table(self, path: Path, source: str, reject: Reject) -> Iterator[tuple[str | None, str | None]]:
        one, other = self.languages
        turned = f"{other}-{one}.tsv" in path.name.lower()
        for line in _lines(path, source, reject):
            cells = [cell.strip() for cell in line.split("\t")]
            first, second = cells[:2] if len(cells) > 1 else (cells[0], "")
            yield (second, first) if turned else (first, second)


def is_parallel(source: str, languages: tuple[str, ...]) -> bool:
    """Returns whether a source names such files: else it is one of :class:`RecordFiles`."""
    return source.lower().endswith(_suffixes(languages)) or not (
        source.lower().endswith(tuple(READERS)) or Path(source).expanduser().is_dir()
    )


def _suffixes(languages: tuple[str, ...]) -> tuple[str, ...]:
    """Returns how the names of files of two languages end."""
    one, other = (code.lower() for code in languages)
    return (*with_codecs(f".{one}", f"{one}-{other}.tsv", f"{other}-{one}.tsv"), f".{one}.sgm")


def _lines(path: Path, source: str, reject: Reject) -> Iterator[str]:
    """Yields each line, also blank ones; one that is not UTF-8 is rejected, and blank."""
    last = 0
    for number, offset, line in json_lines_documents.lines(
        path, {"bytes": path.stat().st_size}, source, reject
    ):
        yield from [""] * (number - last - 1)  # too long ones were rejected
        last = number
        try:
            yield line.decode("utf-8-sig" if not offset else "utf-8").strip()
        except UnicodeDecodeError as error:
            reject(source, f"{path}:{number}", "not UTF-8", str(error))
            yield ""


def _segments(path: Path, source: str, reject: Reject) -> Iterator[str]:
    """Yields the texts of the elements `seg`; such files are often no XML."""
    with opened(path) as stream:
        content = stream.read(LONGEST + 1)
    if len(content) > LONGEST:
        reject(source, str(path), "a file of more than 256 MiB", "cut it into several")
        return
    for part in content.decode("utf-8", "replace").split("<seg")[1:]:
        yield html.unescape(part.partition(">")[2].partition("</seg>")[0]).strip()
