"""Runs the transforms that have to see all documents before anything is encoded: a map and a reduce step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core import durable
from core.errors import ConfigError
from datamodules.preparation.pipeline import Pipeline, Tally
from toolkit.sizes import readable

_MUCH = 64 << 20
"""Bytes of kept documents that a user is told of."""


@dataclass
class MapTask:
    """The map step: runs `map` of a transform over one task's documents, after the transforms before it; in any process.

    Args:
        pipeline: Reader and transforms.
        index: Index of the transform.
        folder: Holds what `map` writes, one file per task.
    """

    pipeline: Pipeline
    index: int
    folder: Path

    def __call__(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Runs `map` unless its file exists; returns the name of the file.

        Raises:
            ConfigError: If the file cannot be written.
        """
        path = self.folder / f"{task['number']:06}"
        if not path.exists():
            tally = Tally(len(self.pipeline.transforms))
            found = self.pipeline.batches(task, tally, until=self.index)
            if (kept := self.pipeline.kept) and self.index in kept.indices:
                found = kept.writing(found, tally.state, task["number"], self.index)
            try:
                with durable.replacing(path) as temporary:
                    self.pipeline.transforms[self.index].map(found, temporary)
            except OSError as error:
                raise ConfigError(
                    f"{error.filename or path}: {durable.write_error(error)}.\nWhat is done so far is kept: make room, and "
                    "run the same again."
                ) from error
        return {"findings": str(path)}


def map_reduce(
    pipeline: Pipeline,
    tasks: Sequence[dict[str, Any]],
    parts: Path,
    over: Callable[[Any, Sequence[dict[str, Any]]], Iterator[dict[str, Any]]],
) -> dict[int, Path]:
    """Runs map and reduce of each transform in order; returns index of the transform -> file with what its `reduce` wrote."""
    for index, transform in enumerate(pipeline.transforms):
        if not transform.needs_all_documents:
            continue
        folder = parts / f"map-{index}"
        folder.mkdir(exist_ok=True)
        conclusion = folder / "conclusion"
        if not conclusion.exists():
            findings = sorted(
                Path(done["findings"]) for done in over(MapTask(pipeline, index, folder), tasks)
            )
            with durable.replacing(conclusion) as temporary:
                transform.reduce(findings, temporary)
        pipeline.reduced[index] = conclusion
        size = pipeline.kept.size() if pipeline.kept and index in pipeline.kept.indices else 0
        if size >= _MUCH:
            print(
                f"{type(transform).__name__} has seen all documents. {parts} keeps them until they are tokens: {readable(size)}",
                file=sys.stderr,
                flush=True,
            )
    return pipeline.reduced
