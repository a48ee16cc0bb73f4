"""Runs of the command line in forked processes: an import costs seconds, a fork of what is imported nothing."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

from conformance.proof import require
from conformance.workshop import workshop

PRELOADED = [
    "conformance.lean_start",
    "conformance.runs",
    "plugins.cli.runs.built_run",
    "conformance.recorder",
    "litdata",
    "fsspec.implementations.chained",
    "tokenizers",
    "plugins.cli.run_commands",
    "jsonargparse",
    "pyarrow",
    "pandas",
    "pytest",
    # What the tiny run names.
    "core.__main__",
    "core.pretrain_datamodule",
    "torch.utils.serialization.config",
    "datamodules.preparation.readers.text_documents",
    "datamodules.preparation.readers.json_lines_documents",
    "datamodules.preparation.tokenizers.bpe_tokenizer",
    "datamodules.preparation.writers.token_shards",
    "conformance.warmed",
]
"""What a run imports, pandas through pyarrow; pytest is there because a forked process imports its parent's main module.

A name that cannot be imported is passed over in silence by the fork server: a test holds that there is none.
"""

LAST = "conformance.huge_pages"
"""Preloaded behind what others have added."""

LEFT = "-left"
"""Ends the name of the folder with what a kill would have left of a run's folder."""

STREAMS = ("out", "err")
TIMEOUT_SECONDS = 120.0
GRACE_SECONDS = 30.0
"""Seconds that a rank may continue after another has failed: it may wait for that one without a limit."""


_kept: deque[socket.socket] = deque(maxlen=64)
"""What keeps ports free until they are used, seconds later; of earlier ones nobody waits for."""


@dataclass(frozen=True)
class Run:
    """What one run left behind.

    Attributes:
        folder: Its run folder.
        code: Its exit code; negative: the signal that ended it.
        stdout: What rank 0 wrote to stdout.
        stderr: What rank 0 wrote to stderr.
        error_text: The end of what it wrote, for messages.
        codes: The exit code of each rank; None of one that did not end by itself after another had failed.
    """

    folder: Path
    code: int
    stdout: str
    stderr: str
    error_text: str
    codes: tuple[int | None, ...] = ()

    def succeeded(self, what: str, hint: str = "") -> Run:
        """Returns the run itself.

        Args:
            what: Names the run in the message.
            hint: Added to the message.

        Raises:
            AssertionError: If it failed.
        """
        require(self.code == 0, f"{what} ended with exit code {self.code}:\n{self.error_text}{hint}")
        return self

    @cached_property
    def record(self) -> dict[str, Any]:
        """What the recorder noted on rank 0."""
        return self.record_of(0)

    def record_of(self, rank: int) -> dict[str, Any]:
        """What the recorder noted on a rank."""
        found: dict[str, Any] = json.loads((self.folder / f"record.{rank}.json").read_text(encoding="utf-8"))
        return found

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What was logged on rank 0, and what stood in `callback_metrics`: see :class:`conformance.recorder.Saver`."""
        path = self.folder / "figures.0.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint; None where it is a folder of another form than ours, as other strategies write them."""
        from plugins.checkpoints import checkpoint, sharded

        path = self.folder / "checkpoints" / f"step-{self.record['steps']}.ckpt"
        return checkpoint.read_checkpoint(path) if path.is_file() or sharded.is_sharded(path) else None


def run(
    words: Sequence[str],
    folder: Path,
    *,
    ranks: int = 1,
    timeout: float = TIMEOUT_SECONDS,
    cwd: Path | None = None,
    environments: Sequence[Mapping[str, str]] = (),
) -> Run:
    """Runs a command in a forked process, or in one for each rank; waits for it.

    Args:
        words: The command and its arguments.
        folder: Its run folder.
        ranks: Number of processes; with more than one they find what torchrun sets in their environment.
        timeout: Seconds after which all are killed.
        cwd: The working directory; the workshop by default.
        environments: What each rank finds in its environment, in place of what torchrun sets.

    Raises:
        AssertionError: If the time is over, or there is not one environment for each rank.
    """
    environments = environments or _environments(ranks)
    require(len(environments) == ranks, f"{len(environments)} environments for {ranks} ranks")
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [workshop() / f"output.{rank}" for rank in range(ranks)]
    children = _children(words, cwd or workshop(), environments, outputs)
    for child in children:
        child.start()
    codes = _wait(children, timeout)
    stdout, stderr = (_written(outputs[0], stream) for stream in STREAMS)
    error_text = "\n".join(filter(None, map(_end, outputs)))
    done = None not in codes or any(codes)
    require(done, f"`{' '.join(words)}` was not done after {timeout:.0f} s. It wrote:\n{error_text}")
    return Run(folder, next((code for code in codes if code), 0), stdout, stderr, error_text, tuple(codes))


