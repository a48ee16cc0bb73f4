"""How diverse the training documents of each source are, measured on as many words of each."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.preparation.duplicates.shingles import words
from datamodules.preparation.split import text_hash

SAMPLE = "sample.jsonl"
MEASURED_WORDS = 10_000
"""Words of each source that are measured: the figures of shorter and longer texts cannot be compared."""

SHOWN_SOURCES = 30
_SAMPLE_BYTES = 1 << 24
"""Of the source's files: documents are sampled so that about 16 MiB of these are looked at."""

_CHARACTERS, _MOST = 2000, 2000
"""Characters of a sampled document, and documents of a task."""


def sampled_share(source_bytes: int) -> float:
    """Returns the share of the documents that is sampled, of files of this size; all of those whose size is not known."""
    return min(_SAMPLE_BYTES / source_bytes, 1.0) if source_bytes else 1.0


class DiversitySample:
    """Writes the training documents of a task that are in the sample, by a hash of their ids.

    Args:
        path: The file.
        share: Share of the documents that is sampled; 0: none, and no file.
    """

    def __init__(self, path: Path, share: float) -> None:
        self._path, self._bound, self._taken = path, int(share * 2**64), 0

    def add(self, documents: Iterable[tuple[str, str, str]]) -> None:
        """Adds documents: id, source and text of each."""
        if not self._bound:
            return
        with self._path.open("a", encoding="utf-8") as file:
            for name, source, text in documents:
                if self._taken < _MOST and (place := text_hash(name.encode())) < self._bound:
                    self._taken += 1
                    file.write(json.dumps([place, source, text[:_CHARACTERS]]) + "\n")


def diversity(parts: Sequence[Path], sources: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Returns the measures of all training documents ("all") and of the largest sources ("sources") in the tasks' samples.

    Those with less than :data:`MEASURED_WORDS` words in the sample are left out.

    Args:
        parts: Folders of the tasks.
        sources: Counts of each source.
    """
    documents = sorted({document for part in parts for document in _sampled(part / SAMPLE)})
    largest = sorted(sources, key=lambda name: (-sources[name]["tokens"], name))[:SHOWN_SOURCES]
    by_source: dict[str, list[str]] = {name: [] for name in largest}
    for _, source, text in documents:
        if source in by_source:
            by_source[source].append(text)
    found = {name: measures(texts) for name, texts in by_source.items()}
    everything = measures(text for _, _, text in documents)
    return (
        {"all": everything, "sources": {name: one for name, one in found.items() if one}}
        if everything
        else {}
    )


def measures(texts: Iterable[str]) -> dict[str, float]:
    """Returns the measures of the first 10,000 words of some texts; empty if there are less.

    `distinct_3`: different n-grams of three words, over all (Li et al., arXiv:1510.03055; here on a sample, not on answers);
    `type_token`: different words over all (Johnson 1944, at an equal number of words); `compression`: the bytes of the
    text over those that zlib makes of it (Shaib et al., arXiv:2403.00553): lower is more diverse. N-grams do not
    cross documents.
    """
    left, seen = MEASURED_WORDS, [list[str]()]
    for text in texts:
        seen.append(words(text)[:left])
        left -= len(seen[-1])
        if not left:
            break
    if left:
        return {}
    triples = [triple for one in seen for triple in zip(one, one[1:], one[2:], strict=False)]
    data = "\n".join(" ".join(one) for one in seen).encode()
    return {
        "distinct_3": round(len({*triples}) / max(len(triples), 1), 4),
        "type_token": round(len({word for one in seen for word in one}) / MEASURED_WORDS, 4),
        "compression": round(len(data) / len(zlib.compress(data, 9)), 2),
    }


def _sampled(path: Path) -> Iterator[tuple[int, str, str]]:
    if path.exists():  # earlier versions took no sample
        with path.open(encoding="utf-8") as file:
            for line in file:
                place, source, text = json.loads(line)
                yield place, source, text
