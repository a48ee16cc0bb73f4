"""Reads documents from Stack Exchange's data dump: each question with its answers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.parsers import expat

from core.contracts import Reject
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.readers import web_pages
from datamodules.preparation.readers.compressed_files import DUMP_CODECS, codec_of
from datamodules.preparation.readers.file_reader import FileReader, Row
from datamodules.preparation.readers.json_lines_documents import lines
from datamodules.preparation.readers.opened_files import UnreadableError, opened
from datamodules.preparation.readers.source_files import Piece, SourceFiles
from datamodules.preparation.readers.spilled_lines import SpilledLines

BROKEN, TOO_LONG, CUT = "a broken row", "a row of more than 1 MiB", "a dump without its end"
ORPHAN = "an answer without its question"

_LONGEST, _GROUP_BYTES, _MOST_GROUPS = 1 << 20, 1 << 24, 1 << 12
_EXPANDS = 64
"""Times that a compressed dump grows, at most, to keep groups small; more groups than needed cost little."""

_MOST_PIECES = 16
"""Tasks for a file. Each runs through all of it, some 25 times as fast as texts are made."""

_USUAL = re.compile(rb'\s*<row Id="(\d{1,18})" PostTypeId="([12])"(?: ParentId="(\d{1,18})")?')
_KIND = re.compile(rb'\sPostTypeId="(\d{1,18})"')
_ID, _PARENT = re.compile(rb'\sId="(\d{1,18})"'), re.compile(rb'\sParentId="(\d{1,18})"')
_NEITHER = -1
_FRAME = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^<>]*\?>)?\s*(<posts>|</posts>)?\s*")
_HOST = re.compile(r"(?:[\w-]+\.)+[a-z]{2,}")


@technique(
    paper="the format of The Pile's Stack Exchange, arXiv:2101.00027, with min_score and max_answers 3 there; all answers "
    "by score in LLaMA, arXiv:2302.13971, section 2.1; schema: meta.stackexchange.com/questions/2677",
    needs=[web_pages.PACKAGES["resiliparse"]],
)
class StackExchangeDump(FileReader):
    """Reads the Posts.xml of Stack Exchange's data dump, plain or .gz, .bz2, .zst: a question with its answers is a document.

    The text is "Q:", title and body, then "A:" and the body for each answer: the accepted one first, the others by
    score. HTML becomes text in which code keeps its lines. A document's id is the file and the question's number, and
    it is counted under its site, which is the name of the folder (ai.stackexchange.com/Posts.xml). Title, address, date,
    license and tags of the question are its metadata. Questions with too few answers and posts of other types are
    skipped. Answers without their question, rows that are not XML, have entities or are longer than 1 MiB are rejected
    one by one. Questions and answers lie apart in the dump: they are sorted in temporary files (TMPDIR), which take a
    third of its size. Up to 16 workers share a large plain file; a compressed one is one task. Unpack archives before:
    `7z x ai.stackexchange.com.7z`.

    Args:
        source: A path, a folder, or a glob.
        min_score: Least score of an answer, unless it is the accepted one; None: all.
        max_answers: Answers of a document, at most; None: all.
        min_answers: Answers that a question has to have after that; 0: also questions alone.

    Raises:
        ConfigError: If there is no such file, an argument is out of range, or a package is missing.

    Example:
        data:
          init_args:
            reader: {class_path: StackExchangeDump, init_args: {min_score: 3, max_answers: 3}}
    """

    metadata = ("title", "url", "date", "license", "tags")

    def __init__(
        self,
        source: str,
        min_score: int | None = None,
        max_answers: int | None = None,
        min_answers: int = 1,
    ) -> None:
        web_pages.need("StackExchangeDump", web_pages.PACKAGES["resiliparse"])
        if min_answers < 0 or (max_answers is not None and max_answers < max(min_answers, 1)):
            raise ConfigError(
                f"StackExchangeDump: min_answers is {min_answers} and max_answers {max_answers}.\nThe first is at least 0, "
                "the second at least 1 and not below the first."
            )
        self.min_score, self.max_answers, self.min_answers = min_score, max_answers, min_answers
        try:
            self.files = SourceFiles(source, tuple(f"posts.xml{codec}" for codec in ("", *DUMP_CODECS)))
        except ConfigError as error:
            raise ConfigError(f"{error}\nUnpack archives first: 7z x ai.stackexchange.com.7z") from error

    def options(self) -> dict[str, Any]:
        """Returns the arguments, and the version of the package."""
        return {
            "min_score": self.min_score,
            "max_answers": self.max_answers,
            "min_answers": self.min_answers,
            "html": web_pages.described("resiliparse"),
        }

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of files, and ranges of the questions of large plain ones."""
        return self.files.tasks(_cut)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the questions of a range of their numbers."""
        path = Path(piece["path"])
        name, source = self.files.name(path), _site(path) or self.files.source_of(path)
        size = piece["bytes"] * (_EXPANDS if codec_of(path) else 1)
        with SpilledLines(min(size // _GROUP_BYTES + 1, _MOST_GROUPS)) as spilled:
            _spill(path, piece, source, reject, spilled)
            for group in spilled.groups():
                for question, answers in _questions(group, path, source, reject):
                    try:
                        text = self._text(question, answers)
                    except web_pages.PageError as error:
                        reject(source, f"{path}, post {question['Id']}", error.reason, error.details)
                        continue
                    if text:
                        yield text, source, f"{name}:{question['Id']}", _known(question, path)

    def _text(self, question: dict[str, str], answers: list[dict[str, str]]) -> str:
        """Returns the text of a question; an empty one if it is left out."""
        accepted = question.get("AcceptedAnswerId")
        ranked = sorted(
            (answer["Id"] != accepted, -int(answer["Score"]), int(answer["Id"]), answer["Body"])
            for answer in answers
            if self.min_score is None or int(answer["Score"]) >= self.min_score or answer["Id"] == accepted
        )
        replies = [body for *_, html in ranked if (body := web_pages.fragment_text(html))][: self.max_answers]
        if len(replies) < self.min_answers:
            return ""
        asked = [question.get("Title", "").strip(), web_pages.fragment_text(question["Body"])]
        parts = ["Q:", *filter(None, asked)]
        for reply in replies:
            parts += ["A:", reply]
        return "\n\n".join(parts)


def _known(question: dict[str, str], path: Path) -> dict[str, str | None]:
    """Returns the metadata of a question."""
    site = _site(path)
    tags = re.split(r"[<>|]+", question.get("Tags", "").strip("<>|"))
    return {
        "title": question.get("Title"),
        "url": f"https://{site}/questions/{question['Id']}" if site else None,
        "date": question.get("CreationDate"),
        "license": question.get("ContentLicense"),
        "tags": " ".join(filter(None, tags)) or None,
    }


def _site(path: Path) -> str:
    """Returns the site of a dump: of stackoverflow.com-Posts.xml, or ai.stackexchange.com/Posts.xml; empty if unknown."""
    for name in (path.name.lower().partition("-posts.xml")[0], path.absolute().parent.name.lower()):
        if _HOST.fullmatch(name) and "posts.xml" not in name:
            return name
    return ""


def _cut(path: Path, size: int, task_bytes: int) -> list[Piece]:
    """Cuts a plain dump by the numbers of its questions. They ascend, about, so that the ranges are of about equal size."""
    number = min(size // task_bytes, _MOST_PIECES)
    if codec_of(path) or number < 2:
        return [{"bytes": size}]
    try:
        with opened(path) as file:
            found = {_number_from(file, size * part // number) for part in range(1, number)}
    except UnreadableError:  # it is rejected, with the reason, when it is read
        return [{"bytes": size}]
    bounds = [0, *sorted(found - {0}), 1 << 62]
    share = size // (len(bounds) - 1)
    sizes = [size - share * (len(bounds) - 2), *[share] * (len(bounds) - 2)]
    return [
        {"bytes": one, "ids": [low, high]} for one, low, high in zip(sizes, bounds, bounds[1:], strict=False)
    ]


def _number_from(file: Any, place: int) -> int:
    """Returns the number of the first post behind a byte; 0 if there is none near."""
    file.seek(place)
    found = _ID.search(file.read(2 * _LONGEST))
    return int(found[1]) if found else 0


def _spill(path: Path, piece: Piece, source: str, reject: Reject, spilled: SpilledLines) -> None:
    """Puts the posts of a piece into groups by the number of their question; the first piece rejects what is no post."""
    low, high = piece.get("ids", (0, 1 << 62))
    groups = len(spilled)
    rejecting = reject if low == 0 else _ignore
    ended = False
    for _, offset, line in lines(path, {"bytes": piece["bytes"]}, source, rejecting):
        number = _question_of(line) if len(line) <= _LONGEST else None
        if number is None:
            frame = _FRAME.fullmatch(line) if len(line) <= _LONGEST else None
            if frame is None:
                reason = BROKEN if len(line) <= _LONGEST else TOO_LONG
                rejecting(source, f"{path}, byte {offset:,}", reason, repr(line[:80])[2:-1])
            ended = frame is not None and (frame[1] == b"</posts>" or (ended and not frame[1]))
        elif low <= number < high:
            spilled.add(number % groups, line.strip())
    if not ended:
        rejecting(source, str(path), CUT, "its last line is not </posts>")


def _ignore(*_: Any) -> None:
    """Rejects nothing: another piece of the file does."""


def _question_of(line: bytes) -> int | None:
    """Returns the number of the question that a post belongs to, -1 for posts of other types; None if it is no post.

    Quotation marks are escaped within values: what looks like an attribute is one.
    """
    usual = _USUAL.match(line)
    if usual and (usual[2] == b"1") == (usual[3] is None):
        return int(usual[3] or usual[1])
    kind = _KIND.search(line)
    if kind is None:
        return None
    if kind[1] not in (b"1", b"2"):
        return _NEITHER
    found = (_ID if kind[1] == b"1" else _PARENT).search(line)
    return int(found[1]) if found else None


def _questions(
    group: list[bytes], path: Path, source: str, reject: Reject
) -> Iterator[tuple[dict[str, str], list[dict[str, str]]]]:
    """Yields the questions of a group with their answers, by number; rejects rows that cannot be read, and orphans."""
    questions: dict[int, dict[str, str]] = {}
    answers: dict[int, list[dict[str, str]]] = defaultdict(list)
    for line in group:
        try:
            post = _attributes(line)
        except (expat.ExpatError, ValueError) as error:
            found = _ID.search(line)
            reject(
                source, f"{path}, post {found[1].decode() if found else 'unknown'}", BROKEN, str(error)[:200]
            )
            continue
        if post["PostTypeId"] == "1":
            questions.setdefault(int(post["Id"]), post)
        else:
            answers[int(post["ParentId"])].append(post)
    for number in sorted(questions.keys() | answers.keys()):
        if number in questions:
            yield questions[number], answers[number]
        else:
            for answer in answers[number]:
                reject(source, f"{path}, post {answer['Id']}", ORPHAN, f"question {number}")


def _attributes(line: bytes) -> dict[str, str]:
    """Returns the attributes of a row.

    Raises:
        ExpatError: If it is not the XML of one.
        ValueError: If an attribute is missing or no number.
    """
    found: list[tuple[str, dict[str, str]]] = []
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = lambda name, attributes: found.append((name, attributes))
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = _refused
    parser.Parse(line, True)
    if len(found) > 1 or found[0][0] != "row":
        raise ValueError("it is not one row")
    post = found[0][1]
    names = ["PostTypeId", "Id", "Score", *(["ParentId"] if post.get("PostTypeId") == "2" else [])]
    for name in names:
        if not re.fullmatch(r"-?\d{1,18}", post.get(name, "")):
            raise ValueError(f"its attribute {name} is {post.get(name, '')[:40]!r}")
    post.setdefault("Body", "")
    return post


def _refused(*_: Any) -> None:
    raise ValueError("a document type or entity, which dumps do not have")