def _children(
    words: Sequence[str], cwd: Path, environments: Sequence[Mapping[str, str]], outputs: Sequence[Path]
) -> list[Any]:
    """Returns the processes of a command's ranks, not started; makes empty files for what they write."""
    trusted = [os.environ.get("LEYDEN_TRUST", ""), "conformance"]  # the recorders
    shared = {"LEYDEN_TRUST": ",".join(filter(None, trusted))}
    for output in outputs:
        for stream in STREAMS:
            Path(f"{output}.{stream}").write_text("", encoding="utf-8")
    return [
        _context().Process(target=_child, args=(list(words), cwd, shared | dict(environment), str(output)))
        for environment, output in zip(environments, outputs, strict=True)
    ]


def start(words: Sequence[str], folder: Path, output: Path) -> Any:
    """Starts a command in a forked process, and does not wait for it; it ends with this process at the latest.

    Args:
        words: The command and its arguments.
        folder: The working directory.
        output: What it writes goes to this path with `.out` and `.err` added.

    Returns:
        The process.
    """
    [child] = _children(words, folder, [{}], [output])
    child.daemon = True
    child.start()
    return child


def in_subprocess(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function in another process, which hashes strings in another way and has no object of this one.

    Raises:
        AssertionError: If that ends with an error, which is on stderr.
    """
    child = _context().Process(target=function, args=arguments)
    child.start()
    child.join(TIMEOUT_SECONDS)
    child.kill()
    child.join()
    require(child.exitcode == 0, f"in another process it ended with exit code {child.exitcode}")


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> None:
    """Calls `function(rank, *arguments)` in a forked process for each rank; raises what one of them raises."""
    import torch

    _context()  # the fork server that has imported everything, not one of torch's
    torch.multiprocessing.start_processes(function, arguments, ranks, start_method="forkserver")


def free_port() -> int:
    """Returns a port on which a server of this machine can listen, and which the system gives to nobody else meanwhile.

    It is bound here, but not listened on: a server that sets SO_REUSEADDR, as torch's store does, may bind it too.
    """
    keeping = socket.socket()
    keeping.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeping.bind(("127.0.0.1", 0))
    _kept.append(keeping)
    return int(keeping.getsockname()[1])


def _end(output: Path) -> str:
    """The last lines that a process wrote to stderr, or to stdout where there are none."""
    found = filter(None, (_written(output, stream).strip() for stream in reversed(STREAMS)))
    return "\n".join(next(found, "")[-3000:].splitlines()[-12:])


def _written(output: Path, stream: str) -> str:
    return Path(f"{output}.{stream}").read_text(encoding="utf-8", errors="replace")


def _wait(children: Sequence[Any], timeout: float) -> list[int | None]:
    """Waits for all and kills those that take too long, or that wait for one that failed.

    Returns:
        The exit code of each; None of one that was killed here.
    """
    end, alive = monotonic() + timeout, list(children)
    while alive and monotonic() < end:
        wait([child.sentinel for child in alive], timeout=max(0.0, end - monotonic()))
        if any(child.exitcode for child in children):
            end = min(end, monotonic() + GRACE_SECONDS)
        alive = [child for child in alive if child.exitcode is None]
    codes = [child.exitcode for child in children]
    for child in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # with the workers of its loaders
        child.kill()
        child.join()
    return codes


@cache
def _context() -> Any:
    """The fork server, started with one thread and with everything imported."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    # A process has one fork server: that of a LocalEngine that was here before imported next to nothing. multiprocessing
    # has no public way to end it, and `set_forkserver_preload` has no effect on one that runs.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    context.set_forkserver_preload([*PRELOADED, LAST])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


def _environments(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "leyden-kit",
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _child(words: list[str], cwd: Path, environment: dict[str, str], output: str) -> None:
    """Runs the command line in the forked process."""
    os.setsid()
    gc.freeze()  # what was imported before: it is not looked through, and memory stays shared
    for number, name in enumerate(STREAMS, 1):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY), number)
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # loaders' workers: as in a run
    os.environ.update(environment)
    os.chdir(cwd)
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from conformance.warmed import forget_other_packages
    from core.__main__ import main
    from toolkit.ranks import launched_rank

    forget_other_packages()  # sys.path is the parent's now
    torch.set_num_threads(1)
    setattr(rank_zero_only, "rank", launched_rank() or 0)  # noqa: B010 - read at import, like that
    sys.exit(main(words))
