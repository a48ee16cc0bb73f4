"""Which run writes to a folder on object storage, so that two runs do not replace each other's checkpoints.

An object `.owner` there names the run and its process. It is made before the first step, in one request that fails if
there is one already. A run has a random id, which is in its run folder and in its checkpoints: started again in that
folder, or resumed from one of its checkpoints, it is the same run. A process that was killed keeps nobody out: on its
machine its mark is taken over, and on others by the run that is resumed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core import durable
from core.errors import ConfigError
from toolkit.bounded import parse_json
from toolkit.holders import Holder, alive, myself
from toolkit.object_storage import ObjectFolder

__all__ = ["OWNER", "take"]

OWNER = ".owner"
"""Name of the object, and of the file in a run folder that holds the run's id."""
ATTEMPTS, MOST_BYTES = 3, 2**16


@dataclass(frozen=True)
class _Mark:
    """What the object says.

    Attributes:
        run: Id of the run; "" if it cannot be read.
        folder: The run folder.
        boot: Id of the machine and its start: names of machines may be the same.
        holder: The process.
    """

    run: str
    folder: str
    boot: str
    holder: Holder

    @property
    def alive(self) -> bool | None:
        """Whether the process runs; None if that cannot be seen from here."""
        return alive(self.holder) if self.boot == _boot() else None

    @property
    def who(self) -> str:
        """The process, for messages."""
        process = f"process {self.holder.process} on {self.holder.host}, run folder {self.folder}"
        return process if self.run else "its mark cannot be read"


def take(storage: ObjectFolder, checkpoints_run: str, run_folder: Path, there: Collection[str]) -> str:
    """Marks a folder as this run's, on the first rank; returns the run's id there.

    Args:
        storage: The folder.
        checkpoints_run: The id in the checkpoint that the run resumes; "" for none.
        run_folder: The run's folder on this machine.
        there: Names of the checkpoints in the folder on object storage.

    Raises:
        ConfigError: If another run writes there, or may.
    """
    own = _id_in(run_folder) or uuid.uuid4().hex
    for _ in range(ATTEMPTS):
        found, run = storage.look_up(OWNER), own
        if found is not None:
            mark = _parsed(storage.read(OWNER, MOST_BYTES))
            same = mark.run in {own, checkpoints_run} - {""}
            if fault := _fault(storage.url, mark, same, there):
                raise ConfigError(fault)
            run = mark.run if same else own
        content = asdict(_Mark(run, str(run_folder.absolute()), _boot(), myself()))
        if storage.put_if(OWNER, json.dumps(content).encode(), found):
            durable.write(run_folder / OWNER, run)
            return run
    raise ConfigError(
        f"PeriodicCheckpoint: dirpath is {storage.url}, where another run starts right now. Name another."
    )


def _fault(url: str, mark: _Mark, same: bool, there: Collection[str]) -> str | None:
    """Returns why a run may not write beside a mark, or None."""
    lives = False if mark.holder == myself() else mark.alive
    if (same and not lives) or (lives is False and not there):
        return None
    head = f"PeriodicCheckpoint: dirpath is {url}, which belongs to another run ({mark.who}).\n"
    if same:
        head = f"PeriodicCheckpoint: dirpath is {url}, to which this run writes already ({mark.who}).\n"
    advice = "Name another, such as one with ${run_folder} in its URL: each would replace the other's checkpoints.\n"
    if there and not same:
        advice += f"Or go on from that run's checkpoints: --ckpt_path {url}.\n"
    then = (
        "Or wait until that process ends."
        if lives
        else f"If it has ended, delete {url}/{OWNER} and start again."
    )
    return f"{head}{advice}{then}"


def _parsed(content: bytes) -> _Mark:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        found: Any = parse_json(content)
        return _Mark(str(found["run"]), str(found["folder"]), str(found["boot"]), Holder(**found["holder"]))
    return _Mark("", "", "", Holder())


def _id_in(folder: Path) -> str:
    """Returns the id in a run folder; "" if there is none."""
    with suppress(OSError, ValueError), open(folder / OWNER, encoding="ascii") as file:
        return file.read(64).strip()
    return ""


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
