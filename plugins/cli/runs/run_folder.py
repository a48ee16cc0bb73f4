"""Chooses the folder of a run, and removes it after a run that left nothing in it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from core.errors import ConfigError, nearest
from plugins.checkpoints import remote_copies
from plugins.checkpoints.finding import numbered
from plugins.cli.configuration.stored_paths import PLACEHOLDER
from plugins.cli.configuration.yaml_texts import Keys
from plugins.cli.runs import claims
from plugins.cli.runs.claims import CLAIM, unmakeable
from toolkit.local_paths import in_url
from toolkit.object_storage import SCHEMES
from toolkit.storage_owner import OWNER

RECORDED = ("config.yaml", "techniques.txt")
"""What a training run writes into its folder as it starts."""


def fresh(root: Path, claim: bool = True, job: str | None = None) -> Path:
    """Returns `root`, or the first of root-2, root-3... that no run has written to or is starting in.

    Args:
        root: The folder for the first run.
        claim: Whether to make the folder, so that no run that starts in the same moment chooses it.
        job: Name of the job from :func:`plugins.cli.runs.restarts.job`; after a restart, its folder is returned.

    Raises:
        ConfigError: If the folder cannot be made.
    """
    if job and (begun := of_job(root, job)):
        return begun
    folder, number = root, 1
    while _used(folder) or (claim and not _claimed(folder)):
        number += 1
        folder = root.with_name(f"{root.name}-{number}")
    if claim:
        own(folder, job)
    return folder


def own(folder: Path, job: str | None) -> None:
    """Writes the claim of a folder, once; a restarted job finds its folder by it.

    Raises:
        ConfigError: If it cannot be written.
    """
    if (here := claims.myself(job)) == claims.read_claim(folder):
        return
    try:
        claims.write_claim(folder, here)
    except ConfigError:
        with suppress(OSError):
            (folder / CLAIM).unlink()
        raise


def is_of(folder: Path, job: str) -> bool:
    """Returns whether a job owns a folder."""
    holder = claims.read_claim(folder)
    return holder is not None and holder.job == job


def claimed_at_ns(folder: Path) -> int:
    """Returns when a folder became a job's, as `st_mtime_ns`: older files were there before."""
    return (folder / CLAIM).stat().st_mtime_ns


def of_job(root: Path, job: str) -> Path | None:
    """Returns the folder among `root`, root-2, root-3... that a job made when it was started before, if any."""
    return next((folder for folder in [root, *numbered(root)] if is_of(folder, job)), None)


def _used(folder: Path) -> bool:
    try:
        return any((folder / name).exists() for name in ("metrics.csv", "checkpoints", CLAIM))
    except OSError as error:  # such as a name that is too long
        raise unmakeable(folder, error) from error


def _claimed(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CLAIM).touch(exist_ok=False)
    except FileExistsError:
        if folder.is_dir():
            return False
        raise ConfigError(f"The run folder {folder} is a file. Set --trainer.default_root_dir.") from None
    except OSError as error:
        raise unmakeable(folder, error) from error
    return True


@dataclass(frozen=True)
class Claim:
    """A folder that one run owns until it ends.

    Attributes:
        folder: The folder.
        made: The folder and its parents, innermost first, that were created for the run.
        before: Names in it before the run, which may use a folder that holds its configs.
    """

    folder: Path
    made: tuple[Path, ...] = ()
    before: frozenset[str] = frozenset()

    def release(self, failure: BaseException | None, job: str | None = None) -> None:
        """Releases the claim, and removes folders that were created for the run and are empty.

        Args:
            failure: The error that ended the run, if any: a run that wrote nothing but its record loses that, too.
            job: The job, if its launcher may restart a failed run: it keeps the folder, unless the run failed with a
                ConfigError before it wrote anything, which a restart would meet again.
        """
        bare = self._is_bare()
        stays = bool(failure and job and not (isinstance(failure, ConfigError) and bare))
        claims.leave(self.folder, keep_job=stays)
        if stays:
            return
        with suppress(OSError):
            for name in (OWNER, *RECORDED) if failure and bare else ():
                if name not in self.before:
                    (self.folder / name).unlink(missing_ok=True)
            for path in self.made:
                path.rmdir()

    def _is_bare(self) -> bool:
        """Returns whether the run has written nothing but its record."""
        try:
            return _names(self.folder) - self.before <= {CLAIM, OWNER, *RECORDED}
        except (OSError, MemoryError):  # the error that ended the run is the one to report
            return False


