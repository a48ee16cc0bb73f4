"""Prints recall and precision of Decontaminate on planted items, by their length, and its speed.

    python -m tests.benchmarks.decontamination --items 2000 --clean 10000

Items have 5 to 200 words: questions made from ten patterns, and sentences and passages of Python's documentation. Each is planted once, in
other documentation: verbatim, or with other case, punctuation and white space. The clean documents have what is likely to be
taken for an item: the questions' patterns with other words, halves of passages, and short items with one word changed. The
documentation around has no 8 words of an item by chance, and no whole item. `any 13 words` is the rule of GPT-3: any n-gram of 13 words is enough.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.preparation.readers.python_docs import python_documents
from datamodules.preparation.transforms.decontaminate import Decontaminate

BANDS = ((5, 7), (8, 12), (13, 49), (50, 200))
PATTERNS = (
    "What is the {} of a {} {}?",
    "Which {} did the {} {} first?",
    "Who {} the {} before the {} was {}?",
    "Which of the following best describes the {} of the {} {}?",
    "Why does a {} {} when it is put into a {} {}?",
    "In which {} was the {} of {} and {} signed?",
    "{} has {} apples and gives half of them to {}. How many apples does {} have left?",
    "According to the passage, the {} {} because of its {}. Choose the correct answer: {}, {} or {}.",
    "If the {} of the {} is twice that of the {}, what can be said about the {} as a whole?",
    "Read the statement and decide whether it is true: the {} {} was never a part of the {} {}.",
)


class Document(NamedTuple):
    """A text, and the number of the item that was planted in it; None: it is clean."""

    text: str
    item: int | None
    changed: bool = False


class Score(NamedTuple):
    """Documents that were found rightly, wrongly, and not found."""

    right: int
    wrong: int
    missed: int

    @property
    def precision(self) -> float:
        """Share of what was found that has an item."""
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        """Share of what has an item that was found."""
        return self.right / max(1, self.right + self.missed)


def plain(text: str) -> str:
    """Returns the words of a text between spaces, in a way of its own."""
    words = re.sub("[^a-z0-9]+", " ", re.sub("['\u2019]", "", text.lower())).split()
    return f" {' '.join(words)} "


def made(items: int, clean: int, seed: int = 0) -> tuple[list[str], list[Document]]:
    """Returns items, and documents of which the first have one each."""
    draw = random.Random(seed)
    pages = [page.split() for page in python_documents() if len(page.split()) > 300]
    held, others = pages[::2], pages[1::2]
    words = sorted({word for page in pages for word in page if word.isalpha() and 4 <= len(word) <= 12})
    found = list(dict.fromkeys(_items(items, held, words, draw)))
    known = {gram for item in found for gram in _grams(plain(item).split())}
    stretches = (
        one for one in _stretches(others, draw) if known.isdisjoint(_grams(plain(" ".join(one)).split()))
    )
    documents = []
    for number, item in enumerate(found):
        changed = number // 2 % 2 == 1
        middle = _changed(item, draw) if changed else item
        documents.append(Document(_between(next(stretches), middle, draw), number, changed))
    forms = [plain(item) for item in found]
    while len(documents) < len(found) + clean:
        text = _between(next(stretches), _likeness(found, words, draw), draw)
        form = plain(text)
        if not any(item in form for item in forms):
            documents.append(Document(text, None))
    return found, documents


def _items(
    number: int, held: Sequence[Sequence[str]], words: Sequence[str], draw: random.Random
) -> Iterator[str]:
    """Yields questions, sentences of the two short bands and passages of the two long ones."""
    sentences = [
        [one for page in held for one in _sentences(page) if low <= len(plain(one).split()) <= high]
        for low, high in BANDS[:2]
    ]
    blocks = cycle(
        draw.sample(
            cut := [page[at : at + 200] for page in held for at in range(0, len(page), 200)], len(cut)
        )
    )
    for index in range(number):
        band = index // 2 % len(BANDS)
        if index % 2:
            yield _filled(draw.choice(PATTERNS), words, draw)
        elif band < len(sentences):
            yield draw.choice(sentences[band])
        else:
            block = next(blocks)
            size = min(draw.randint(*BANDS[band]), len(block))
            at = draw.randrange(len(block) - size + 1)
            yield " ".join(block[at : at + size])


def _sentences(page: Sequence[str]) -> list[str]:
    found = re.split(r"(?<=[.!?])\s+", " ".join(page))
    return [one for one in found if re.fullmatch(r"[A-Z][\w',; -]+[.!?]", one)]


def _filled(pattern: str, words: Sequence[str], draw: random.Random) -> str:
    text = pattern.format(*draw.choices(words, k=pattern.count("{}")))
    return text[0].upper() + text[1:]


def _stretches(pages: Sequence[Sequence[str]], draw: random.Random) -> Iterator[list[str]]:
    for page in cycle(pages):
        at = draw.randrange(len(page) - 120)
        yield list(page[at : at + draw.randint(60, 400)])


def _grams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + 8]) for at in range(len(words) - 7)}


def _between(stretch: Sequence[str], middle: str, draw: random.Random) -> str:
    at = draw.randrange(len(stretch))
    return " ".join([*stretch[:at], middle, *stretch[at:]])


def _changed(item: str, draw: random.Random) -> str:
    """Returns an item in other case, with other punctuation and white space."""
    case: Callable[[str], str] = draw.choice([str.upper, str.lower, str.title, str.swapcase])
    pieces = re.findall(r"\w+(?:'\w+)*", item) if draw.random() < 0.5 else item.split()
    spaces = [" ", "  ", "\n", "\t", "\u00a0", ", ", " - ", "\u2026 ", " \u201c", "\u200a"]
    words = [piece.replace("'", "\u2019") if "'" in piece else case(piece) for piece in pieces]
    return "".join(word + draw.choice(spaces if draw.random() < 0.4 else [" "]) for word in words)


def _likeness(items: Sequence[str], words: Sequence[str], draw: random.Random) -> str:
    """Returns what has much in common with items and is none."""
    kind, item = draw.randrange(3), draw.choice(items).split()
    if kind == 0:
        return _filled(draw.choice(PATTERNS), words, draw)
    if kind == 1 and len(item) >= 13:
        half = len(plain(" ".join(item)).split()) // 2
        del item[: draw.randrange(len(item) // 2)]
        while len(plain(" ".join(item)).split()) > half:
            item.pop()
        return " ".join(item)
    if len(item) < 13:
        item[draw.randrange(len(item))] = draw.choice(words)
        return " ".join(item)
    return " ".join(item[: draw.randint(4, 6)])


def built(items: Sequence[str], **options: Any) -> Decontaminate:
    """Returns the transform on a file with the items."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of items that are not looked for: they count as missed
        path = Path(folder) / "items.jsonl"
        path.write_text("".join(json.dumps({"question": item}) + "\n" for item in items), encoding="utf-8")
        return Decontaminate([str(path)], ["question"], **options)


