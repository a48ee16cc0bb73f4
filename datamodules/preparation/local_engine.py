"""Works on the pieces of a preparation in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from core.contracts import Engine
from core.errors import ConfigError
from core.technique import technique

_ATTEMPTS = 3
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_PRELOADED = ["core.contracts", "datamodules.preparation.preparation_task", "litdata.streaming.writer"]


@technique(paper="own work: processes that take one task at a time, of multiprocessing's fork server")
class LocalEngine(Engine):
    """Worker processes of one thread each, which take one task at a time.

    A task whose process dies is done again by another; after three deaths the run stops and names it. The
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
        number = min(self.workers or len(os.sched_getaffinity(0)), len(tasks))
        waiting, deaths = deque(tasks), Counter[str]()
        context = _context()
        workers = {_Worker(context, work) for _ in range(number)}
        try:
            for worker in workers:
                worker.begin(waiting.popleft())
            while busy := [worker for worker in workers if worker.task is not None]:
                by_handle = {handle: worker for worker in busy for handle in worker.handles}
                for worker in {by_handle[handle] for handle in wait(by_handle)}:
                    task, result = worker.task, worker.result()
                    if result is None:  # it is dead
                        deaths[repr(task)] += 1
                        _check(deaths[repr(task)], task, worker)
                        waiting.appendleft(task)
                        workers.remove(worker)
                        workers.add(worker := _Worker(context, work))
                    else:
                        yield result
                    if waiting:
                        worker.begin(waiting.popleft())
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    """A process, and the task that it has."""

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
        with suppress(OSError):  # it is dead: `result` tells
            self.connection.send(task)

    def result(self) -> dict[str, Any] | None:
        """Returns the task's result, or None if the process has died; ConfigError: what the task raised."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return None
        self.task = None
        if kind == "mistake":
            raise ConfigError(value)
        if kind == "error":
            raise RuntimeError(f"A worker of LocalEngine failed:\n{value}")
        return value

    def end(self) -> None:
        self.process.kill()  # what it has not finished it has not begun
        self.process.join()


def _check(deaths: int, task: Any, worker: _Worker) -> None:
    if deaths < _ATTEMPTS:
        return
    code = worker.process.exitcode
    cause = (
        "by SIGKILL, as when memory is full: take fewer workers" if code == -9 else f"with exit code {code}"
    )
    paths = [piece.get("path", "") for piece in task.get("pieces", [])]
    raise ConfigError(
        f"LocalEngine: task {task.get('number')} ended its process {deaths} times, the last time {cause}.\n"
        f"It reads {', '.join(paths[:3])}{'...' if len(paths) > 3 else ''}."
    )


def _context() -> Any:
    """Returns what starts processes: a server that has imported everything once, where there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)  # libraries read it when they are imported
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _serve(connection: Connection, work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Does tasks until there are no more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(_ONE_THREAD)
    import pyarrow

    pyarrow.set_cpu_count(1)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            answer = ("done", work(task))
        except ConfigError as error:
            answer = ("mistake", str(error))
        except Exception:
            import traceback

            answer = ("error", traceback.format_exc())
        connection.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