def claimed(folder: Path, there: Collection[Path]) -> Claim:
    """Returns the claim on a folder that has just been chosen; `there` are the folders that existed before."""
    made = tuple(path for path in (folder, *folder.parents) if path not in there)
    return Claim(folder, made, frozenset(_names(folder) - {CLAIM}))


def present(root: Path) -> set[Path]:
    """Returns which of `root`, root-2, root-3... and their parents exist, without those of a start that was interrupted."""
    found = [root]
    with suppress(OSError):  # a name that is too long, or a folder that may not be read: `fresh` says so
        found += numbered(root)
        found = [folder for folder in found if _names(folder) != {CLAIM}]
    return {path for path in (*found, *root.parents) if os.path.exists(path)}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def of_checkpoint(path: Path) -> Path | None:
    """Returns the run folder of a checkpoint; None if no folder above it has the record of a run.

    That is the folder that holds the checkpoint, itself or in `checkpoints`; or one further up, if it has both files
    of a run's record. One on object storage belongs to the run folder whose configuration names its URL.
    """
    if (run := remote_copies.run_of(path)) is not None:
        return run
    absolute = path if path.is_absolute() else path.absolute()
    parents = list(absolute.parents)
    for depth, folder in enumerate(parents[:4]):
        near = depth == 0 or (depth == 1 and parents[0].name == "checkpoints")
        if all((folder / name).is_file() for name in (RECORDED[:1] if near else RECORDED)):
            return Path(os.path.relpath(folder)) if not path.is_absolute() else folder
    return None


def fill_in(value: Any, folder: Path) -> Any:
    """Returns an argument with the run folder in place of `${run_folder}`, in texts, paths, lists and mappings.

    It is for arguments that are about to be given to a class: what it returns must not be parsed again, because the
    folder's name is a text that may look like anything.
    """
    if isinstance(value, str):
        stored = value.partition("://")[0] in SCHEMES
        return value.replace(PLACEHOLDER, in_url(folder) if stored else str(folder))
    if isinstance(value, PurePath):
        return type(value)(fill_in(str(value), folder))
    if type(value) in (list, tuple):
        return type(value)(fill_in(item, folder) for item in value)
    if type(value) is dict:
        return {key: fill_in(item, folder) for key, item in value.items()}
    return value


def check_placeholders(value: Any, where: Callable[[Keys], str], keys: Keys = ()) -> None:
    """Raises a ConfigError for a text with a misspelt `${run_folder}`: a folder of that name would be made."""
    if isinstance(value, str):
        for name in re.findall(r"\$\{(\w+)\}", value):
            if name != "run_folder" and nearest(name, {"run_folder"}):
                raise ConfigError(f"{where(keys)}: there is no ${{{name}}}. Did you mean {PLACEHOLDER}?")
    items: Any = value.items() if isinstance(value, Mapping) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        check_placeholders(item, where, (*keys, key))


def check_plain(folder: Path) -> None:
    """Raises a ConfigError for a run folder that loggers would expand to another path, such as `~/run`."""
    text = str(folder)
    if "\0" in text:
        raise ConfigError("The run folder's name holds a NUL character. Set --trainer.default_root_dir.")
    meant = os.path.expandvars(os.path.expanduser(text))
    if meant != text:
        raise ConfigError(
            f"The run folder {text} has a `~` or a variable in its name, which some loggers expand and others do not:\n"
            f"write it out, --trainer.default_root_dir={meant}, or give the folder another name."
        )
