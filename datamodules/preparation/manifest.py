"""Writes the manifest of a prepared folder: counts, checksums and options."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core import durable
from core.contracts import TokenWriter
from core.errors import ConfigError
from datamodules.preparation.diversity import diversity
from datamodules.preparation.document_table import DOCUMENTS, join_tables
from datamodules.preparation.flow import Example, Flow, merged
from datamodules.preparation.preparation_report import FILES as REPORT
from datamodules.preparation.preparation_report import write_report
from datamodules.preparation.preparation_task import COUNTS, REJECTS, file_digest, read_record
from datamodules.preparation.split import SPLITS
from toolkit.manifest_schema import CHECKSUM, checksum
from toolkit.prepared import MANIFEST, PLAN

EXTRAS = (PLAN, REJECTS, DOCUMENTS, *REPORT)
"""Files that no run reads: they may be missing, but not changed."""

FORMAT = 3
"""Version of the format of a prepared folder; part of its digest."""

_EARLIEST = 1000
"""Least number of documents after which too many rejected ones stop a preparation before its end."""


class Totals:
    """The sums of the tasks' counts.

    Args:
        transforms: Number of transforms.
        source_bytes: Size of the source's files.
    """

    def __init__(self, transforms: int, source_bytes: int = 0) -> None:
        self.source_bytes, self.lost_bytes = source_bytes, 0
        self.splits = {split: Counter(documents=0, tokens=0, bytes=0) for split in SPLITS}
        self.flow: Flow | None = Flow(transforms)  # None: an earlier version did some of the tasks
        self.sources: dict[str, Counter[str]] = defaultdict(Counter)
        self.rejected: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()
        self.described: dict[str, Counter[str]] = {}
        self.dropped: list[Counter[str]] = [Counter() for _ in range(transforms)]
        self.counted: list[Counter[str]] = [Counter() for _ in range(transforms)]
        self.examples: list[dict[str, list[Example]]] = [{} for _ in range(transforms)]
        self.blank = 0
        self.example = ""

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds the counts of a task."""
        for split in SPLITS:
            self.splits[split].update(record["splits"].get(split, {}))  # earlier versions knew no third
        for source, counts in record["sources"].items():
            self.sources[source].update(counts)
        for name, counts in record.get("described", {}).items():
            self.described.setdefault(name, Counter()).update(counts)
        self.rejected.update(record["rejected"])
        self.skipped.update(record.get("skipped", {}))
        self.lost_bytes += record.get("lost_bytes", 0)
        self.lengths.update(record["lengths"])
        for mine, counts in zip(self.dropped, record["dropped"], strict=True):
            mine.update(counts)
        for mine, counts in zip(self.counted, record.get("counted", self.counted), strict=True):
            mine.update(counts)
        for kept, found in zip(self.examples, record.get("examples", self.examples), strict=True):
            for reason, some in found.items():
                kept[reason] = merged(kept.get(reason, []), some)
        if self.flow and "flow" in record:
            self.flow.add(record["flow"])
        else:
            self.flow = None
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
    def shares(self) -> str:
        """The tokens of the splits, for messages."""
        return shares({split: counts["tokens"] for split, counts in self.splits.items()})

    @property
    def text_bytes(self) -> int:
        """Size of the documents that were kept, as UTF-8."""
        return sum(counts["bytes"] for counts in self.sources.values())

    def check_rejects(self, limit: float, final: bool) -> None:
        """Raises a ConfigError if too much of the source is unusable; before the end only after 1,000 documents."""
        rejected, dropped = sum(self.rejected.values()), sum(sum(counts.values()) for counts in self.dropped)
        seen = rejected + dropped + self.documents
        if self.lost_bytes > limit * self.source_bytes:
            self._refuse(f"{self.lost_bytes:,} of {self.source_bytes:,} bytes", limit)
        if rejected > limit * seen and (final or seen >= _EARLIEST):
            self._refuse(f"{rejected:,} of {seen:,} documents", limit)

    def _refuse(self, share: str, limit: float) -> None:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in self.rejected.most_common(3))
        raise ConfigError(
            f"{share} cannot be used, more than data.max_reject_fraction={limit}: {reasons}."
            f"\nFor example {self.example}.\nCorrect the source, or raise the limit and run the same again."
        )


