"""Tasks of lm-eval: read from a folder of YAML files, which are data unless the user trusts the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from core.errors import ConfigError, nearest
from toolkit.bounded import read_error, read_inside

VARIABLE = "LEYDEN_TRUST"
"""Environment variable with what the user trusts, separated by commas: a folder's name lets its tasks run code."""

DATASETS = ("arrow", "csv", "json", "parquet", "text")
"""What reads local files as data; other names are those of data sets on a hub, or of formats with code in them."""

OPTIONS = ("column_names", "data_dir", "data_files", "delimiter", "field", "sample_by", "sep")
"""Of `dataset_kwargs`: what says which local files are read, and how."""

CODE = "!function"
MOST_LINKS = 16
"""Limit of files that include each other."""

_OWNER = "LMEvalHarness"


class Tasks:
    """The tasks of a folder, with the data that they name.

    Args:
        folder: With YAML files, in subfolders too; None: lm-eval's own tasks, whose data is where `datasets` finds it.
        names: Tasks, groups or tags; empty: all tasks of the folder.
        num_fewshot: Solved examples in front of each document; None: as each task says.
        limit: Documents of each task, from the first one; None: all.

    Attributes:
        tasks: Task name -> task of lm-eval, with its requests.

    Raises:
        ConfigError: If a file cannot be read, is no task, names code that is not trusted, or there is no such task.
    """

    def __init__(
        self, folder: str | None, names: Sequence[str], num_fewshot: int | None, limit: int | None
    ) -> None:
        from lm_eval.tasks import TaskManager

        with self.rendering():
            manager = TaskManager(include_defaults=folder is None)
            if folder is not None:
                manager.task_index.update(_index(Path(folder).expanduser()))
            known = sorted(manager.task_index)
            for name in names:
                if name not in known:
                    raise ConfigError(
                        f"{_OWNER}.tasks: there is no task {name!r} in {folder or 'lm-eval'}.{nearest(name, known)}"
                    )
            self.tasks: dict[str, Any] = {}
            for name in names or [n for n, entry in manager.task_index.items() if "TASK" in entry.kind.name]:
                self.tasks |= _load(manager, name)["tasks"]
            for name, task in self.tasks.items():
                _build(name, task, num_fewshot, limit)

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Context of what calls a task: its templates run in a sandbox, and progress is not printed."""
        with _silent(), _sandbox():
            yield


def _load(manager: Any, name: str) -> Any:
    """Returns what lm-eval loads of a name; it reads the data of tasks."""
    try:
        return manager.load([name])
    except Exception as error:  # of datasets, jinja2, pyarrow and lm-eval: a task is a program of sorts
        raise ConfigError(f"{_OWNER}: the task {name!r} cannot be loaded: {_short(error)}") from error


def _build(name: str, task: Any, num_fewshot: int | None, limit: int | None) -> None:
    """Builds the requests of a task, as lm-eval does on a single process."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise ConfigError(
            f"{_OWNER}: the task {name!r} runs code that a network writes, or needs images: it is not supported."
        )
    task.set_fewshot_seed(seed=1234)  # lm-eval's
    try:
        task.build_all_requests(limit=limit)
    except Exception as error:
        raise ConfigError(
            f"{_OWNER}: the requests of the task {name!r} cannot be built: {_short(error)}"
        ) from error


def _index(folder: Path) -> dict[str, Any]:
    """Returns name -> entry of each task, group and tag in a folder."""
    from lm_eval.tasks._index import TaskIndex

    if not folder.is_dir():
        raise ConfigError(f"{_OWNER}.folder: there is no folder {folder}.")
    trusted = folder.resolve().name in os.environ.get(VARIABLE, "").split(",")
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.yaml")):
        content = _Reader(folder, trusted).read(path.relative_to(folder).as_posix())
        if not {"task", "group", "class"} & content.keys():
            continue  # what others include
        TaskIndex.process_cfg(content, path, found)
    for entry in found.values():
        entry.yaml_path = None  # so that lm-eval takes what was read and checked here
    if not found:
        raise ConfigError(f"{_OWNER}.folder: {folder} has no YAML file with a key `task` or `group`.")
    return found


