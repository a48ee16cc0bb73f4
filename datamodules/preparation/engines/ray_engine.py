"""Runs the tasks of a preparation on all machines of a Ray cluster."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

from core.contracts import Engine
from core.errors import ConfigError
from core.technique import Package, technique
from datamodules.preparation.engines.engine_worker import (
    ATTEMPTS,
    Answer,
    answer,
    cores,
    deadly,
    environment,
    result,
    use_one_thread,
)

_OBJECT_STORE_BYTES = 128 << 20
"""Object store of a cluster that this run starts: only tasks and their counts pass through it, some kB each."""

_ANSWERS_WITHIN_S = 10.0


@technique(
    paper="Ray Data, arXiv:2501.12407: tasks as blocks of a data set that is mapped",
    needs=[Package("ray[data]>=2.60", extra="ray")],
)
class RayEngine(Engine):
    """Runs data preparation on a Ray cluster: one single-threaded process for each CPU except one.

    Every machine needs the same installed packages, and a shared file system for the text and the output. The main
    process runs on one of them. If a process or machine dies, its task is repeated; after three deaths the run stops
    and names the task. The tokens are those of `LocalEngine`, byte for byte.

    Args:
        address: Address of a running cluster, such as "10.0.0.1:6379", or "auto" for the one that this machine
            belongs to. None: the environment variable RAY_ADDRESS; without it, a cluster of this machine alone is
            started, and stopped at the end of the run.
        workers: Most processes at a time; None: all CPUs of the cluster except one, which Ray needs for reads.

    Raises:
        ConfigError: If `workers` is below 1, the address is malformed, or no cluster answers there.

    Example:
        # on one machine: ray start --head; on the others: ray start --address=10.0.0.1:6379; then, on any of them
        data:
          init_args:
            engine: {class_path: RayEngine, init_args: {address: null}}  # or auto
    """

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"RayEngine: workers is {workers}; it is at least 1.")
        if address not in (None, "auto", "local") and not re.search(r".:\d+$", address):
            raise ConfigError(f"RayEngine: address is {address!r}; it is HOST:PORT, auto, or left out.")
        self.address, self.workers = address, workers

    def run(
        self, work: Callable[[dict[str, Any]], dict[str, Any]], tasks: Sequence[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Calls `work` for each task and yields what it returns, as they are done."""
        if not tasks:
            return
        with _cluster(self.address or os.environ.get("RAY_ADDRESS") or "local"):
            for index, found in self._answers(work, tasks):
                if found is None:
                    raise deadly(tasks[index], "as when memory is full: take fewer workers", self)
                yield result(found, self)

    def _answers(self, work: Any, tasks: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer | None]]:
        """Yields a task's index and its result; None if its processes died."""
        import ray

        mapped = _mapped(ray.cloudpickle.dumps(work), sys.path.copy(), os.getcwd(), _counter())
        rows = [{"index": index, "task": json.dumps(task)} for index, task in enumerate(tasks)]
        size = min(self._most_workers(), len(rows))
        data = ray.data.from_items(rows, override_num_blocks=len(rows))  # Ray repeats blocks, not single rows
        data = data.map(mapped, compute=ray.data.TaskPoolStrategy(size), num_cpus=1)
        data.context.enable_progress_bars = data.context.print_on_execution_start = False
        data.context.execution_no_progress_timeout_s = -1  # a task may take hours
        for batch in data.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
            for row in batch.to_pylist():
                yield row["index"], pickle.loads(row["answer"])

    def _most_workers(self) -> int:
        import ray

        cpus = int(ray.cluster_resources().get("CPU", 0))
        if not cpus:
            raise ConfigError("RayEngine: the cluster has no CPU. Start its machines without --num-cpus=0.")
        return max(1, min(self.workers or cpus, cpus - 1))


