"""Lets the stages that have to see all documents see them, before anything is encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.files import durable
from datamodules.preparation.preparation_task import Pipeline, Tally


@dataclass
class SurveyTask:
    """Shows one task's documents, behind the stages before it, to a stage; in any process.

    Args:
        pipeline: Reader and stages.
        index: Of the stage.
        folder: Where findings go, a file for each task.
    """

    pipeline: Pipeline
    index: int
    folder: Path

    def __call__(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the findings unless they are there; returns the name of their file."""
        path = self.folder / f"{task['number']:06}"
        if not path.exists():
            found = self.pipeline.batches(task, Tally(len(self.pipeline.stages)), until=self.index)
            with durable.replacing(path) as temporary:
                self.pipeline.stages[self.index].survey(found, temporary)
        return {"findings": str(path)}


def survey(
    pipeline: Pipeline,
    tasks: Sequence[dict[str, Any]],
    parts: Path,
    over: Callable[[Any, Sequence[dict[str, Any]]], Iterator[dict[str, Any]]],
) -> dict[int, Path]:
    """Runs the surveys, one stage after the other; returns index of the stage -> its conclusion."""
    for index, stage in enumerate(pipeline.stages):
        if not stage.surveys:
            continue
        folder = parts / f"survey-{index}"
        folder.mkdir(exist_ok=True)
        conclusion = folder / "conclusion"
        if not conclusion.exists():
            findings = sorted(
                Path(done["findings"]) for done in over(SurveyTask(pipeline, index, folder), tasks)
            )
            with durable.replacing(conclusion) as temporary:
                stage.conclude(findings, temporary)
        pipeline.conclusions[index] = conclusion
    return pipeline.conclusions
