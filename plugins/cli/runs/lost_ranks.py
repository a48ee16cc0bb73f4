"""Messages for ranks whose peer has died: all that they get is a connection error, in any call."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from core.errors import ConfigError

SECONDS = 5.0
"""How long ranks that lost a connection wait for each other's answer; by then all remaining ranks have noticed."""

_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|connection was closed|Socket Timeout|recvValue failed|"
    r"(send|recv)Bytes failed|Timed out waiting \d+ms|wait timeout after|ncclRemoteError|NCCL communicator was aborted|"
    r"remote process exited|Watchdog caught collective operation timeout",
    re.IGNORECASE,
)
_KEY = "leyden/left"
_ADVICE = (
    "Why it died is in that rank's own output or the launcher's log; killed without a message: often out of memory.\n"
    "To resume from the last checkpoint, start all ranks again with the same command and --ckpt_path=last."
)


class LostRankError(ConfigError):
    """Another rank of the run has died, which is no mistake in the configuration of this one."""

    exit_code = 1


def explain_lost_rank(errors: list[BaseException]) -> str | None:
    """Returns a message if one of the errors means that another rank of the run has died; else None.

    Waits up to five seconds for the remaining ranks. Any other error is written to the store, if it can be
    reached, so that the other ranks can report it.

    Args:
        errors: An error and its causes.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if ranks == 1:
        return None
    lost = next((e for e in errors if isinstance(e, RuntimeError) and _LOST.search(str(e))), None)
    store: Any = None
    with suppress(Exception):
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"{_KEY}/{rank}", "" if lost else _line(errors[0]))
    if lost is None:
        return None
    return "\n".join(
        [
            f"Another rank died: {_who(store, rank, ranks)}.",
            f"This is rank {rank} of {ranks}, which found the connection gone ({_line(lost)[:120]}).",
            _ADVICE,
        ]
    )


def say_of_started(dead: list[tuple[int, int]]) -> None:
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
    """Returns which ranks do not answer, or what they failed with."""
    signs: dict[int, str] = {rank: ""}
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until:
            for other in _new(store, signs, ranks):
                signs[other] = store.get(f"{_KEY}/{other}").decode(errors="replace")
            time.sleep(0.05)
    except Exception:  # the process that holds the store has gone
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return (
            "the launcher does not answer"
            if agent
            else "rank 0, through which ranks find each other, is gone"
        )
    failed = [f"rank {other} failed with {sign}" for other, sign in sorted(signs.items()) if sign]
    silent = [str(other) for other in range(ranks) if other not in signs]
    if failed:
        return "; ".join(failed)
    if not silent:
        return "all gave a sign of life, so it may be the network between them"
    return f"rank{'s' * (len(silent) > 1)} {', '.join(silent)} gave no sign of life"


def _new(store: Any, signs: dict[int, str], ranks: int) -> Iterator[int]:
    yield from (o for o in range(ranks) if o not in signs and store.check([f"{_KEY}/{o}"]))


def _line(error: BaseException) -> str:
    return next(iter(f"{type(error).__name__}: {error}".splitlines()), "")
