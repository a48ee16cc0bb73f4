"""Drops documents that are nearly the same as an earlier one."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from core.errors import ConfigError
from core.technique import Package, technique
from datamodules.preparation.duplicates.duplicate_filter import (
    DuplicateFilter,
    identities,
    scratch_folder,
    write_clusters,
)
from datamodules.preparation.duplicates.near_pairs import NearPairs
from datamodules.preparation.duplicates.shingles import band_keys, min_hash, shingle_sets
from datamodules.preparation.duplicates.signature_file import write_block


@technique(
    paper="MinHash: Broder 1997; bands and rows of FineWeb, arXiv:2406.17557; R-MinHash of rensa: arXiv:1704.04370",
    needs=[Package("rensa>=0.5,<0.6", extra="dedup")],
)
class NearDuplicates(DuplicateFilter):
    """Drops each document that resembles an earlier one that stays: MinHash finds candidates, their words decide.

    A document is the set of its n-grams of words, lower-cased and without punctuation; in scripts without spaces each
    character is a word. Documents with equal MinHash values in all rows of a band are candidates. Of these
    the Jaccard similarity (n-grams that both have, over those that either has) is computed exactly, and
    those below `threshold` both stay. A document of similarity s is found with probability 1 - (1 - s**rows)**bands.
    In the order of the source, each is dropped if it resembles one before it that stays: there are no chains
    in which the ends differ. Where very many share a band, each is compared with 8 of the first and 8 of the last.

    While it works, the disk holds the n-grams, about 1.5 bytes for each byte of text. Memory: a byte for each document,
    and about 200 MB. Put ExactDuplicates before it: many equal documents take it longer, and disk.

    Args:
        threshold: Least Jaccard similarity of near duplicates, above 0 and at most 1.
        ngram: Words of an n-gram.
        bands: Bands of the signature; more find more candidates.
        rows: MinHash values of a band; fewer find more candidates.
        seed: Of the hash functions, at least 0.

    Raises:
        ConfigError: If an argument is out of range, or rensa is not installed.

    Example:
        data:
          init_args:
            transforms:
              - class_path: ExactDuplicates
              - class_path: NearDuplicates
                init_args: {threshold: 0.75, ngram: 5, bands: 14, rows: 8}
    """

    reason = "near duplicate"

    def __init__(
        self, threshold: float = 0.75, ngram: int = 5, bands: int = 14, rows: int = 8, seed: int = 0
    ) -> None:
        if not 0 < threshold <= 1:
            raise ConfigError(f"NearDuplicates: threshold is {threshold}; it is above 0 and at most 1.")
        for name, value, least in (
            ("ngram", ngram, 1),
            ("bands", bands, 1),
            ("rows", rows, 1),
            ("seed", seed, 0),
        ):
            if not least <= value < 1 << 16:
                raise ConfigError(
                    f"NearDuplicates: {name} is {value}; it is from {least} to {(1 << 16) - 1}."
                )
        self.threshold, self.ngram, self.bands, self.rows, self.seed = threshold, ngram, bands, rows, seed

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options, and the versions of rensa's algorithm and of the Unicode tables, which tell letters."""
        versions = {"rensa": min_hash().ALGORITHM_VERSION, "unicode": unicodedata.unidata_version}
        return {**super().fingerprint(), **versions}

    def map(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Writes signatures and n-grams of the documents of a piece; those without words are left out."""
        with findings.open("wb") as file:
            for batch in batches:
                sets = shingle_sets(batch["text"].to_pylist(), self.ngram)
                filled = np.diff(sets.ends) > 0
                keys = band_keys(sets, self.bands, self.rows, self.seed)[filled]
                kept = sets._replace(ends=np.concatenate([[0], sets.ends[1:][filled]]))
                write_block(file, identities(batch)[filled], keys, kept)

    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Writes which documents resemble an earlier one that stays, and how many resemble that."""
        with (
            scratch_folder(conclusion) as scratch,
            NearPairs(findings, self.bands, scratch) as pairs,
        ):
            write_clusters(pairs.clusters(self.threshold), pairs.number, scratch, conclusion)