def _counter() -> Any:
    """Returns an actor on this machine that counts the starts of each task: Ray repeats tasks without a limit."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Begun:
        def __init__(self) -> None:
            self.times: Counter[int] = Counter()

        def begin(self, index: int) -> int:
            self.times[index] += 1
            return self.times[index]

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Begun).remote()


def _mapped(
    pickled: bytes, path: list[str], folder: str, counter: Any
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the function that workers call for a row; a nested function is pickled with its code.

    Args:
        pickled: The function that runs a task.
        path: This process's `sys.path`, which may include the working directory.
        folder: The working directory.
        counter: The actor of :func:`_counter`.
    """

    def mapped(row: dict[str, Any]) -> dict[str, Any]:
        import os
        import pickle
        import platform
        import sys
        from contextlib import suppress

        import ray

        sys.path += [place for place in path if place not in sys.path]
        with suppress(OSError):  # relative paths then fail with an error of their own
            os.chdir(folder)
        found: Answer | None = None
        if ray.get(counter.begin.remote(row["index"])) <= ATTEMPTS:
            try:
                from datamodules.preparation.engines.ray_engine import answered

                found = answered(pickled, row["task"])
            except Exception as error:
                fault = f"RayEngine: the machine {platform.node()} cannot load the task: {error}."
                found = "mistake", f"{fault}\nEvery machine needs the same packages, of the same versions."
        return {"index": row["index"], "answer": pickle.dumps(found)}

    return mapped


def answered(pickled: bytes, task: str) -> Answer:
    """Runs a task in a worker process."""
    use_one_thread()
    return answer(_loaded(pickled), json.loads(task))


_loaded = lru_cache(maxsize=1)(pickle.loads)
"""Cached for the life of the process, with the tokenizer that it has loaded, as in other engines."""


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Connects this process to a cluster, or to a new one if the address is "local"; disconnects at the end.

    An existing connection is used and kept.

    Raises:
        ConfigError: If no cluster answers.
    """
    import ray

    # No usage statistics: the thread that sends them formats tracebacks, and Python up to 3.11.7 fails when two
    # threads parse at once (cpython #106905).
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
    import ray.data  # sets up its logging

    with _quiet():
        if ray.is_initialized():
            yield
            return
        place = tempfile.gettempdir()
        if len(place) > 20:  # names of sockets end at 107 characters
            place = "/tmp"
        # ignore_cleanup_errors: Ray may still write
        with tempfile.TemporaryDirectory(
            prefix="leyden-ray-", dir=place, ignore_cleanup_errors=True
        ) as folder:
            try:
                _connect(address, folder)
                yield
            finally:
                ray.shutdown()


def _connect(address: str, folder: str) -> None:
    """Joins a cluster; a new one keeps its files in the folder."""
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    own = address == "local"
    if own:
        options |= {
            "num_cpus": cores(),
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "_temp_dir": folder,
        }
    try:
        if address not in ("local", "auto"):  # Ray would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN_S).close()
        with environment(_private() if own else {}), _sigterm_kept():
            ray.init(address, **options)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = re.split(r"\n|\. ", str(error).strip())[0].rstrip(".")
        raise ConfigError(
            f"RayEngine: {'Ray does not start here' if own else f'no cluster can be joined at {address}'}: {reason}.\n"
            "Start one with `ray start --head`, join the others with `ray start --address=HOST:6379`, and prepare on "
            "one of its machines with --data.engine.address=HOST:6379."
        ) from error


@cache
def _private() -> dict[str, str]:
    """Returns an environment without usage statistics and with a secret token that Ray requires of its clients.

    Ray reads the token once in a process. Without one it would write a token to the home folder.
    """
    usual = {
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    return usual | {name: os.environ[name] for name in usual if name in os.environ}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences Ray, which reports each death in several ways."""
    import ray._private.worker as printing

    loggers = [logging.getLogger(name) for name in ("ray", "ray.data")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    printing._worker_logs_enabled = False  # printed on stdout; there is no public switch
    try:
        yield
    finally:
        printing._worker_logs_enabled = True
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
