"""Restarts by a launcher: the job resumes in its run folder, on the processes that are available."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from core import catalog
from core.errors import ConfigError
from plugins.cli.configuration.arguments import last
from toolkit.holders import start_of


def job(arguments: Sequence[str]) -> str | None:
    """Returns a name of the job that this process belongs to: the same after a restart, and on every rank.

    It holds what LEYDEN_JOB, torchrun or SLURM call it, and a digest of the command line: one allocation may run several.
    LEYDEN_JOB is for jobs that are submitted anew, which SLURM gives another number each time. None without any of them,
    and for several torchrun agents without --rdzv_id: their jobs cannot be distinguished.

    Args:
        arguments: The command line after the subcommand.
    """
    launched = _launched()
    digest = hashlib.sha256("\0".join(arguments).encode(errors="surrogateescape")).hexdigest()[:12]
    return f"{launched}, arguments {digest}" if launched else None


def _launched() -> str | None:
    if name := os.environ.get("LEYDEN_JOB"):
        return f"LEYDEN_JOB {name}"
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name and name != "none":
        return f"torchrun {name}"
    if name and os.environ.get("GROUP_WORLD_SIZE") == "1":
        return f"torchrun of process {os.getppid()} started at {start_of(os.getppid())}"
    if (array := os.environ.get("SLURM_ARRAY_JOB_ID")) and "SLURM_PROCID" in os.environ:
        return f"SLURM {array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    if "SLURM_PROCID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return f"SLURM {os.environ.get('SLURM_JOB_ID')}"
    return None


def checkpoint(name: str, root: Path, wanted: str, runs: Path) -> Path | None:
    """Returns the newest checkpoint that a job wrote when it was started before, if it did.

    Args:
        name: The job's name from :func:`job`.
        root: The folder that the run's own folder is named after.
        wanted: The checkpoint that the command line names, or "". After a restart it may have been removed, and `last` may
            mean another run's.
        runs: The folder in which `last` is looked for.
    """
    from plugins.checkpoints.finding import of_folder
    from plugins.cli.runs import run_folder

    places = [root]
    if wanted == "last":
        places += sorted(runs.glob("*"))
    elif wanted:
        places += [Path(wanted), *filter(None, [run_folder.of_checkpoint(Path(wanted))])]
    folder = next((found for place in places if (found := run_folder.of_job(place, name))), None)
    if folder is None:
        return None
    began_from = of_folder(folder, resumes=True) if wanted == "last" else None
    return of_folder(folder, run_folder.claimed_at_ns(folder), resumes=True) or began_from


def shape(
    record: Mapping[str, Any], stored: Mapping[str, Any], values: Mapping[str, Any], arguments: list[str]
) -> Iterator[str]:
    """Yields arguments that run a job on the processes that torchrun has started, with the global batch of the first start.

    Args:
        record: The checkpoint's record of its run, with the number of processes in `ranks`; empty at the first start.
        stored: The configuration of that run.
        values: The run's configuration. `trainer.devices: auto` leaves the numbers to torchrun from the start; the
            micro-batch is not exceeded.
        arguments: The command line, which overrides it.

    Raises:
        ConfigError: If the global batch cannot be divided among the processes.
    """
    found = [os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")]
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(number.isdecimal() for number in found):
        return
    each, processes = map(int, found)
    before = record.get("ranks", processes)
    devices = last(arguments, "trainer.devices") or values["trainer"].get("devices")
    if before != processes or devices == "auto":
        yield f"--trainer.devices={each}"
        yield f"--trainer.num_nodes={processes // each}"
    most = last(arguments, "data.batch_size") or _rows(values) or _rows(stored)
    # without rows the data module divides them among the ranks
    if before != processes and _rows(stored) and not _fixes_batch(stored):
        accumulated, rows = _shared(before, processes, stored, int(most))
        yield f"--trainer.accumulate_grad_batches={accumulated}"
        yield f"--data.batch_size={rows}"


def _shared(before: int, processes: int, stored: Mapping[str, Any], most: int) -> tuple[int, int]:
    """Returns accumulation and micro-batch that make the same global batch on another number of processes."""
    batch = before * _accumulated(stored) * _rows(stored)
    fitting = [rows for rows in range(1, most + 1) if batch % (rows * processes) == 0]
    if not fitting:
        raise ConfigError(
            f"The job had {before} processes and a global batch of {batch} rows, which {processes} cannot share "
            "evenly.\nStart it on another number of processes, or from the beginning with another data.batch_size."
        )
    return batch // (fitting[-1] * processes), fitting[-1]


def _fixes_batch(stored: Mapping[str, Any]) -> bool:
    """Returns whether a callback of a run makes the batch of a step the same on any number of processes."""
    fixing = {name for e in catalog.offers("global_batch", "callbacks") for name in (e.name, e.class_path)}
    chosen = stored["trainer"].get("callbacks") or ()
    names = (item.get("class_path") if isinstance(item, Mapping) else item for item in chosen)
    return any(name in fixing for name in names)


def _rows(values: Mapping[str, Any]) -> int:
    """Returns the rows of a micro-batch; 0 if a configuration does not say."""
    data = values.get("data")
    options = data.get("init_args") if isinstance(data, Mapping) else None
    return (options.get("batch_size") or 0) if isinstance(options, Mapping) else 0


def _accumulated(stored: Mapping[str, Any]) -> int:
    return stored["trainer"].get("accumulate_grad_batches") or 1


def use_store_per_restart() -> None:
    """Lets ranks that torchrun has started again meet under new names in the store that its agent keeps.

    The agent's store outlives the ranks (torch 2.11 to 2.15): those of the second start would find the addresses of
    the first, and fail after some seconds. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun avoids it too.
    """
    from torch.distributed import PrefixStore

    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    usual = handlers["env"]

    def meet(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, size in usual(*args, **kwargs):
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            yield PrefixStore(f"start {start} on {size} ranks", store), rank, size

    handlers["env"] = meet
