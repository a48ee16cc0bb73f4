"""The runs that `bisect` compares: what they recorded, their checkpoints, and replays of their steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from core import catalog
from core.errors import ConfigError
from core.technique import declaration_of
from plugins.checkpoints.checkpoint import defect
from plugins.cli.configuration.yaml_texts import dump_yaml, read_yaml
from plugins.commands.run_folders import require_run
from toolkit.checkpoint_names import ABANDONED, step_named
from toolkit.hash_chains import FOLDER, Chain, read_chain

Place = tuple[str | int, ...]
Launch = Callable[[str, Sequence[str], Mapping[str, str]], None]
"""Runs `fit` for a run ("a" or "b") with arguments, in an environment; raises a ConfigError if it fails."""

HASH_CHAIN = "callbacks.hash_chain.HashChain"


@dataclass
class Recorded:
    """A finished or running run.

    Attributes:
        folder: Its run folder.
        config: Its configuration, without what only observes: loggers, checkpoints, monitors.
        chains: Rank -> what it recorded; empty without HashChain.
        checkpoints: Step -> complete checkpoint.
    """

    folder: Path
    config: dict[str, Any]
    chains: dict[int, Chain]

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """Step -> complete checkpoint."""
        found = {}
        for path in (self.folder / "checkpoints").glob("*.ckpt"):
            step = step_named(path)
            if step is not None and ABANDONED not in path.name and defect(path) is None:
                found[step] = path
        return found


def read_run(name: str) -> Recorded:
    """Reads a run folder.

    Raises:
        ConfigError: If there is none, or what is in it cannot be read.
    """
    folder = Path(name)
    require_run(folder)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{name} is no run folder: it has no config.yaml.")
    config = _without_observers(read_yaml(folder / "config.yaml")[0])
    return Recorded(folder, config, read_chains(folder))


def read_chains(folder: Path) -> dict[int, Chain]:
    """Returns what each rank of a run recorded."""
    paths = sorted((folder / FOLDER).glob("rank*.jsonl"))
    return {
        int(path.stem.removeprefix("rank")): read_chain(path)
        for path in paths
        if path.stem.removeprefix("rank").isdigit()
    }


def _without_observers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without what training does not depend on, and what writes to places of the run."""
    plain = deepcopy(
        {key: config[key] for key in ("seed_everything", "trainer", "model", "data") if key in config}
    )
    trainer = plain.setdefault("trainer", {})
    callbacks = trainer.get("callbacks") or []
    trainer["callbacks"] = [item for item in _listed(callbacks) if not _observes(item)]
    trainer |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer |= {"enable_model_summary": False, "profiler": None, "default_root_dir": None}
    return plain


def _listed(callbacks: Any) -> list[Any]:
    return callbacks if isinstance(callbacks, list) else [callbacks]


def _observes(item: Any) -> bool:
    name = item.get("class_path", "") if isinstance(item, Mapping) else str(item)
    entry = catalog.by_class_path(name)
    if entry is None:
        return name.endswith("Checkpoint")
    declared = declaration_of(entry.load())
    return (declared is not None and declared.observer) or name.endswith("Checkpoint")


