"""Messages for ranks whose peer has died: all that they get is a connection error, in any call."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from core.errors import ConfigError

SECONDS = 5.0
"""How long ranks that lost a connection wait for the answers of all others."""
LOOKS_EVERY_SECONDS = 0.25
"""How often a rank that waits in a collective looks whether another one asks for answers."""

_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|connection was closed|Socket Timeout|recvValue failed|"
    r"(send|recv)Bytes failed|Timed out waiting \d+ms|wait timeout after|ncclRemoteError|NCCL communicator was aborted|"
    r"remote process exited|Watchdog caught collective operation timeout",
    re.IGNORECASE,
)
_LEFT, _ALIVE, _HEARD = "leyden/left", "leyden/alive", "leyden/heard"
"""Keys of the store, with the number of a rank: what it ended with; that it lives; that it has read who died."""
_ASKED, _WHO = "leyden/asked", "leyden/who"
_ADVICE = (
    "Why it died is in that rank's own output or the launcher's log; killed without a message: often out of memory.\n"
    "To resume from the last checkpoint, if there is one, start all ranks again with the same command and --ckpt_path=last."
)


class LostRankError(ConfigError):
    """Another rank of the run has died, which is no mistake in the configuration of this one."""

    exit_code = 1


class Watch:
    """Answers for this rank, in a thread, while it waits in a collective.

    Only ranks that exchange data with the one that died find a connection gone. The others wait for those, and
    notice when these have ended, and with rank 0 the store. So they answer, and keep who died, before that.

    Args:
        store: The run's store.
        rank: This rank.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store.clone(), rank
        self.who = ""
        self.store_is_gone = False
        self._over = threading.Event()
        threading.Thread(target=self._answer, name="lost ranks", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread at its next look; the ranks end at different times, and with rank 0 the store."""
        self._over.set()

    def _answer(self) -> None:
        try:
            if self._comes(_ASKED):
                self.store.set(f"{_ALIVE}/{self.rank}", "")
                if self._comes(_WHO):
                    self.who = self.store.get(_WHO).decode(errors="replace")
                    self.store.set(f"{_HEARD}/{self.rank}", "")
        except RuntimeError:  # what torch's stores raise, as `DistError`
            self.store_is_gone = True  # with its process

    def _comes(self, key: str) -> bool:
        while not self._over.wait(LOOKS_EVERY_SECONDS):
            if self.store.check([key]):
                return True
        return False


_watch: Watch | None = None


def watch() -> None:
    """Starts to answer other ranks, if there are any."""
    global _watch
    stop_watching()
    rank, ranks, store = _world()
    if ranks > 1 and store is not None:
        _watch = Watch(store, rank)


def stop_watching() -> None:
    """Stops to answer: the run is over."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch = None


def explain_lost_rank(errors: list[BaseException]) -> str | None:
    """Returns a message if one of the errors means that another rank of the run has died; else None.

    Waits five to ten seconds for the other ranks that are left. Any other error is written to the store, as long as
    that can be reached, so that the other ranks can report it.

    Args:
        errors: An error and its causes.
    """
    rank, ranks, store = _world()
    if ranks == 1:
        return None
    lost = next((e for e in errors if isinstance(e, RuntimeError) and _LOST.search(str(e))), None)
    if lost is None:
        with suppress(Exception):
            store.set(f"{_LEFT}/{rank}", error_line(errors[0]))
            if rank == 0:
                _tell(store, ranks, f"rank 0 failed with {error_line(errors[0])}")
        return None
    return "\n".join(
        [
            f"Another rank died: {_who(store, rank, ranks)}.",
            f"This is rank {rank} of {ranks}, which found the connection gone ({error_line(lost)[:120]}).",
            _ADVICE,
        ]
    )


def _world() -> tuple[int, int, Any]:
    """Returns this rank, how many there are, and their store; (0, 1, None) where there is one process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1, None
    store: Any = None
    with suppress(Exception):
        store = distributed.distributed_c10d._get_default_store()
    return distributed.get_rank(), distributed.get_world_size(), store


def report_dead_ranks(dead: list[tuple[int, int]]) -> None:
    """Prints which of the ranks that this process has started died, before the launcher kills the others.

    Args:
        dead: (number of the process from 1, exit code) of each.
    """
    distributed = sys.modules.get("torch.distributed")
    connected = distributed is not None and distributed.is_available() and distributed.is_initialized()
    first = distributed.get_rank() if distributed is not None and connected else 0
    who = [
        f"rank {first + number} was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"rank {first + number} ended with exit code {code}"
        for number, code in dead
    ]
    print(
        f"Another rank died: {'; '.join(who)}. All ranks of this machine are ended.\n{_ADVICE}",
        file=sys.stderr,
        flush=True,
    )


def _who(store: Any, rank: int, ranks: int) -> str:
    """Returns which ranks do not answer, or what they failed with; the same on all ranks."""
    # Rank 0 waits for the others, which read its store.
    known = _watch is not None and _watch.who and rank > 0
    if not known and (_watch is None or not _watch.store_is_gone):
        with suppress(
            RuntimeError
        ):  # the store is gone; torch has then printed a C++ stack, so once is enough
            return _asked(store, rank, ranks)
    if _watch is not None:
        _watch.stop()
        if _watch.who:
            return _watch.who
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return "the launcher does not answer" if agent else "rank 0, through which ranks find each other, is gone"


def _tell(store: Any, ranks: int, who: str) -> None:
    """Tells ranks that wait who died, before the store ends with this process: then there is nowhere to ask."""
    store.set(_ASKED, "")
    store.compare_set(_WHO, "", who)
    heard = [f"{_HEARD}/{other}" for other in range(1, ranks)]
    until = time.monotonic() + 4 * LOOKS_EVERY_SECONDS
    while time.monotonic() < until and not store.check(heard):
        time.sleep(0.05)


def _asked(store: Any, rank: int, ranks: int) -> str:
    """Asks the other ranks for answers; returns what the first one that asked concluded from them.

    Raises:
        RuntimeError: If the process that holds the store has gone.
    """
    store.set(f"{_LEFT}/{rank}", "")
    store.set(_ASKED, "")
    others = set(range(ranks)) - {rank}
    left, alive = _answers(store, {_LEFT: others, _ALIVE: others}, lambda: _watch is not None and _watch.who)
    failed = [f"rank {other} failed with {text}" for other, text in sorted(left.items()) if text]
    silent = [str(other) for other in sorted(others - left.keys() - alive.keys())]
    if failed:
        who = "; ".join(failed)
    elif silent:
        who = f"rank{'s' * (len(silent) > 1)} {', '.join(silent)} gave no sign of life"
    else:
        who = "all gave a sign of life, so it may be the network between them"
    who = store.compare_set(_WHO, "", who).decode(errors="replace")  # of the first one that concluded
    _answers(store, {_HEARD: alive.keys()})  # before the store ends with this process
    return who


def _answers(
    store: Any, asked: dict[str, Iterable[int]], known: Callable[[], object] = bool
) -> list[dict[int, str]]:
    """Returns for each key what ranks have written there, by rank.

    Waits until all have, the time is over, or `known()` is true: another rank has concluded who died.
    """
    found: list[dict[int, str]] = [{} for _ in asked]
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and not known():
        missing = 0
        for (key, ranks), answers in zip(asked.items(), found, strict=True):
            for other in set(ranks) - answers.keys():
                if store.check([f"{key}/{other}"]):
                    answers[other] = store.get(f"{key}/{other}").decode(errors="replace")
                else:
                    missing += 1
        if not missing:
            break
        time.sleep(0.05)
    return found


def error_line(error: BaseException) -> str:
    """Returns what kind of error it is, and the first line of what it says, without the stop at its end."""
    said = next(iter(str(error).strip().splitlines()), "")  # a pipeline's begin with an empty line
    return f"{type(error).__name__}: {said.rstrip('.')}"
