"""Proofs for the engines of a preparation: no task is lost or done twice, whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from conformance.case import Case
from conformance.data import build
from conformance.proof import proof, require
from conformance.workshop import workshop
from core.contracts import Engine
from core.errors import ConfigError

TASKS = [
    {"number": n, "pieces": [{"path": f"piece-{n} é", "share": n / 7, "more": [None, True]}]}
    for n in range(9)
]
FOREVER = 12
"""So often a task ends its process that no engine should try it again; then it is done, so that all proofs end."""


@dataclass
class Work:
    """Returns tasks with a mark on them, and notes each try; fails where its arguments say so.

    Args:
        folder: Of the notes.
        deaths: Number of a task -> how often it ends its process by SIGKILL.
        raises: Number of a task -> what it raises.
        here: The process that is not to be ended: an engine may work in it.
    """

    folder: Path
    deaths: Mapping[int, int] = field(default_factory=dict)
    raises: Mapping[int, Exception] = field(default_factory=dict)
    here: int = field(default_factory=os.getpid)

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        """Does a task."""
        number = task["number"]
        tried = len(self.tries(number))
        (self.folder / f"{number}-{tried}").touch()
        if tried < self.deaths.get(number, 0) and os.getpid() != self.here:
            os.kill(os.getpid(), signal.SIGKILL)
        if error := self.raises.get(number):
            raise error
        return task | {"done": number * number}

    def tries(self, number: int) -> list[Path]:
        """The notes of a task."""
        return list(self.folder.glob(f"{number}-*"))


def _work(**options: Any) -> Work:
    return Work(Path(mkdtemp(dir=workshop())), **options)


def _results(engine: Engine, work: Work) -> None:
    """Requires each task's result once, as it was returned, in any order."""
    found = sorted(engine.run(work, TASKS), key=lambda result: result.get("number", -1))
    numbers = [result.get("number") for result in found]
    require(
        numbers == [task["number"] for task in TASKS],
        f"tasks 0 to {len(TASKS) - 1} have the results {numbers}",
    )
    for result, task in zip(found, TASKS, strict=True):
        expected = task | {"done": task["number"] ** 2}  # type: ignore[operator]
        require(result == expected, f"{expected} arrives as {result}")


@proof("data", contract="Engine")
def does_each_task_once(case: Case) -> None:
    """Each task is done once, and what it returns arrives once and unchanged."""
    engine, work = build(case, Engine), _work()
    _results(engine, work)
    often = {task["number"]: len(work.tries(task["number"])) for task in TASKS}  # type: ignore[arg-type]
    require(set(often.values()) == {1}, f"number of a task -> how often it was done: {often}")
    require(list(engine.run(work, [])) == [], "there are results without a task")


@proof("data", contract="Engine")
def raises_what_a_task_raises(case: Case) -> None:
    """A ConfigError of a task arrives as it was raised, and any other error is not lost."""
    engine = build(case, Engine)
    for error in (ConfigError("piece-4: two lines\nof advice"), ValueError("a bug in piece-4")):
        raised: Exception | None = None
        try:
            list(engine.run(_work(raises={4: error}), TASKS))
        except Exception as caught:  # any: it is looked at below
            raised = caught
        require(raised is not None, f"{error!r} is lost")
        require(str(error) in str(raised), f"{error!r} arrives as {raised!r}")
        require(
            isinstance(raised, ConfigError) == isinstance(error, ConfigError),
            f"{error!r} arrives as {raised!r}",
        )


@proof("data", contract="Engine")
def does_a_dead_processs_task_again(case: Case) -> None:
    """The task of a process that dies is done again, and one that ends process after process is named in time."""
    engine = build(case, Engine)
    _results(engine, _work(deaths={0: 1, 5: 2}))
    work = _work(deaths={4: FOREVER})
    try:
        list(engine.run(work, TASKS))
    except ConfigError as error:
        require("4" in str(error), f"the message does not name the task: {error}")
    tried = len(work.tries(4))
    require(
        tried <= FOREVER, f"a task that ends each process was done {tried} times, and the run not stopped"
    )