def differing_settings(a: Any, b: Any, path: Place = ()) -> Iterator[Place]:
    """Yields where two configurations differ, as narrowly as they can be mixed: a class comes with its arguments."""
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.get("class_path") == b.get("class_path"):
        for key in {**a, **b}:
            if key not in a or key not in b:
                yield (*path, key)
            else:
                yield from differing_settings(a[key], b[key], (*path, key))
    elif isinstance(a, list) and isinstance(b, list) and _classes(a) == _classes(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differing_settings(one, other, (*path, index))
    elif a != b:
        yield path


def _classes(items: list[Any]) -> list[Any]:
    return [item.get("class_path") if isinstance(item, Mapping) else "" for item in items]


def mixed(a: Mapping[str, Any], b: Mapping[str, Any], paths: Sequence[Place]) -> dict[str, Any]:
    """Returns a configuration with the values of another at some places."""
    result: Any = deepcopy(dict(a))
    for path in paths:
        target: Any = result
        source: Any = b
        for key in path[:-1]:
            target, source = target[key], source[key]
        if isinstance(source, Mapping) and path[-1] not in source:
            target.pop(path[-1], None)
        else:
            target[path[-1]] = deepcopy(source[path[-1]])
    return dict(result)


def spelled(path: Place, config: Mapping[str, Any]) -> str:
    """Returns a place as it is spelled on the command line."""
    words: list[str] = []
    value: Any = config
    for key in path:
        value = value[key] if not isinstance(value, Mapping) or key in value else {}
        if isinstance(key, int):
            words.append(
                str(value["class_path"]).rpartition(".")[2] if isinstance(value, Mapping) else str(key)
            )
        elif key != "init_args":
            words.append(key)
    return ".".join(words)


def value_at(path: Place, config: Mapping[str, Any]) -> Any:
    """Returns the value at a place; "(absent)" where there is none."""
    value: Any = config
    for key in path:
        if isinstance(value, Mapping) and key not in value:
            return "(absent)"
        value = value[key]
    return value


class Replays:
    """Runs steps again, from checkpoints, in a folder of its own, and counts how often.

    Args:
        folder: The scratch folder.
        launch: Runs `fit`.
    """

    def __init__(self, folder: Path, launch: Launch) -> None:
        self.folder, self.launch, self.count = folder, launch, 0

    def run(self, side: str, config: dict[str, Any], of: Recorded, begin: int, end: int) -> Path:
        """Runs the steps after `begin` up to `end`; returns the run folder, with the tensors of the last step.

        Args:
            side: "a" or "b".
            config: The configuration.
            of: The run whose checkpoint is taken, and the number of threads.
            begin: The step of that checkpoint; 0: from the beginning.
            end: The step after which it ends.

        Raises:
            ConfigError: If it cannot run, or not on as many ranks as the run.
        """
        if (machines := config["trainer"].get("num_nodes") or 1) > 1:
            raise ConfigError(
                f"{of.folder} ran on {machines} machines, and bisect makes steps again on this one alone.\nMake both runs once more "
                "with trainer.num_nodes=1, or compare the lines of both hash_chain/rank0.jsonl: the first that differ say the step."
            )
        self.count += 1
        folder = self.folder / f"{self.count}-{side}"
        config = deepcopy(config)
        item = {"class_path": HASH_CHAIN, "init_args": {"every_n_steps": 1, "inspect_step": end}}
        config["trainer"]["callbacks"] = [*config["trainer"]["callbacks"], item]
        config["trainer"]["default_root_dir"] = str(folder)
        path = self.folder / f"{self.count}-{side}.yaml"
        path.write_text(dump_yaml(config), encoding="utf-8")
        words = ["--config", str(path)]
        if begin:
            words += ["--ckpt_path", str(of.checkpoints[begin])]
        threads = next((c.environment.get("threads") for c in of.chains.values()), None)
        self.launch(side, words, {"OMP_NUM_THREADS": str(threads)} if isinstance(threads, int) else {})
        there, here = (
            c[0].environment.get("ranks") if 0 in c else None for c in (of.chains, read_chains(folder))
        )
        if there is not None and there != here:
            raise ConfigError(
                f"{of.folder} ran on {there} ranks, and its replay on {here}: sums have other orders then.\n"
                "Call bisect where as many devices are as the run had."
            )
        return folder


def in_subprocess(side: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs `fit` in a process of its own: a :data:`Launch`."""
    done = subprocess.run(
        [sys.executable, "-m", "core", "fit", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-5:]
        raise ConfigError(
            f"The replay of run {side.upper()} ended with exit code {done.returncode}:\n" + "\n".join(lines)
        )
