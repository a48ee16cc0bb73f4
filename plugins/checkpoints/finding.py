"""Finds the checkpoint to continue from: the newest complete one of a run, of its later runs, or of a folder of runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from core.errors import ConfigError, nearest
from plugins.checkpoints import remote_copies, sharded
from plugins.checkpoints.checkpoint import defect, invalid_content, step_recorded
from plugins.checkpoints.foreign import is_foreign
from plugins.cli.configuration.yaml_texts import read_yaml
from toolkit import local_paths, remote_checkpoints
from toolkit.checkpoint_names import ABANDONED, step_named
from toolkit.object_storage import ObjectFolder


def newest(root: Path, siblings: bool = False, resumes: bool = False) -> Path:
    """Returns the complete checkpoint of the highest step in a run folder, or in its folder `checkpoints`.

    Damaged checkpoints are printed to stderr and skipped. No other folders are searched.

    Args:
        root: The folder.
        siblings: Whether to search later runs of the same root (root-2, root-3...) first, the latest one first.
        resumes: As in :func:`plugins.checkpoints.checkpoint.defect`.

    Raises:
        ConfigError: If there is no complete checkpoint.
    """
    folders = [root, *(_later_runs(root) if siblings else [])]
    looked_at = 0
    for folder in reversed(folders):
        candidates = _files(folder)
        if found := next(_complete(candidates, resumes), None):
            return found
        looked_at += len(candidates)
    raise ConfigError(
        f"--ckpt_path last: there is no complete checkpoint in {root} ({looked_at} looked at).\n"
        "Leave --ckpt_path out to start from the beginning, or name the run: --ckpt_path RUN_FOLDER."
    )


def of_runs(folder: Path, resumes: bool = False) -> Path:
    """Returns the newest complete checkpoint of the run that saved last, among the run folders in a folder.

    Raises:
        ConfigError: If there is none.
    """
    found = [run for run in (folder.iterdir() if folder.is_dir() else ()) if run.is_dir() and _files(run)]
    for run in sorted(found, key=lambda run: max(map(_saved_ns, _files(run))), reverse=True):
        if checkpoint := next(_complete(_files(run), resumes), None):
            return checkpoint
    return newest(folder, resumes=resumes)


def of_folder(folder: Path, since_ns: int = 0, resumes: bool = False) -> Path | None:
    """Returns the complete checkpoint of the highest step in a run folder, or None; damaged ones are skipped.

    Args:
        folder: The folder.
        since_ns: Ignore checkpoints that were modified before, in nanoseconds as `st_mtime_ns`.
        resumes: As in :func:`plugins.checkpoints.checkpoint.defect`.
    """
    candidates = [path for path in _files(folder) if _saved_ns(path) >= since_ns]
    return next(_complete(candidates, resumes), None)


def _saved_ns(path: Path) -> int:
    if (saved := remote_copies.saved_ns(path)) is not None:
        return saved
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # deleted by its run, which is still training
        return 0


def _files(folder: Path, urls: bool = True) -> list[Path]:
    """Returns the checkpoints in a folder, in its `checkpoints`, and in the folders and, if asked, at the URLs that its config names."""
    recorded = list(_recorded_places(folder))
    # A run that went back and could not say so on the storage has saved its last step on this machine alone.
    staged = [folder / "uploads"] if remote_checkpoints.noted_return(folder) is not None else []
    places = dict.fromkeys(
        [folder, folder / "checkpoints", *staged, *(p for p in recorded if isinstance(p, Path))]
    )
    found = [path for place in places if place.is_dir() for path in place.glob("*.ckpt")]
    here = [path for path in found if path.name[0] != "." and (path.is_file() or sharded.is_sharded(path))]
    return here + [
        path
        for url in recorded
        if urls and isinstance(url, str)
        for path in remote_copies.listed(url, folder)
    ]


def _recorded_places(folder: Path) -> Iterator[Path | str]:
    """Yields the folders within a run folder, and the URLs, to which its callbacks write checkpoints."""
    try:
        trainer = read_yaml(folder / "config.yaml")[0].get("trainer")
    except ConfigError:
        return
    callbacks = trainer.get("callbacks") if isinstance(trainer, Mapping) else None
    for item in callbacks if isinstance(callbacks, list) else ():
        options = item.get("init_args") if isinstance(item, Mapping) else None
        place = options.get("dirpath") if isinstance(options, Mapping) else None
        if isinstance(place, str) and local_paths.is_url(place):
            yield place.replace("${run_folder}", local_paths.in_url(folder))
            continue
        head, placeholder, rest = (
            place.partition("${run_folder}/") if isinstance(place, str) else ("", "", "")
        )
        if placeholder and not head and ".." not in Path(rest).parts and not Path(rest).is_absolute():
            yield folder / rest


def _complete(candidates: list[Path], resumes: bool) -> Iterator[Path]:
    """Yields complete checkpoints, highest step first; modification times only order those of one step.

    Copying a folder changes the times. Checkpoints are ordered by the step in their names. When one is reached, its
    record is read; if the recorded step is lower, it is ordered again by that step.
    """
    steps = [found if (found := step_named(path)) is not None else step_recorded(path) for path in candidates]
    waiting = [(_order(path, step), path) for path, step in zip(candidates, steps, strict=True)]
    while waiting:
        waiting.sort()
        order, path = waiting.pop()
        reason = defect(path, resumes) or invalid_content(path)
        if reason is not None:
            print(
                f"{remote_copies.shown(path)} is skipped: {reason}. Looking for the one before.",
                file=sys.stderr,
            )
        elif (step := step_recorded(path)) is not None and step < order[1]:
            waiting.append((_order(path, step), path))
        else:
            yield path


def _order(path: Path, step: int | None) -> tuple[bool, int, int, str]:
    return ABANDONED not in path.name, -1 if step is None else step, _saved_ns(path), path.name


def numbered(root: Path) -> list[Path]:
    """Returns the existing folders root-2, root-3...: later runs of that root, or other folders of such a name."""
    pattern = re.compile(rf"{re.escape(root.name)}-[0-9]+")
    found = [folder for folder in root.parent.glob("*") if pattern.fullmatch(folder.name)]
    return sorted(found, key=lambda folder: int(folder.name.rpartition("-")[2]))


def _later_runs(root: Path) -> Iterator[Path]:
    return (folder for folder in numbered(root) if is_run_of(folder, root))


def is_run_of(folder: Path, root: Path) -> bool:
    """Returns whether a folder is `root`, or a later run of it by the config that is saved in it."""
    if folder.absolute() == root.absolute():
        return True
    record = folder / "config.yaml"
    if not record.is_file() or folder.absolute() not in [path.absolute() for path in numbered(root)]:
        return False
    trainer = read_yaml(record)[0].get("trainer") or {}
    recorded = trainer.get("default_root_dir") if isinstance(trainer, Mapping) else None
    return isinstance(recorded, str) and Path(recorded).name == root.name


def resolve(name: str, root: Path, runs: bool = True, resumes: bool = False) -> Path:
    """Returns the file that a `--ckpt_path` means: `last`, a file, a run folder or its checkpoints folder (its newest).

    Args:
        name: The value of `--ckpt_path`: a file, a folder, a URL of either, or `last`.
        root: The run's folder, in which `last` is searched.
        runs: Whether `root` may also be a folder of runs, in all of which `last` is searched.
        resumes: As in :func:`plugins.checkpoints.checkpoint.defect`.

    Raises:
        ConfigError: If it does not exist or is not complete.
    """
    path = Path(name)
    if name == "last":
        found = runs and not any(map(_files, (root, *_later_runs(root))))
        return of_runs(root, resumes) if found else newest(root, siblings=True, resumes=resumes)
    if local_paths.is_url(name):
        return _of_url(name, resumes)
    try:
        _refuse_foreign(path)
        if path.is_dir() and not sharded.is_sharded(path):
            return _in_folder(path, resumes)
        return _as_file(path, name, resumes)
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        raise ConfigError(f"--ckpt_path {name[:200]!r} cannot be read: {error}.") from error


def _of_url(url: str, resumes: bool) -> Path:
    """Returns the copy of a checkpoint on object storage, or of the newest complete one in a folder there."""
    url = re.sub(r":/+", "://", url, count=1).rstrip("/")  # a Path of it has lost a slash
    place, _, key = url.rpartition("/") if url.endswith(".ckpt") else (url, "", "")
    found = remote_copies.listed(place)
    if path := next(_complete([path for path in found if key in ("", path.name)], resumes), None):
        return path
    names = {path.name for path in found}
    what = f"there is no complete checkpoint{f' {key}' if key else ''} there"
    if key in remote_checkpoints.listed(ObjectFolder(place, "--ckpt_path")).others:
        raise ConfigError(
            f"--ckpt_path {url}: it was copied there without {remote_checkpoints.COMPLETE}, which says that it is whole.\n"
            "Download it, and give the path of the file."
        )
    raise ConfigError(
        f"--ckpt_path {url}: {what}.{nearest(key, names - {key}) if key else ''}\nGive the URL of a folder for its newest "
        f"complete one ({len(names)} there)."
    )


def _refuse_foreign(path: Path) -> None:
    """Raises a ConfigError for weights of others, which name the command that makes a checkpoint of them."""
    if path.exists() and is_foreign(path) and not sharded.is_sharded(path) and not _files(path):
        raise ConfigError(
            f"--ckpt_path {path}: these are weights of others. A run begins with them by --model.weights; a checkpoint:\n"
            f"python -m core import {shlex.quote(str(path))} --output {shlex.quote(f'{path.stem}.ckpt')}"
        )


def _in_folder(path: Path, resumes: bool) -> Path:
    if (path / "zero_to_fp32.py").is_file():
        raise ConfigError(
            f"{path} was written by DeepSpeed itself, as pickles, which may run code: it is not read.\n"
            "Checkpoints of runs with the strategy DeepSpeedZero can be read."
        )
    if not _files(path) and not (path / "checkpoints").is_dir():
        below = sorted({str(file.parent.parent) for file in path.glob("*/checkpoints/*.ckpt")})
        runs = f" There are: {', '.join(below[:5])}." if below else ""
        raise ConfigError(
            f"--ckpt_path {path}: it is neither a run folder nor a folder of checkpoints; folders below it are not "
            f"searched.{runs}"
        )
    return newest(path, resumes=resumes)


def _as_file(path: Path, name: str, resumes: bool) -> Path:
    if reason := defect(path, resumes) or invalid_content(path):
        near = (
            other for other in path.parent.glob("*") if other.suffix == ".ckpt" or _files(other, urls=False)
        )
        beside = {str(other) for other in near} - {name}
        raise ConfigError(
            f"--ckpt_path {name}: {reason}.{nearest(name, beside)} `last` finds the newest complete one."
        )
    return path