def score(transform: Decontaminate, documents: Sequence[Document]) -> Score:
    """Returns how many documents the transform finds; another item than the planted one counts as wrong."""
    right = wrong = missed = 0
    for text, item, _ in documents:
        found = {match.item for match in transform.matches(text)}
        right += item in found
        missed += item is not None and item not in found
        wrong += bool(found) and item not in found
    return Score(right, wrong, missed)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--clean", type=int, default=10_000)
    options = parser.parse_args()
    items, documents = made(options.items, options.clean)
    rules = {"as it is": {}, "any 13 words": {"min_words": 13, "min_distinctive": 0, "min_share": 0.0}}
    print(f"{len(items)} items, {len(documents) - len(items)} clean documents")
    print(
        f"{len(built(items)._origins)} of the items are looked for: the others have too few distinctive words"
    )
    for name, given in rules.items():
        transform = built(items, **given)
        parts: dict[str, list[Document]] = {"all": documents}
        for low, high in BANDS:
            parts[f"{low} to {high} words"] = [
                one
                for one in documents
                if one.item is None or low <= len(plain(items[one.item]).split()) <= high
            ]
        parts["verbatim"] = [one for one in documents if not one.changed]
        parts["changed"] = [one for one in documents if one.item is None or one.changed]
        for part, some in parts.items():
            found = score(transform, some)
            print(f"{name:14}{part:18} recall {found.recall:.3f} precision {found.precision:.3f} {found}")
    texts = [*python_documents(), *(one.text for one in documents if one.item is None)]
    begin = time.process_time()
    for text in texts:
        transform.matches(text)
    seconds = time.process_time() - begin
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{megabytes / seconds:.1f} MB/s of one core, {megabytes:.1f} MB")


if __name__ == "__main__":
    main()
