"""The trials of `launch --sweep`, each in a run folder of its own: tasks of a SLURM array, jobs in Kubernetes, or one after the other."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import ConfigError
from plugins.cli.configuration.arguments import last, without
from plugins.cli.configuration.yaml_texts import read_yaml
from plugins.cli.runs.claims import CLAIM

MOST = 1000
"""Trials: SLURM's MaxArraySize is 1,001 unless a cluster changes it."""

FOLDER = "trainer.default_root_dir"

TRIAL = ' "${trial[@]}"'
"""In bash: what a trial adds to the command."""


class Trial(NamedTuple):
    """One run of a sweep.

    Attributes:
        words: What it adds to the command line.
        folder: Its run folder.
    """

    words: list[str]
    folder: Path

    @property
    def digest(self) -> str:
        """Tells its folder apart from others, 8 hexadecimal digits."""
        return _digest(str(self.folder))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


def trials(path: Path, command: list[str], size: str) -> tuple[list[str], list[Trial]]:
    """Reads a sweep: each combination of its options' values is a trial.

    Args:
        path: The sweep's YAML file, a mapping of options to lists of values.
        command: What all trials share. Its `trainer.default_root_dir` is the folder of their run folders.
        size: On what each is trained.

    Returns:
        The command without that folder, and the trials.

    Raises:
        ConfigError: If the file is no sweep, or the command is none that can have one.
    """
    if command[0] != "fit":
        raise ConfigError(f"launch: --sweep has trials of fit, not of {command[0]}.")
    if last(command, "ckpt_path") is not None:
        raise ConfigError(
            "launch: with --sweep each trial continues from its own folder: leave --ckpt_path out. --model.weights gives "
            "all of them the same first weights."
        )
    root, shared = Path(last(command, FOLDER) or Path("runs", path.stem)), without(command, FOLDER)
    found = [_trial(values, root, [*shared, size]) for values in _combinations(path)]
    folders = [trial.folder for trial in found]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ConfigError(f"launch: {path} has a trial twice: {twice.name}.")
    return shared, found


def _combinations(path: Path) -> list[dict[str, Any]]:
    values = read_yaml(path)[0]
    if not values or not all(isinstance(options, list) and options for options in values.values()):
        raise ConfigError(
            f"launch: {path} is no sweep: it maps options to lists of values, and each combination is a trial, such as\n"
            "  model.optimizer.lr: [1.0e-3, 3.0e-4]\n  config: [techniques/lion, techniques/muon]"
        )
    if fixed := next((key for key in (FOLDER, "ckpt_path") if key in values), None):
        raise ConfigError(
            f"launch: {path} sets {fixed}: the folder of a trial is named after its other values."
        )
    if (number := math.prod(map(len, values.values()))) > MOST:
        raise ConfigError(f"launch: {path} has {number:,} trials; a sweep has at most {MOST:,}.")
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _trial(values: Mapping[str, Any], root: Path, shared: list[str]) -> Trial:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    words = [f"--{key}={text}" for key, text in texts.items()]
    name = ",".join(f"{key.rpartition('.')[2]}={text}" for key, text in texts.items())
    plain = re.sub(r"[^\w.,=+-]", "-", name, flags=re.ASCII)[:80]
    # The command alone says which folder: a sweep with more values finds its earlier trials again.
    digest = _digest("\0".join([*shared, *words]))
    return Trial(words, root / f"{plain}-{digest}")


def as_array(found: list[Trial]) -> dict[str, str | None]:
    """Returns what makes a script of SLURM an array of trials, by the names of its template."""
    return {
        "array": f"0-{len(found) - 1}",
        "trials": _chosen(found, "SLURM_ARRAY_TASK_ID"),
        "trial": TRIAL,
        "next_trial": None,
    }


def in_turn(found: list[Trial]) -> dict[str, str | None]:
    """Returns what makes a script train the trials one after the other, by the names of its template.

    One that fails does not end the others, but the script ends with its exit code. SIGTERM and Ctrl-C end the trial, as they
    end a run, and the script.
    """
    begin = f"""command -v flock > /dev/null || {{ echo "a sweep needs flock, of util-linux" >&2; exit 2; }}
child= failed=0
trap '[ -z "$child" ] || wait "$child" || true; exit 130' INT  # in a terminal torchrun has got it, too
trap '[ -z "$child" ] || {{ kill "$child" && wait "$child"; }} || true; exit 143' TERM
for task in {{0..{len(found) - 1}}}; do
(
{_chosen(found, "task")}"""
    end = ') & child=$!\nwait "$child" || failed=$?\ndone\nexit "$failed"'
    return {"array": None, "trials": begin, "trial": TRIAL, "next_trial": end}


def as_one_run() -> dict[str, str | None]:
    """Returns what leaves a template without trials."""
    return {"array": None, "trials": None, "trial": "", "next_trial": None}


def _chosen(found: list[Trial], number: str) -> str:
    """Returns bash that sets `trial`, what is added to the command, by the number in a variable.

    It may run again at any time: a trial that is done or runs elsewhere is left alone, one that was begun continues from its
    last checkpoint.
    """
    cases = "\n".join(
        f"    {place}) folder={shlex.quote(str(trial.folder))} trial=({shlex.join(trial.words)}) ;;"
        for place, trial in enumerate(found)
    )
    return f"""case "${number}" in
{cases}
esac
mkdir -p "$(dirname "$folder")"
exec 9> "$(dirname "$folder")/.$(basename "$folder").lock"  # free again when this task ends, however it ends
flock -n 9 || {{ echo "$folder: another process is training this run"; exit 0; }}
# a run that was begun and is not done has its claim
[ ! -e "$folder" ] || [ -e "$folder/{CLAIM}" ] || {{ echo "$folder: done"; exit 0; }}
export LEYDEN_JOB="$folder"
trial+=(--{FOLDER}="$folder")"""
