"""Run folders that a command is given: which run was meant where there is none."""

from pathlib import Path

from core.errors import ConfigError, nearest


def require_run(folder: Path, table: str = "metrics.csv") -> None:
    """Raises a ConfigError where a folder does not exist, or where it holds runs and is none itself.

    Args:
        folder: What was given as a run folder.
        table: The file by which a run is known.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"There is no run folder {folder}.{nearest(str(folder), set(_runs(folder.parent, table)))}"
        )
    if not (folder / table).exists() and (runs := _runs(folder, table)):
        raise ConfigError(f"{folder} is no run, it holds {len(runs)}: name one, such as {runs[0]}.")


def _runs(folder: Path, table: str) -> list[str]:
    return sorted(str(path.parent) for path in folder.glob(f"*/{table}") if path.is_file())
