"""Which modules a configuration may import from: those of the run's user, and no others.

A configuration comes with a download, a checkpoint or a message. It may name registered techniques, the classes of
torch, Lightning and leyden, what the user names with `--trust`, and modules beside a config that is given on the
command line. Nothing else is imported, not even to explain a mistake.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core import catalog, user_folders
from core.errors import ConfigError
from plugins.cli.configuration import user_modules
from plugins.cli.configuration.config_files import configs_folder
from plugins.cli.configuration.yaml_texts import bounded
from toolkit.ranks import launched_rank

log = logging.getLogger(__name__)

OPTION = "--trust"
VARIABLE = "LEYDEN_TRUST"
"""Environment variable with modules that the user trusts in every command, separated by commas."""

LIBRARIES = ("torch", "lightning")
OURS = ("core", "toolkit", "plugins", "callbacks", "datamodules")
_NOT_OURS = ("conformance", "lightning.pytorch.demos")
"""Not trusted: arguments of the kit's recorders and of Lightning's examples name files that are written."""
_CONFIGS = ("configs", "config", "conf")
"""Folders of a project that hold configs: files in them count as beside the project's modules."""


@dataclass(frozen=True)
class Trust:
    """What the user of a run trusts beyond registered techniques, torch, Lightning and leyden.

    Attributes:
        named: Modules given with `--trust` or in LEYDEN_TRUST; with each come the modules below it.
        beside: Modules that lie beside a config of the command line and that the user's own configs name.
    """

    named: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def has(self, path: str) -> bool:
        """Returns whether the user trusts the module of a full path."""
        return _is_below(path, (*self.named, *self.beside))


_ACTIVE: ContextVar[Trust | None] = ContextVar("trust", default=None)


def active() -> Trust:
    """Returns the trust of the run that is being built; outside of one, what the environment names."""
    return _ACTIVE.get() or Trust(_of_environment())


