"""Prints precision and recall of PersonalData for each type, on lines that were labelled for this project.

    python -m tests.benchmarks.personal_data --errors --speed

The lines are in `tests/datamodules/preparation/transforms/personal_data/`, one file for each type: first lines that have
it, with marks such as «EMAIL:a@b.org», then, behind a line with a hyphen, lines that seem to. A find counts if type, begin
and end are right; each type is looked for in all files. Keys are not written out: `{A36}` stands for 36 random characters.
"""

from __future__ import annotations

import argparse
import base64
import random
import re
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from datamodules.preparation.readers.python_docs import python_documents
from datamodules.preparation.transforms.personal_data import Found, find

FOLDER = Path(__file__).resolve().parent.parent / "datamodules/preparation/transforms/personal_data"
TYPES = ("KEY", "EMAIL", "IBAN", "CARD", "SSN", "IPV6", "IPV4", "PHONE")

ALPHABETS = {
    "A": string.ascii_letters + string.digits,
    "B": string.ascii_uppercase + "234567",
    "D": string.digits,
    "H": "0123456789abcdef",
    "L": string.ascii_letters,
    "S": string.ascii_letters + string.digits + "+/",
    "U": string.ascii_uppercase + string.digits,
    "W": string.ascii_letters + string.digits + "-_",
}


class Line(NamedTuple):
    """A labelled line; `positive`: whether it is among those that have the type of their file."""

    file: str
    positive: bool
    text: str
    marks: list[Found]


class Score(NamedTuple):
    """How many were found, how many of these wrongly, and how many were not found."""

    right: int
    wrong: int
    missed: int

    @property
    def precision(self) -> float:
        """Share of what was found that is right."""
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        """Share of what is there that was found."""
        return self.right / max(1, self.right + self.missed)


def lines() -> Iterator[Line]:
    """Yields all labelled lines."""
    for kind in TYPES:
        draw, positive = random.Random(kind), True
        for raw in (FOLDER / f"{kind.lower()}.txt").read_text(encoding="utf-8").splitlines():
            if raw == "-":
                positive = False
                continue
            if kind == "KEY":
                raw = filled(raw, draw)
            yield Line(kind, positive, *unmarked(raw))


def unmarked(raw: str) -> tuple[str, list[Found]]:
    """Returns a line without its marks, and where they were."""
    text, marks = "", []
    for piece in re.split("(«[^»]*»)", raw):
        if piece.startswith("«"):
            kind, _, piece = piece[1:-1].partition(":")
            marks.append(Found(len(text), len(text) + len(piece), kind))  # type: ignore[arg-type]
        text += piece
    return text, marks


def filled(raw: str, draw: random.Random) -> str:
    """Returns a line with random keys in place of their forms; ¶ is a line end."""

    def characters(alphabet: str, number: int) -> str:
        return "".join(draw.choices(ALPHABETS[alphabet], k=number))

    def token(form: str) -> str:
        if form == "JWT":
            head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("=")
            body = base64.urlsafe_b64encode(b'{"sub":"%d"}' % draw.randrange(10**9)).decode().rstrip("=")
            return f"{head}.{body}.{characters('W', 43)}"
        block = [characters("S", 64) for _ in range(8)]
        if form == "PGP":
            head = ["-----BEGIN PGP PRIVATE KEY BLOCK-----", "Version: GnuPG v2", ""]
            return "\n".join([*head, *block, "-----END PGP PRIVATE KEY BLOCK-----"])
        if form == "JSONPEM":
            return "\\n".join(["-----BEGIN PRIVATE KEY-----", *block, "-----END PRIVATE KEY-----"])
        kind = form.removeprefix("PEM ")
        if kind == "ENCRYPTED ":
            block = ["Proc-Type: 4,ENCRYPTED", "DEK-Info: AES-128-CBC,0123", "", *block]
        return "\n".join([f"-----BEGIN {kind}PRIVATE KEY-----", *block, f"-----END {kind}PRIVATE KEY-----"])

    raw = re.sub(r"\{(JWT|PGP|JSONPEM|PEM [A-Z ]*)\}", lambda m: token(m[1]), raw)
    raw = re.sub(r"\{([ABDHLSUW])(\d+)\}", lambda m: characters(m[1], int(m[2])), raw)
    return raw.replace("¶", "\n")


def scores() -> tuple[dict[str, Score], list[str]]:
    """Returns the score of each type, and what was wrong."""
    counts = {kind: [0, 0, 0] for kind in TYPES}
    errors = []
    for line in lines():
        found, marks = set(find(line.text, TYPES)), set(line.marks)
        for column, what, some in (
            (0, "", found & marks),
            (1, "wrong", found - marks),
            (2, "missed", marks - found),
        ):
            for start, end, kind in some:
                counts[kind][column] += 1
                if what:
                    errors.append(f"{what:7}{kind:6}{line.text[start:end]!r} in {line.text!r}"[:160])
    return {kind: Score(*n) for kind, n in counts.items()}, errors


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--errors", action="store_true", help="list what was wrong or missed")
    parser.add_argument(
        "--speed", action="store_true", help="also print MB/s on the documents of Python itself"
    )
    options = parser.parse_args()
    labelled = list(lines())
    by_type, errors = scores()
    print(f"{'type':6}{'lines with it':>14}{'without':>9}{'precision':>11}{'recall':>8}")
    for kind, score in by_type.items():
        own = [line.positive for line in labelled if line.file == kind]
        print(f"{kind:6}{sum(own):14}{len(own) - sum(own):9}{score.precision:11.3f}{score.recall:8.3f}")
    if options.speed:
        texts = python_documents()
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        for kinds in (*((kind,) for kind in TYPES), TYPES):
            begin = time.process_time()
            found = sum(len(find(text, kinds)) for text in texts)
            seconds = time.process_time() - begin
            name = kinds[0] if len(kinds) == 1 else "all"
            print(f"{name:6}{megabytes / seconds:8.1f} MB/s of one core, {found} found in {megabytes:.1f} MB")
    if options.errors:
        print("\n".join(errors))


if __name__ == "__main__":
    main()