class _Reader:
    """Reads YAML files of a folder and what they include.

    Args:
        folder: Files outside of it are not read, except those of lm-eval if the folder is trusted.
        trusted: Whether `!function` and `class` may name code.
    """

    def __init__(self, folder: Path, trusted: bool) -> None:
        self.folder, self.trusted = folder, trusted

    def read(self, name: str, links: int = 0) -> dict[str, Any]:
        """Returns the content of a file, with that of the files that it includes below it."""
        place = f"{_OWNER}: {self.folder / name}"
        if links > MOST_LINKS:
            raise ConfigError(f"{place}: files include each other without end.")
        content = self._parsed(name, place)
        below: dict[str, Any] = {}
        for other in _listed(content.pop("include", [])):
            inside = os.path.normpath((Path(name).parent / str(other)).as_posix())
            below |= self.read(inside, links + 1)
        own = below | content
        if links == 0:
            for one in (own, *(child for child in _listed(own.get("task")) if isinstance(child, dict))):
                self._check(one, place)
                self._find_data(one, (self.folder / name).parent)
        return own

    def _parsed(self, name: str, place: str) -> dict[str, Any]:
        try:
            content = yaml.load(
                read_inside(self.folder, name), self._loader((self.folder / name).parent, place)
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{place}: {read_error(error)}") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"{place} is no YAML: {_short(error)}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{place} has no keys such as `task` and `dataset_path`.")
        return content

    def _loader(self, folder: Path, place: str) -> Any:
        """Returns a loader of plain YAML, which knows `!function` in a trusted folder."""

        class Loader(yaml.SafeLoader):
            """Of one file."""

        def function(loader: Any, node: Any) -> Any:
            if not self.trusted:
                raise ConfigError(
                    f"{place}: `{CODE} {str(node.value)[:60]}` names code.\n{_word_for(self.folder)}"
                )
            from lm_eval.tasks._yaml_loader import _import_func_in_yml

            return _import_func_in_yml(loader.construct_scalar(node), folder)

        Loader.add_constructor(CODE, function)
        return Loader

    def _check(self, content: Mapping[str, Any], place: str) -> None:
        """Raises a ConfigError for what would run code, or fetch it, without the user's word."""
        if self.trusted:
            return
        path = content.get("dataset_path")
        if path is not None and path not in DATASETS:
            raise ConfigError(
                f"{place}: dataset_path {str(path)[:60]!r} is none of local files ({', '.join(DATASETS)}).\n"
                f"{_word_for(self.folder)}"
            )
        given = content.get("dataset_kwargs") or {}
        for name in given if isinstance(given, dict) else (str(given),):
            if name not in OPTIONS:
                raise ConfigError(
                    f"{place}: dataset_kwargs has {str(name)[:60]!r}; of {', '.join(OPTIONS)} alone is known that they read local "
                    f"files.\n{_word_for(self.folder)}"
                )
        if any(mark in str(given) for mark in ("://", "::")):
            raise ConfigError(f"{place}: dataset_kwargs names files elsewhere.\n{_word_for(self.folder)}")
        if "class" in content:
            raise ConfigError(f"{place}: `class` names code.\n{_word_for(self.folder)}")
        from lm_eval.api.registry import metric_registry

        for metric in _listed(content.get("metric_list") or []):
            name = metric.get("metric") if isinstance(metric, dict) else metric
            if name not in metric_registry:
                raise ConfigError(
                    f"{place}: lm-eval has no metric {str(name)[:60]!r}.{nearest(str(name), list(metric_registry))}"
                )
            if isinstance(metric, dict) and metric.get("hf_evaluate"):
                raise ConfigError(f"{place}: `hf_evaluate` fetches code.\n{_word_for(self.folder)}")

    @staticmethod
    def _find_data(content: dict[str, Any], folder: Path) -> None:
        """Makes names of data files relative to the task's own folder, where they are there."""
        given = content.get("dataset_kwargs")
        if not isinstance(given, dict) or "data_files" not in given:
            return

        def found(name: Any) -> Any:
            if isinstance(name, dict):
                return {split: found(one) for split, one in name.items()}
            if isinstance(name, list):
                return [found(one) for one in name]
            return str((folder / name).resolve()) if (folder / str(name)).is_file() else name

        content["dataset_kwargs"] = given | {"data_files": found(given["data_files"])}


def _word_for(folder: Path) -> str:
    name = folder.resolve().name
    return f"If you wrote it, or trust its author, set the environment variable {VARIABLE}={name}."


@contextmanager
def _sandbox() -> Iterator[None]:
    """Has lm-eval render templates in a sandbox: they come with tasks, and must not reach Python."""
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils

    before = utils.env
    utils.env = ImmutableSandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined)
    utils.env.filters.update(before.filters)
    try:
        yield
    finally:
        utils.env = before


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps progress bars off the terminal."""
    with redirect_stderr(StringIO()):
        yield


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _short(error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said[:300]
