"""The folder of one run: which one it is, and the record of the run that is kept there."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from core import __version__
from core.checkpoints.checkpoint import RECORD, numbered
from core.errors import ConfigError
from core.files import durable

PLACEHOLDER = "${run_folder}"
"""Stands in a config for the run's folder, which is known only when the run starts."""


CLAIM = ".claimed"
"""A file that is made by the one run that a folder belongs to, as long as it is not over; it names its job."""

RECORDED = ("config.yaml", "techniques.txt")
"""What a training run writes into its folder as it starts."""


def fresh(root: Path, claim: bool = True, job: str | None = None) -> Path:
    """Returns `root`, or the first of root-2, root-3... that no run has left anything in, or is starting in.

    Args:
        root: The folder for the first run.
        claim: Whether to make the folder, so that no run that starts in the same moment chooses it.
        job: What the launcher calls the job; if it was started before, its folder is returned.

    Raises:
        ConfigError: If the folder cannot be made.
    """
    if job and (begun := of_job(root, job)):
        return begun
    folder, number = root, 1
    while _used(folder) or (claim and not _claimed(folder)):
        number += 1
        folder = root.with_name(f"{root.name}-{number}")
    if claim and job:
        own(folder, job)
    return folder


def own(folder: Path, job: str) -> None:
    """Notes, once, that a folder is a job's, which finds it again by that when it is started again.

    Raises:
        ConfigError: If that cannot be noted.
    """
    if is_of(folder, job):
        return
    try:
        durable.write(folder / CLAIM, job)  # whole: another rank may be reading it
    except OSError as error:
        with suppress(OSError):
            (folder / CLAIM).unlink()
        raise _unmakeable(folder, error) from error


def is_of(folder: Path, job: str) -> bool:
    """Whether a folder is a job's."""
    try:
        return (folder / CLAIM).read_text(encoding="utf-8") == job
    except OSError:
        return False


def claimed_at_ns(folder: Path) -> int:
    """Returns when a folder became a job's, as files' times are given: what is older was there before it."""
    return (folder / CLAIM).stat().st_mtime_ns


def of_job(root: Path, job: str) -> Path | None:
    """Returns the folder among `root`, root-2, root-3... that a job made when it was started before, if any."""
    return next((folder for folder in [root, *numbered(root)] if is_of(folder, job)), None)


def _used(folder: Path) -> bool:
    try:
        return any((folder / name).exists() for name in ("metrics.csv", "checkpoints", CLAIM))
    except OSError as error:  # such as a name that is too long
        raise _unmakeable(folder, error) from error


def _unmakeable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"The run folder {folder} cannot be made: {error.strerror}. Set --trainer.default_root_dir."
    )


def _claimed(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CLAIM).touch(exist_ok=False)
    except FileExistsError:
        if folder.is_dir():
            return False
        raise ConfigError(f"The run folder {folder} is a file. Set --trainer.default_root_dir.") from None
    except OSError as error:
        raise _unmakeable(folder, error) from error
    return True


@dataclass(frozen=True)
class Claim:
    """A folder that is a run's own until the run is over.

    Attributes:
        folder: The folder.
        made: It and its parents, the nearest first, as far as they were made for the run.
        before: What lay in it before: a run may be given a folder in which its configs are kept.
    """

    folder: Path
    made: tuple[Path, ...] = ()
    before: frozenset[str] = frozenset()

    def release(self, failure: BaseException | None, job: str | None = None) -> None:
        """Ends the claim, and removes what folders were made for the run, if nothing lies in them.

        Args:
            failure: What ended the run, if not its end: then, where it left nothing but its record, that goes too.
            job: The launcher's, which may start a run that failed again: the folder stays its own, unless the run
                came no further than to a mistake that it would meet again.
        """
        bare = self._is_bare()
        if failure and job and not (isinstance(failure, ConfigError) and bare):
            return
        with suppress(OSError):
            (self.folder / CLAIM).unlink()
            for name in RECORDED if failure and bare else ():
                if name not in self.before:
                    (self.folder / name).unlink(missing_ok=True)
            for path in self.made:
                path.rmdir()

    def _is_bare(self) -> bool:
        """Whether the run has left nothing but its record."""
        try:
            return _names(self.folder) - self.before <= {CLAIM, *RECORDED}
        except (OSError, MemoryError):  # what has to be told is what ended the run
            return False


def claimed(folder: Path, there: Collection[Path]) -> Claim:
    """Returns the claim on a folder that has just been chosen; `there` are those that were there before."""
    made = tuple(path for path in (folder, *folder.parents) if path not in there)
    return Claim(folder, made, frozenset(_names(folder) - {CLAIM}))


def present(root: Path) -> set[Path]:
    """Returns which of `root`, root-2, root-3... and their parents are there, but for those of a start cut off."""
    found = [root]
    with suppress(OSError):  # a name that is too long, or a folder that may not be read: `fresh` says so
        found += numbered(root)
        found = [folder for folder in found if _names(folder) != {CLAIM}]
    return {path for path in (*found, *root.parents) if os.path.exists(path)}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def of_checkpoint(path: Path) -> Path:
    """Returns the run folder that a checkpoint lies in: the nearest parent with a recorded config."""
    for folder in (path if path.is_absolute() else path.absolute()).parents:
        if (folder / "config.yaml").is_file():
            return Path(os.path.relpath(folder)) if not path.is_absolute() else folder
    return path.parent


def fill_in(value: Any, folder: Path) -> Any:
    """Replaces `${run_folder}` in every string of a nested configuration, in place where it can."""
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, str(folder))
    if isinstance(value, list):
        value[:] = [fill_in(item, folder) for item in value]
    elif isinstance(value, dict):
        value.update({key: fill_in(item, folder) for key, item in value.items()})
    elif hasattr(value, "__dict__") and hasattr(value, "items"):
        for key, item in vars(value).items():
            setattr(value, key, fill_in(item, folder))
    return value


class RunRecord(Callback):
    """Writes the full config and the selected techniques into the run folder and every checkpoint.

    Args:
        config: The resolved configuration as YAML.
        techniques: The table of what was selected.
        folder: The run folder as rank 0 chose it; other ranks take it over from there.
        job: What the launcher calls the job, if it may start it again.
    """

    def __init__(self, config: str, techniques: str, folder: Path, job: str | None = None) -> None:
        self.config = config
        self.techniques = techniques
        self.folder, self.job = folder, job

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Agrees on the folder over all ranks and writes the record on rank 0."""
        self.folder = Path(trainer.strategy.broadcast(str(self.folder)))
        setattr(trainer, "_default_root_dir", str(self.folder))  # noqa: B010 - no public setter
        self._write(str(getattr(stage, "value", stage)))

    @rank_zero_only
    def _write(self, stage: str) -> None:
        # Not before all ranks have met: of a folder that is the job's, each takes the last checkpoint.
        if self.job:
            own(self.folder, self.job)
        name = "config" if stage == "fit" else f"config-{stage}"
        path = self.folder / f"{name}.yaml"
        if path.exists() and path.read_text(encoding="utf-8") != self.config:
            earlier = len(list(self.folder.glob(f"{name}.[0-9]*.yaml")))
            path.rename(path.with_name(f"{name}.{earlier + 1}.yaml"))
        durable.write(path, self.config)
        durable.write(self.folder / "techniques.txt", self.techniques + "\n")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stores the configuration in the checkpoint, so that it can be read without its folder."""
        checkpoint[RECORD] = {"config": self.config, "version": __version__, "ranks": trainer.world_size}