def write_manifest(
    folder: Path,
    parts: Path,
    tasks: Sequence[Mapping[str, Any]],
    writer: TokenWriter,
    head: Mapping[str, Any],
    limit: float,
) -> Totals:
    """Joins the shards of the finished tasks, writes the report and manifest.json, then removes the tasks' folders.

    Args:
        folder: The prepared folder.
        parts: The folder of the tasks' folders.
        tasks: The tasks.
        writer: Joins shards.
        head: Further content of the manifest; the counts of dropped documents are added to its `transforms`.
        limit: The `max_reject_fraction`.

    Raises:
        ConfigError: If too much was rejected.
    """
    finished = [parts / f"{number:06}" for number in range(len(tasks))]
    written: dict[
        Path, dict[str, Any]
    ] = {}  # not the records: their examples and samples would fill the memory
    totals = Totals(len(head["transforms"]), source_bytes(tasks))
    for part in finished:
        record = read_record(part)
        totals.add(record)
        written |= {part / name: digest for name, digest in record["files"].items()}
    totals.check_rejects(limit, final=True)
    frequencies = sum(np.load(part / COUNTS) for part in finished)
    transforms = [
        transform | {"dropped": dict(sorted(n.items())), "examples": dict(sorted(examples.items()))}
        for transform, n, examples in zip(head["transforms"], totals.dropped, totals.examples, strict=True)
    ]
    for transform, counts in zip(transforms, totals.counted, strict=True):
        if counts:
            transform["counted"] = dict(sorted(counts.items()))
    manifest = {**head, "transforms": transforms}
    for split in present(totals.splits):
        counts = totals.splits[split]
        manifest |= {f"{split}_documents": counts["documents"], f"{split}_tokens": counts["tokens"]}
    manifest |= {
        "text_bytes": totals.text_bytes,
        "unigram_loss": unigram_loss(*frequencies),
        "sources": {name: dict(totals.sources[name]) for name in sorted(totals.sources)},
        **{
            f"{name}_tokens": dict(sorted(counts.items()))
            for name, counts in sorted(totals.described.items())
        },
        "lengths": {key: totals.lengths[key] for key in sorted(totals.lengths, key=int)},
        "rejected": dict(sorted(totals.rejected.items())),
        **({"skipped": dict(sorted(totals.skipped.items()))} if totals.skipped else {}),
        "blank": totals.blank,
        **_flow(totals),
        **_left_out(tasks),
        **({"diversity": found} if (found := diversity(finished, totals.sources)) else {}),
        "files": _join(folder, finished, written, writer),
    }
    _write_rejects(folder, finished)
    join_tables(finished, folder)
    if (folder / PLAN).exists():  # a run's cache has no plan and needs no report
        write_report(folder, manifest)
    manifest["extras"] = {name: file_digest(folder / name) for name in EXTRAS if (folder / name).exists()}
    manifest[CHECKSUM] = checksum(manifest)
    durable.write(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    shutil.rmtree(parts)
    return totals


def present(splits: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """Returns the names of the splits of a folder, of the counts of all: "test" only where it has documents."""
    return tuple(split for split in SPLITS if split != "test" or splits["test"]["documents"])


def shares(tokens: Mapping[str, int]) -> str:
    """Returns the sizes of the splits in tokens, for messages."""
    train, validation, test = (tokens.get(split, 0) for split in SPLITS)
    text = f"training {train:,}, validation {validation:,}: {validation / (train + validation + test):.1%}"
    return f"{text}, test {test:,}" if test else text


def source_bytes(tasks: Sequence[Mapping[str, Any]]) -> int:
    """Returns the total size of the files of tasks, in bytes."""
    return sum(piece.get("bytes", 0) for task in tasks for piece in task.get("pieces", []))


def _flow(totals: Totals) -> dict[str, Any]:
    """Returns what passed each transform, and the sizes of the splits and of the source; empty if it was not counted."""
    if totals.flow is None:
        return {}
    sizes = {f"{split}_bytes": totals.splits[split]["bytes"] for split in present(totals.splits)}
    source = {"source_bytes": totals.source_bytes, "lost_bytes": totals.lost_bytes}
    return {"flow": totals.flow.record(), **sizes, **source}


def _left_out(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the number of files that were not read, by reason; empty if all were read."""
    counts: Counter[str] = Counter()
    for task in tasks:
        counts.update(task.get("left_out", {}))
    return {"left_out": dict(sorted(counts.items()))} if counts else {}


def _join(
    folder: Path, parts: list[Path], written: Mapping[Path, dict[str, Any]], writer: TokenWriter
) -> dict[str, Any]:
    """Joins the splits; returns size and SHA-256 of each file but the manifest."""
    files: dict[str, Any] = {}
    for split in SPLITS:
        of_split = [part / split for part in parts if (part / split).is_dir()]
        if not of_split:
            continue
        moved = writer.join(of_split, folder / split)
        files |= {f"{split}/{name}": written[old] for name, old in moved.items()}
        durable.sync(folder / split)
        for path in sorted(folder.glob(f"{split}/*")):
            if path.name not in moved:
                files[f"{split}/{path.name}"] = file_digest(path)
    return files | {"tokenizer.json": file_digest(folder / "tokenizer.json")}


def _write_rejects(folder: Path, parts: list[Path]) -> None:
    """Writes the rejected documents in the order of the source; no file if there are none."""
    rejected = [part / REJECTS for part in parts if (part / REJECTS).stat().st_size]
    if not rejected:
        return
    with durable.replacing(folder / REJECTS) as temporary, temporary.open("wb") as stream:
        for path in rejected:
            with path.open("rb") as lines:
                shutil.copyfileobj(lines, stream)


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Returns the cross-entropy of validation's tokens under training's add-one-smoothed frequencies.

    Args:
        train: How often each token id occurs in the training split, (vocab_size,).
        validation: The same for the validation split.

    Returns:
        Nats per token: the loss of a model that only knows the token frequencies.
    """
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return -float(validation @ log_probability / validation.sum())
