"""The ranks of `generate --tensor_parallel`: started here, or by torchrun. An error of one of them ends all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from multiprocessing import connection
from typing import Any

from core.errors import ConfigError

GRACE_SECONDS = 0.5
"""How long is waited for the errors of other ranks: that of a lost connection may come before its cause."""


NO_READER = 141
"""What a rank sends where its output is no longer read, as behind `| head`."""


def is_launched() -> bool:
    """Returns whether this process is a rank, of torchrun or of :func:`start`."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def start(ranks: int, command: Callable[[list[str]], int], arguments: Sequence[str]) -> int:
    """Runs a command on so many ranks of this machine, and waits for them.

    Raises:
        ConfigError: With the error of the rank that failed first; the others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["plugins.commands.generate_shards", "plugins.commands.generate_job"])
    # Bound until the end, so that no other process gets the port before rank 0 listens on it, which SO_REUSEADDR permits.
    keeping = socket.socket()
    keeping.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeping.bind(("127.0.0.1", 0))
    port = keeping.getsockname()[1]
    processes, errors = [], []
    try:
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            words = (rank, ranks, port, command, list(arguments), sender)
            process = context.Process(target=_run, args=words, name=f"rank {rank}", daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            errors.append(receiver)
        _wait(processes, errors)
    finally:
        for process in processes:
            process.kill()
            process.join()
        keeping.close()
    return 0


def _wait(processes: Sequence[Any], errors: Sequence[Any]) -> None:
    alive = list(processes)
    while alive:
        connection.wait([process.sentinel for process in alive])
        if any(process.exitcode for process in processes):
            time.sleep(GRACE_SECONDS)
            raise _first_error(processes, errors)
        alive = [process for process in alive if process.exitcode is None]


class RankError(ConfigError):
    """What a rank failed with."""


def _first_error(processes: Sequence[Any], errors: Sequence[Any]) -> Exception:
    """Returns the cause: a rank that was killed, then a mistake of the user, then any other error."""
    found: list[tuple[int, str]] = []
    for rank, (process, error) in enumerate(zip(processes, errors, strict=True)):
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            text = f"Rank {rank} was killed by {name}: often out of memory. All {len(processes)} ranks have ended."
            found.append((1, text))
            break
        if process.exitcode and error.poll():
            found.append(error.recv())
    if any(code == NO_READER for code, _ in found):
        return BrokenPipeError()
    code, text = next((one for one in reversed(found) if one[0] == 2), (found or [(1, "A rank ended.")])[-1])
    raised = RankError(text)
    raised.exit_code = code
    return raised


def _run(
    rank: int, ranks: int, port: int, command: Callable[[list[str]], int], arguments: list[str], errors: Any
) -> None:
    """Runs the command as one of the ranks; sends an error to the process that started it, instead of printing it."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all; the process that started this one ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from plugins.cli.error_messages import explain_error

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    try:
        command(arguments)
    except ConfigError as error:
        errors.send((error.exit_code, str(error)))
    except BrokenPipeError:
        errors.send((NO_READER, ""))
        os._exit(1)
    except Exception as error:
        errors.send((1, f"Rank {rank}: {explain_error(error)}"))
    else:
        return
    sys.stdout.flush()
    os._exit(1)  # without the ends of libraries that wait for other ranks


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def connected(ranks: int, device: str) -> Iterator[tuple[int, str]]:
    """Connects this rank with the others; yields its number and its device. Only rank 0 writes to the terminal.

    Raises:
        ConfigError: If another number of ranks was launched, or there is no device for each of them.
    """
    import torch
    import torch.distributed as dist

    from core.lightning_compat import default_backend

    if ranks != int(os.environ["WORLD_SIZE"]):
        raise ConfigError(f"--tensor_parallel {ranks}: {os.environ['WORLD_SIZE']} processes were launched.")
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if device == "cuda":
        if torch.cuda.device_count() <= local:
            raise ConfigError(
                f"--tensor_parallel {ranks}: this machine has {torch.cuda.device_count()} GPUs."
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    elif device != "cpu":
        raise ConfigError(f"--tensor_parallel {ranks}: give --device cpu or cuda, not {device[:50]}.")
    dist.init_process_group(default_backend(torch.device(device)), rank=rank, world_size=ranks)
    with _silent() if rank else nullcontext():
        yield rank, device
    dist.barrier()  # none leaves while another one needs it
    dist.destroy_process_group()


@contextmanager
def _silent() -> Iterator[None]:
    with (
        open(os.devnull, "w", encoding="utf-8") as nothing,
        redirect_stdout(nothing),
        redirect_stderr(nothing),
    ):
        yield
