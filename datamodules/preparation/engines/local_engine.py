"""Runs the tasks of a preparation in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from core.contracts import Engine
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.engines.engine_worker import (
    ATTEMPTS,
    ONE_THREAD,
    Answer,
    answer,
    cores,
    deadly,
    environment,
    result,
    use_one_thread,
)

_PRELOADED = ["datamodules.preparation.preparation_task", "datamodules.preparation.writers.token_shards"]


@technique(paper="own work: processes that take one task at a time, of multiprocessing's fork server")
class LocalEngine(Engine):
    """Runs data preparation in processes of this machine, each with one thread and one task at a time.

    If a process dies, another one repeats its task; after three deaths the run stops and names the task. The
    workers end with the process that started them.

    Args:
        workers: Number of processes; None: one for each core that this process may use.

    Raises:
        ConfigError: If `workers` is below 1.

    Example:
        data:
          init_args:
            engine: {class_path: LocalEngine, init_args: {workers: 2}}
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"LocalEngine: workers is {workers}; it is at least 1.")
        self.workers = workers

    def run(
        self, work: Callable[[dict[str, Any]], dict[str, Any]], tasks: Sequence[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Calls `work` for each task and yields what it returns, as they are done."""
        number = min(self.workers or cores(), len(tasks))
        waiting, deaths = deque(tasks), Counter[str]()
        context = _context()
        workers = {_Worker(context, work) for _ in range(number)}
        try:
            for worker in workers:
                worker.begin(waiting.popleft())
            while busy := [worker for worker in workers if worker.task is not None]:
                by_handle = {handle: worker for worker in busy for handle in worker.handles}
                for worker in {by_handle[handle] for handle in wait(by_handle)}:
                    task, found = worker.answer()
                    if found is None:
                        deaths[repr(task)] += 1
                        if deaths[repr(task)] == ATTEMPTS:
                            raise deadly(task, worker.cause_of_death(), self)
                        waiting.appendleft(task)
                        workers.remove(worker)
                        workers.add(worker := _Worker(context, work))
                    else:
                        yield result(found, self)
                    if waiting:
                        worker.begin(waiting.popleft())
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    """A process and its current task."""

    def __init__(self, context: Any, work: Any) -> None:
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, work), daemon=True)
        self.process.start()
        other.close()
        self.task: dict[str, Any] | None = None

    @property
    def handles(self) -> list[Any]:
        return [self.connection, self.process.sentinel]

    def begin(self, task: dict[str, Any]) -> None:
        self.task = task
        with suppress(OSError):  # the process is dead: `answer` reports it
            self.connection.send(task)

    def answer(self) -> tuple[dict[str, Any], Answer | None]:
        """Returns the task and its result; None if the process has died."""
        assert self.task is not None
        task = self.task
        try:
            found: Answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return task, None
        self.task = None
        return task, found

    def cause_of_death(self) -> str:
        code = self.process.exitcode
        if code == -signal.SIGKILL:
            return "the last time by SIGKILL, as when memory is full: take fewer workers"
        return f"the last time with exit code {code}"

    def end(self) -> None:
        self.process.kill()  # safe: a task publishes nothing until it is finished
        self.process.join()


def _context() -> Any:
    """Returns the multiprocessing context: a fork server with the imports done, where the system has one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with environment(ONE_THREAD):  # libraries read these variables when they are imported
        forkserver.ensure_running()
    return context


def _serve(connection: Connection, work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Runs tasks until the connection is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    use_one_thread()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(answer(work, task))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