def take_option(arguments: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Takes `--trust MODULE` and `--trust=MODULE` out of the arguments.

    Returns:
        The modules, those of the environment among them, and the other arguments.

    Raises:
        ConfigError: If a module's name is missing or is none.
    """
    found, rest, words = [], [], iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        if option != OPTION:
            rest.append(word)
            continue
        name = name if equals else next(words, "")
        if not _is_path(name):
            raise ConfigError(f"{OPTION} takes the name of a module, such as my_module, not {name!r}.")
        found.append(name)
    return (*_of_environment(), *found), rest


def _of_environment() -> tuple[str, ...]:
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    if wrong := [name for name in names if not _is_path(name)]:
        raise ConfigError(f"{VARIABLE} holds names of modules with commas between, not {wrong[0]!r}.")
    return tuple(names)


def _is_path(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _is_below(path: str, modules: Iterable[str]) -> bool:
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def is_of_house(path: str) -> bool:
    """Returns whether a full path lies in torch, Lightning or leyden: classes of the right base may be built.

    A module that a user's folder adds to one of our packages, such as `callbacks.mine`, does not.
    """
    known = _is_below(path, (*LIBRARIES, *OURS)) and not _is_below(path, _NOT_OURS)
    return known and user_modules.added(path) is None


def is_registered(path: str) -> bool:
    """Returns whether a full path is a registered technique, or may be its shorter name in a parent package."""
    module, _, attribute = path.rpartition(".")
    return any(
        entry.attribute == attribute and _is_below(entry.module, (module,))
        for entry in catalog.entries()
        if entry.kind != "commands" and module
    )


def refusal(path: str) -> str | None:
    """Returns why nothing may be imported for a full path; None if it may. Imports nothing."""
    if "." not in path or active().has(path) or is_of_house(path) or is_registered(path):
        return None
    top = path.partition(".")[0]
    if _is_path(path) and not _is_there(top):
        return None  # there is nothing to import, which the import reports
    return rule(path)


def rule(path: str) -> str:
    """Returns a message that refuses a full path and says what is allowed."""
    top = path.partition(".")[0]
    text = (
        f"{path} is not used: a config names registered techniques, classes of torch and Lightning,\n"
        "and what lies in a module beside the config of the command line."
    )
    if top in sys.stdlib_module_names:
        return f"{text} {top} is a module of Python."
    if is_of_house(path):
        return f"{text} A function is neither.\nIf you know what it does: {OPTION} {path}"
    if not _is_path(path):
        return text
    module = user_modules.added(path) or top
    return f"{text}\nIf you wrote {module}, or trust its author: {OPTION} {module}"


def _is_there(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return top in sys.modules


def check(values: Any, where: Any, keys: tuple[str | int, ...] = ()) -> None:
    """Raises a ConfigError for the first `class_path` in a configuration that may not be imported.

    Args:
        values: The configuration, or a part of it.
        where: Gives the place of a path of keys.
        keys: The path of keys to `values`.
    """
    if isinstance(values, Mapping):
        name = values.get("class_path")
        if isinstance(name, str) and (fault := refusal(name)):
            raise ConfigError(f"{where((*keys, 'class_path'))}: {fault}")
    items: Any = values.items() if isinstance(values, Mapping) else ()
    for key, item in enumerate(values) if isinstance(values, list | tuple) else items:
        check(item, where, (*keys, key))


def beside(configs: Iterable[Path], values: Any, arguments: Iterable[str]) -> tuple[str, ...]:
    """Returns the modules that the user's own configs or arguments name and that lie beside one of these configs.

    They can be imported afterwards, whatever folder the user is in. A config in a folder `configs` (or `config`,
    `conf`) lies beside what is beside this folder, too.

    Args:
        configs: The files given on the command line.
        values: What they hold, without what a checkpoint holds.
        arguments: The other arguments.
    """
    words = {*_texts(values), *(word.rpartition("=")[2] for word in arguments)}
    words |= {entry.class_path for entry in catalog.entries() if entry.name in words}
    folders = list(dict.fromkeys(folder for path in configs for folder in _folders(path)))
    found: dict[str, None] = {}
    for word in sorted(word for word in words if "." in word and _is_path(word)):
        if module := _beside(word, folders):
            found[module[0]] = None
            user_modules.add(module[1])
        elif launched_rank() in (None, 0):
            _warn_of_hidden(word)
    return tuple(found)


def _warn_of_hidden(path: str) -> None:
    """Logs a warning if the user has a class of this full path, too: leyden's is used."""
    file, (module, _, name) = user_modules.hidden(path), path.rpartition(".")
    theirs = file and re.search(rf"^(class|def) {name}\b", file.read_text(errors="replace"), re.MULTILINE)
    if theirs and catalog.definition(module, name):
        log.warning("%s of %s is not used: %s is leyden's. Rename your file.", name, file, path)


def _folders(config: Path) -> Iterator[Path]:
    """Yields the folders whose modules lie beside a config."""
    folder = config.absolute().parent.resolve()
    if folder.is_relative_to(configs_folder()):
        return
    yield folder
    above = next((each for each in (folder, *folder.parents) if each.name in _CONFIGS), None)
    if above:
        yield above.parent


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        # Callbacks may be keys: `my_module.Mine: {...}`.
        yield from (key for key in value if isinstance(key, str))
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _beside(path: str, folders: list[Path]) -> tuple[str, Path] | None:
    """Returns the part of a full path that names a file or package in one of the folders, and what to import it from."""
    parts = path.split(".")
    is_ours = parts[0] in user_folders.PACKAGES
    try:
        spec = None if is_ours else importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    if spec and spec.origin and not places:
        places = [Path(spec.origin)]
    if is_ours:
        places = [user_folders.HOUSE / parts[0]]
    for count in range(1, len(parts)):
        own = next((place for place in places if place.exists() and place.parent.resolve() in folders), None)
        if own:
            return ".".join(parts[:count]), own.parents[count - 1]
        below = Path(*parts[:count])
        theirs = [folder for folder in folders if user_modules.is_module(folder / below)]
        if not places and theirs and spec is None:  # nothing of this name is found elsewhere
            return ".".join(parts[:count]), theirs[0]
        below_it = [place / parts[count] for place in places if place.is_dir()]
        places = [path for place in below_it for path in (place, place.with_suffix(".py")) if path.exists()]
    return None


@contextmanager
def trusting(trust: Trust | None = None) -> Iterator[None]:
    """Lets jsonargparse import what is trusted and nothing else; afterwards it is as before.

    It builds no class for types that take any value, reads no file that a value names, and texts only within bounds.

    Args:
        trust: What the user trusts; None: what holds already, or what the environment names.
    """
    from jsonargparse import _common, _loaders_dumpers, _optionals, set_parsing_settings

    trust = active() if trust is None else trust
    loaded = {entry.module.partition(".")[0] for entry in catalog.entries() if entry.kind != "commands"}
    denied = ["*", *_NOT_OURS]
    denied += [name for name in user_modules.all_added() if _is_path(name) and not trust.has(name)]
    allowed = {*LIBRARIES, *OURS, *loaded, *trust.named, *trust.beside} - {"jsonargparse"}
    loader = _loaders_dumpers.get_yaml_default_loader()
    # Not all of it has a public name, and what has one cannot be taken back.
    places = [
        (_common, "parsing_settings"),
        (_loaders_dumpers, "yaml_default_loader"),
        (_optionals, "_config_read_mode"),
    ]
    before = [(module, name, getattr(module, name)) for module, name in places]
    token = _ACTIVE.set(trust)
    try:
        setattr(_common, "parsing_settings", dict(_common.parsing_settings))  # noqa: B010
        setattr(_loaders_dumpers, "yaml_default_loader", bounded(loader))  # noqa: B010
        setattr(_optionals, "_config_read_mode", "fFr")  # noqa: B010 - a file that is none: there is none
        set_parsing_settings(
            instantiate_subclass_spec_in_any=False,
            import_path_denylist=denied,
            import_path_allowlist=sorted(name for name in allowed if _is_path(name)),
        )
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        _ACTIVE.reset(token)
