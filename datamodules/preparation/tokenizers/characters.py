"""The characters of a training text, before a tokenizer of characters is trained on it."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def counted(documents: Iterable[str]) -> Iterator[tuple[Counter[str], Iterator[str]]]:
    """Reads documents once; yields how often each character occurs in them, and the documents again.

    The library's trainers give characters ids in a random order, and these decide between pieces that are equally
    frequent: a trainer has to know the characters beforehand. The documents wait in a temporary file.
    """
    counts: Counter[str] = Counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stream:
        for text in documents:
            counts.update(text)
            stream.write(json.dumps(text) + "\n")
        stream.seek(0)
        yield counts, map(json.loads, stream)


def most_frequent(counts: Counter[str], most: int, coverage: float = 1.0) -> list[str]:
    """Returns the most frequent characters in the order of their code points; ties go to the first of these.

    Args:
        counts: How often each character occurs.
        most: Number of characters.
        coverage: Share of the text, in characters, that they cover; rarer ones are left out.
    """
    found, covered, wanted = [], 0, coverage * counts.total()
    for character, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:most]:
        if covered >= wanted:
            break
        found.append(character)
        covered += count
    return sorted(found)
