"""Run folders that a command is given: which run was meant where there is none."""

from pathlib import Path

from core.errors import ConfigError, nearest

SIGNS = ("metrics.csv", "config.yaml")
"""Files that a run folder has: one of them is enough."""


def is_run(folder: Path) -> bool:
    """Returns whether a folder is one of a run."""
    return any((folder / name).is_file() for name in SIGNS)


def require_run(folder: Path) -> None:
    """Raises a ConfigError where a folder does not exist, or where it holds runs and is none itself."""
    if not folder.is_dir():
        what = (
            f"{folder} is a file, not a run folder."
            if folder.exists()
            else f"There is no run folder {folder}."
        )
        raise ConfigError(what + nearest(str(folder), set(_runs(folder.parent))))
    if not is_run(folder) and (runs := _runs(folder)):
        raise ConfigError(f"{folder} is no run, it holds {len(runs)}: name one, such as {runs[0]}.")


def _runs(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("*") if is_run(path))
