"""What a prepared folder says about itself: counts, checksums, and what it was made with."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from core.contracts import TokenWriter
from core.errors import ConfigError
from core.files import durable
from datamodules.preparation.preparation_task import COUNTS, REJECTS, SPLITS, read_record

FORMAT = 3
"""Version of what a prepared folder holds; part of its digest."""

_EARLIEST = 1000
"""So many documents are looked at before too many rejected ones stop a run that is going on."""


class Totals:
    """The sums of the tasks' counts.

    Args:
        stages: Number of stages.
    """

    def __init__(self, stages: int) -> None:
        self.splits = {split: Counter(documents=0, tokens=0) for split in SPLITS}
        self.sources: dict[str, Counter[str]] = defaultdict(Counter)
        self.rejected: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()
        self.dropped: list[Counter[str]] = [Counter() for _ in range(stages)]
        self.blank = 0
        self.example = ""

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds what a task counted."""
        for split in SPLITS:
            self.splits[split].update(record["splits"][split])
        for source, counts in record["sources"].items():
            self.sources[source].update(counts)
        self.rejected.update(record["rejected"])
        self.lengths.update(record["lengths"])
        for mine, counts in zip(self.dropped, record["dropped"], strict=True):
            mine.update(counts)
        self.blank += record["blank"]
        for line in record["first_rejected"] if not self.example else ():
            self.example = f"{line['place']}: {line['reason']}"

    @property
    def documents(self) -> int:
        """Number of documents that were kept."""
        return sum(counts["documents"] for counts in self.splits.values())

    @property
    def tokens(self) -> int:
        """Number of tokens, of both splits."""
        return sum(counts["tokens"] for counts in self.splits.values())

    @property
    def text_bytes(self) -> int:
        """Size of the documents that were kept, as UTF-8."""
        return sum(counts["bytes"] for counts in self.sources.values())

    def check_rejects(self, limit: float, final: bool) -> None:
        """Raises a ConfigError where too much of the source is unusable; early only if there is much of it."""
        rejected, dropped = sum(self.rejected.values()), sum(sum(counts.values()) for counts in self.dropped)
        seen = rejected + dropped + self.documents
        if rejected <= limit * seen or (not final and seen < _EARLIEST):
            return
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in self.rejected.most_common(3))
        raise ConfigError(
            f"{rejected:,} of {seen:,} documents cannot be used, more than data.max_reject_fraction={limit}: {reasons}."
            f"\nFor example {self.example}.\nMend the source, or raise the limit and run the same again."
        )


def write_manifest(
    folder: Path, parts: Path, tasks: int, writer: TokenWriter, head: Mapping[str, Any], limit: float
) -> Totals:
    """Joins the shards of the finished tasks, then writes manifest.json, then removes the tasks' folders.

    Args:
        folder: The prepared folder.
        parts: The folder of the tasks' folders.
        tasks: Their number.
        writer: Joins shards.
        head: What the manifest says besides; `stages` get what they dropped.
        limit: The `max_reject_fraction`.

    Raises:
        ConfigError: If too much was rejected.
    """
    finished = [parts / f"{number:06}" for number in range(tasks)]
    records = [read_record(part) for part in finished]
    totals = Totals(len(head["stages"]))
    for record in records:
        totals.add(record)
    totals.check_rejects(limit, final=True)
    frequencies = sum(np.load(part / COUNTS) for part in finished)
    stages = [
        stage | {"dropped": dict(sorted(n.items()))}
        for stage, n in zip(head["stages"], totals.dropped, strict=True)
    ]
    manifest = {**head, "stages": stages}
    for split, counts in totals.splits.items():
        manifest |= {f"{split}_documents": counts["documents"], f"{split}_tokens": counts["tokens"]}
    manifest |= {
        "text_bytes": totals.text_bytes,
        "unigram_loss": unigram_loss(*frequencies),
        "sources": {name: dict(totals.sources[name]) for name in sorted(totals.sources)},
        "lengths": {key: totals.lengths[key] for key in sorted(totals.lengths, key=int)},
        "rejected": dict(sorted(totals.rejected.items())),
        "blank": totals.blank,
        "files": _join(folder, finished, records, writer),
    }
    _write_rejects(folder, finished)
    durable.write(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    shutil.rmtree(parts)
    return totals


def _join(folder: Path, parts: list[Path], records: list[Any], writer: TokenWriter) -> dict[str, Any]:
    """Joins both splits; returns size and SHA-256 of each file but the manifest."""
    files = {}
    told = {
        part / name: digest
        for part, record in zip(parts, records, strict=True)
        for name, digest in record["files"].items()
    }
    for split in SPLITS:
        of_split = [part / split for part in parts if (part / split).is_dir()]
        moved = writer.join(of_split, folder / split)
        files |= {f"{split}/{name}": told[old] for name, old in moved.items()}
        durable.sync(folder / split)
        for path in sorted(folder.glob(f"{split}/*")):
            if path.name not in moved:
                files[f"{split}/{path.name}"] = described(path)
    return files | {"tokenizer.json": described(folder / "tokenizer.json")}


def _write_rejects(folder: Path, parts: list[Path]) -> None:
    """Writes what was rejected, in the order of the source; no file if there was nothing."""
    rejected = [part / REJECTS for part in parts if (part / REJECTS).stat().st_size]
    if not rejected:
        return
    with durable.replacing(folder / REJECTS) as temporary, temporary.open("wb") as stream:
        for path in rejected:
            with path.open("rb") as lines:
                shutil.copyfileobj(lines, stream)


def described(path: Path) -> dict[str, Any]:
    """Returns size and SHA-256 of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Returns the cross-entropy of validation's tokens under training's add-one-smoothed frequencies.

    Args:
        train: How often each token id occurs in the training split, (vocab_size,).
        validation: The same of the validation split.

    Returns:
        Nats per token: what a model that only knows how frequent tokens are would reach.
    """
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return -float(validation @ log_probability / validation.sum())
