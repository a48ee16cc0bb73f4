"""Keeps a share of the documents of each source, language, quality or length."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import types

from core.contracts import Transform
from core.errors import ConfigError
from core.technique import technique
from toolkit.arrow_columns import column_of, flags

_CHARACTERS = "characters"
_OTHERS = "others"
"""Name of all other classes in the report."""


@technique(
    paper="sampling by quality: DCLM, arXiv:2406.11794, Dolma, arXiv:2402.00159; by domain: The Pile, arXiv:2101.00027, "
    "table 1, Llama, arXiv:2302.13971, table 1"
)
class Rebalance(Transform):
    """Keeps a share of the documents of each source, language, quality or length.

    A document is kept or not by a hash of its id and the seed: the same ones for any number of workers, and a larger share
    keeps all that a smaller one does. Where `by` is a column of text, classes are its values. Where it is one of numbers, such
    as a score that a transform before this one adds, or "characters", each class begins at a number: `{"0": 0.1, "0.7": 1}` keeps
    a tenth of the documents from 0 to 0.7, and all from 0.7 on.

    With `target` the shares are those of the classes in the bytes that are left. Documents are counted first, then as few are
    dropped as possible: all of the class that is scarcest are kept. The shares that come out differ from
    these by chance, most where few long documents make up a class; the report counts documents and bytes of each class.
    Documents are never repeated: `MixtureDataModule` reads some folders more often than others.

    Args:
        by: A column of the documents: "source", metadata of the reader, such as "language", or what a transform adds, such as
            "quality"; or "characters", the length of the text.
        keep: Class -> share of its documents that is kept, 0 to 1.
        target: Class -> share of the bytes that are left; any numbers above 0, only their ratios count.
        others: Share of the documents that is kept of other classes, and of those where the column has no value. None: all
            with `keep`, none with `target`.
        seed: Another seed keeps other documents; give two of these transforms different ones.

    Raises:
        ConfigError: If a share is out of range, not one of `keep` and `target` is given, there is no such column, or a class of
            `target` has no documents.

    Example:
        data:
          init_args:
            transforms:
              - class_path: Rebalance
                init_args: {by: characters, keep: {0: 0.5, 500: 1.0}}
    """

    def __init__(
        self,
        by: str,
        keep: Mapping[str, float] | None = None,
        target: Mapping[str, float] | None = None,
        others: float | None = None,
        seed: int = 0,
    ) -> None:
        if (keep is None) == (target is None):
            raise ConfigError(
                "Rebalance: give `keep`, shares of documents, or `target`, shares of bytes, and not both."
            )
        shares = {str(name): float(share) for name, share in (keep or target or {}).items()}
        if not shares:
            raise ConfigError("Rebalance: there is no class. Write some, as in keep: {web: 0.5, books: 1.0}.")
        for name, share in [*(keep or {}).items(), (_OTHERS, 0 if others is None else others)]:
            if not 0 <= share <= 1:
                raise ConfigError(
                    f"Rebalance: the share of {name} is {share}; it is 0 to 1, nothing is repeated."
                )
        for name, share in (target or {}).items():
            if not 0 < share < math.inf:
                raise ConfigError(
                    f"Rebalance: the share of {name} in `target` is {share}; it has to be above 0."
                )
        self.by, self.others, self.seed = by, others, seed
        self.keep = shares if target is None else None
        self.target = None if target is None else shares
        self.needs_all_documents = target is not None
        self._kept = shares  # of `target`, what `load` reads
        self._bounds = _bounds(shares) if by == _CHARACTERS else None
        self._counts: Counter[str] = Counter()

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options."""
        return {name: getattr(self, name) for name in ("by", "keep", "target", "others", "seed")}

    def take_counts(self) -> Mapping[str, int]:
        """Returns the kept documents and bytes of each class since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def map(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Writes the bytes of each class of a piece."""
        found: Counter[str] = Counter()
        for batch in batches:
            for name, text in zip(self._classes(batch), batch["text"].to_pylist(), strict=True):
                if name is not None:
                    found[name] += len(text.encode())
        findings.write_text(json.dumps(found), encoding="utf-8")

    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Writes the shares with which the bytes that are left have the ratios of `target`."""
        sizes: Counter[str] = Counter()
        for path in findings:
            sizes.update(json.loads(path.read_text(encoding="utf-8")))
        target = self.target or {}
        if empty := [name for name in target if not sizes[name]]:
            raise ConfigError(
                f"Rebalance: no document is of the class {empty[0]!r} of `target`, by {self.by}; there are documents of "
                f"{', '.join(sorted(+sizes)) or 'none of the classes'}.\nCorrect its name, or leave it out."
            )
        scale = min(sizes[name] / share for name, share in target.items())
        kept = {name: scale * share / sizes[name] for name, share in target.items()}
        conclusion.write_text(json.dumps(kept), encoding="utf-8")

    def load(self, conclusion: Path) -> None:
        """Reads the shares."""
        self._kept = json.loads(conclusion.read_text(encoding="utf-8"))

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Drops documents by the hashes of their ids."""
        others = (0.0 if self.needs_all_documents else 1.0) if self.others is None else self.others
        kept, dropped = [], dict[str, list[int]]()
        rows = zip(self._classes(batch), batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True)
        for row, (name, document, text) in enumerate(rows):
            kept.append(self._place(document) < (others if name is None else self._kept[name]))
            label = _OTHERS if name is None else name
            if kept[-1]:
                self._counts[f"{label}: documents kept"] += 1
                self._counts[f"{label}: bytes kept"] += len(text.encode())
            else:
                dropped.setdefault(label, []).append(row)
        for label, numbers in dropped.items():
            drop(f"sampled out: {label}", numbers)
        return batch.filter(flags(kept)) if dropped else batch

    def _classes(self, batch: pyarrow.RecordBatch) -> list[str | None]:
        """Returns the class of each document; None: it is of none that is named."""
        if self.by == _CHARACTERS:
            return [self._class_from(len(text)) for text in batch["text"].to_pylist()]
        column = column_of(batch, self.by, "Rebalance")
        if types.is_integer(column.type) or types.is_floating(column.type):
            return [self._class_from(value) for value in column.to_pylist()]
        return [value if value in self._kept else None for value in column.to_pylist()]

    def _class_from(self, value: float | None) -> str | None:
        """Returns the class with the greatest beginning that is not above a number."""
        if self._bounds is None:
            self._bounds = _bounds(self.keep or self.target or {})
        if value is None or value != value:
            return None
        place = bisect_right(self._bounds, value, key=itemgetter(0))
        return self._bounds[place - 1][1] if place else None

    def _place(self, name: str) -> float:
        """Returns where an id lies, 0 to 1 (not included)."""
        digest = hashlib.blake2b(f"{self.seed}\0{name}".encode(), digest_size=8, person=b"Rebalance").digest()
        return int.from_bytes(digest) / 2**64


def _bounds(shares: Mapping[str, float]) -> list[tuple[float, str]]:
    """Returns the classes of numbers with where they begin, in order.

    Raises:
        ConfigError: If one is no number, or two are the same.
    """
    found = []
    for name in shares:
        try:
            found.append((float(name), name))
        except ValueError:
            raise ConfigError(
                f"Rebalance: the class {name!r} is no number. Classes of numbers are where they begin, as in {{0: 0.1, 500: 1.0}}."
            ) from None
    if len({begin for begin, _ in found}) < len(found) or any(begin != begin for begin, _ in found):
        raise ConfigError(
            f"Rebalance: two classes begin at the same number, or one is none: {', '.join(shares)}."
        )
    return sorted(found)
