"""What may come next on a command line: commands, options, values, techniques, configs, files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core import catalog
from core.errors import ConfigError
from plugins.cli.configuration.arguments import option_values, split_configs
from plugins.cli.configuration.class_names import KIND_OF
from plugins.cli.configuration.class_paths import resolve_names
from plugins.cli.configuration.config_files import compose, configs_folder
from plugins.cli.configuration.named_callbacks import take_options
from plugins.commands.completion_sources import (
    Argument,
    Word,
    arguments,
    command_words,
    derives,
    exported,
)

Candidates = Iterator[tuple[str, str]]
"""(text, description) of each candidate."""

RUNS = {"fit": "fit", "validate": "validate", "test": "test", "predict": "predict", "check": "fit"}
"""Commands that take a run's options -> the Trainer's method."""

SECTIONS = {
    "trainer": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "model": ("core.language_module", "LanguageModule"),
}
_MIXED = "lightning.pytorch.plugins"
LIBRARIES = {
    "callbacks": "lightning.pytorch.callbacks",
    "checkpoints": _MIXED,
    "loggers": "lightning.pytorch.loggers",
    "optimizers": "torch.optim",
    "precision": _MIXED,
    "schedules": "torch.optim.lr_scheduler",
    "strategies": "lightning.pytorch.strategies",
}
"""Kind -> where classes of it come from that need no registration."""

DATA = Argument(bases=["LightningDataModule"])
_SUPPLIED = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}


def candidates(words: Sequence[str]) -> list[tuple[str, str]]:
    """Returns what the last word may become, in the order in which to show it; the words follow `leyden`."""
    *before, current = words or [""]
    if not before:
        found = _commands()
    elif before[0] in RUNS:
        found = Run(before[0], before[1:]).words(current)
    else:
        found = _of_command(before[0], before[1:], current)
    return [(word, text) for word, text in dict(found).items() if word.startswith(current)]


def _commands() -> Candidates:
    yield from ((entry.name, entry.summary()) for entry in catalog.entries() if entry.kind == "commands")
    yield from (("--help", "show the commands"), ("--version", "show the version"))


def _configs(current: str) -> Candidates:
    folder = configs_folder()
    for path in sorted(folder.rglob("*.yaml")):
        yield str(path.relative_to(folder).with_suffix("")), "ships with leyden"
    yield from _paths(current, (".yaml", ".yml"))


def _paths(current: str, endings: tuple[str, ...] = ("",)) -> Candidates:
    """Yields folders, and files with one of the endings, as they would be typed on."""
    head = current[: current.rfind("/") + 1]
    try:
        items = sorted(os.scandir(Path(head or ".").expanduser()), key=lambda item: item.name)
    except OSError:
        return
    for item in items:
        if not item.name.startswith(".") or current[len(head) :].startswith("."):
            if os.path.isdir(item.path):  # not item.is_dir(): it raises for a link that leads to itself
                yield f"{head}{item.name}/", ""
            elif item.name.endswith(endings):
                yield f"{head}{item.name}", ""


# -- fit, validate, test, predict, check ----------------------------------------------------------


class Run:
    """The options of a run, as far as they have been typed.

    Args:
        command: One of RUNS.
        typed: The words after it.
    """

    def __init__(self, command: str, typed: Sequence[str]) -> None:
        self.typed = list(typed)
        self.method = arguments(*SECTIONS["trainer"], RUNS[command])
        try:
            names, rest = split_configs(self.typed)
            _, _, rest = take_options(rest, str)
            self.values = compose(names).values
            resolve_names(self.values)
        except ConfigError:  # what is typed so far need not be right
            rest, self.values = self.typed, {}
        self.options: dict[str, str] = {}
        self.added: list[str] = []
        for _, _, key, value in option_values(rest):
            self.options[key.removesuffix("+")] = value
            self.added += [value] if key == "trainer.callbacks+" else []

    def words(self, current: str) -> Candidates:
        """Yields what the current word may become."""
        last = self.typed[-1] if self.typed else ""
        option, equals, value = current.partition("=")
        if equals and option.startswith("-"):
            yield from ((f"{option}={word}", text) for word, text in self._of_option(option, value))
        elif last.startswith("-") and "=" not in last and not current.startswith("-"):
            yield from self._of_option(last, current)
        else:
            yield from self._names(current)

    def _names(self, current: str) -> Candidates:
        parents, dot, _ = current.removeprefix("--").rpartition(".")
        if parents == "callbacks":
            for name in self._callbacks():
                yield f"--callbacks.{name}.", "an argument of it"
                yield f"--callbacks.-{name}", "without it"
        elif dot:
            for name, argument in self._arguments(parents).items():
                yield from _option(f"--{parents}.{name}", argument)
        else:
            yield "--config=", "a shipped config or a file; several compose"
            for section in ("trainer", "model", "data", "callbacks"):
                yield f"--{section}.", f"options of {section}"
            yield from _option("--data", DATA)
            yield from (
                (f"--{name}=", each.text) for name, each in self.method.items() if name not in _SUPPLIED
            )
            yield "--seed_everything=", "seeds every generator"
            yield "--print_config", "print the configuration and stop"
            yield "--help", "show all options"
            yield "--debug", "show the traceback of an error"

    def _of_option(self, option: str, current: str) -> Candidates:
        key = option.lstrip("-").removesuffix("+")
        parents, _, name = key.rpartition(".")
        if key in ("config", "c"):
            yield from _configs(current)
        elif key == "print_config":
            yield from (("plain", "without comments"), ("skip_default", "without what is as by default"))
        elif key == "ckpt_path":
            yield "last", "the newest of the run"
            yield from _paths(current, (".ckpt",))
        elif key == "data":
            yield from _values(DATA, current)
        else:
            known = self._arguments(parents) if parents else self.method
            yield from _values(known.get(name) or Argument(), current)

    def _callbacks(self) -> list[str]:
        trainer = self.values.get("trainer")
        items = trainer.get("callbacks") if isinstance(trainer, Mapping) else None
        paths = (
            [each.get("class_path") for each in items if isinstance(each, Mapping)]
            if isinstance(items, list)
            else []
        )
        return list(dict.fromkeys(str(path).rpartition(".")[2] for path in [*paths, *self.added]))

    def _arguments(self, path: str) -> dict[str, Argument]:
        """Returns the arguments at a dotted path such as `model.network`."""
        head, *rest = path.split(".")
        if path in SECTIONS:
            return arguments(*SECTIONS[path])
        if head == "callbacks" and rest:
            return _of_class(rest[0], Argument(bases=["Callback"]))
        place = DATA if path == "data" else Argument()
        if rest:
            place = self._arguments(".".join([head, *rest[:-1]])).get(rest[-1], place)
        return _of_class(self._chosen(path), place) if place.bases else {}

    def _chosen(self, path: str) -> str:
        """Returns the class at a path, from the command line or the configs; empty for none."""
        for key in (path, f"{path}.class_path"):
            if key in self.options:
                return self.options[key]
        value: Any = self.values
        for part in path.split("."):
            inner = (
                value.get("init_args", {}) if isinstance(value, Mapping) and "class_path" in value else value
            )
            value = inner.get(part) if isinstance(inner, Mapping) else None
        value = value.get("class_path") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else ""


def _option(option: str, argument: Argument) -> Candidates:
    yield f"{option}=", argument.text
    if argument.several and argument.bases:
        yield f"{option}+=", f"one more: {argument.text}"
    elif argument.bases:
        yield f"{option}.", "an argument of it"


def _values(argument: Argument, current: str) -> Candidates:
    yield from ((word, "") for word in argument.words)
    yield from _classes(argument.bases)
    if argument.paths:
        yield from _paths(current)


def _fitting(bases: Sequence[str]) -> list[catalog.Entry]:
    """Returns the registered techniques that derive from one of these bases; only the kind data has several."""
    kinds = {KIND_OF[base] for base in bases}
    kinds |= {"adapters"} if "callbacks" in kinds else set()  # adapters are listed among the callbacks
    found = [entry for entry in catalog.entries() if entry.kind in kinds]
    return [e for e in found if e.kind != "data" or derives(e.module, e.attribute, bases)]


def _classes(bases: Sequence[str]) -> Candidates:
    """Yields the techniques that fit, then what Lightning and torch have."""
    yield from ((entry.name, entry.summary()) for entry in _fitting(bases))
    for library in dict.fromkeys(LIBRARIES.get(KIND_OF[base], "") for base in bases):
        for name in exported(library):
            if name not in KIND_OF and (library != _MIXED or derives(library, name, bases)):
                yield name, library.partition(".")[0]


def _of_class(name: str, place: Argument) -> dict[str, Argument]:
    """Returns the arguments of a class, by short name or full path; of all that fit where none is chosen."""
    homes = [(e.module, e.attribute) for e in _fitting(place.bases) if name in (e.name, e.class_path, "")]
    if not homes and name:
        module, _, attribute = name.rpartition(".")
        libraries = [LIBRARIES.get(KIND_OF[base]) for base in place.bases]
        homes = [(home, attribute) for home in ([module] if module else libraries) if home]
    found = [list(arguments(*home).items())[place.given :] for home in homes]
    return {key: each for items in found for key, each in items}


# -- other commands -------------------------------------------------------------------------------


def _of_command(command: str, typed: Sequence[str], current: str) -> Candidates:
    entry = next((e for e in catalog.entries() if e.kind == "commands" and e.name == command), None)
    declared = command_words(entry.module) if entry else []
    action = next((word.name for word in declared if word.kind == "subcommand" and word.name in typed), "")
    here = [word for word in declared if word.parent == action]
    option, equals, value = current.partition("=")
    waiting = option if equals else typed[-1] if typed else ""
    awaited = next((word for word in here if word.kind == "option" and word.name == waiting), None)
    if awaited and (equals or not current.startswith("-")):
        head = f"{option}=" if equals else ""
        yield from (
            (f"{head}{word}", text) for word, text in _of_word(command, awaited, value if equals else current)
        )
    elif current.startswith("-"):
        yield from ((word.name, word.text) for word in here if word.kind in ("option", "flag"))
        yield "--help", "what it takes"
    else:
        yield from ((word.name, word.text) for word in here if word.kind == "subcommand" and not action)
        positional = [word for word in here if word.kind == "positional"]
        if positional or not any(word.kind == "subcommand" for word in here):
            yield from _of_word(
                command, positional[0] if positional else Word(action, "", "positional", [], ""), current
            )


def _of_word(command: str, word: Word, current: str) -> Candidates:
    """Yields the values of an option or of a positional argument."""
    if word.choices:
        yield from ((choice, "") for choice in word.choices)
    elif word.name == "--kind":
        yield from ((kind, "") for kind in catalog.KINDS)
    elif word.name in ("--package", "package"):
        yield from ((package, "") for package in sorted({entry.package for entry in catalog.entries()}))
    elif (command, word.parent, word.name) == ("plugins", "show", "name"):
        yield from ((entry.name, entry.summary()) for entry in catalog.entries())
    elif word.name == "--ckpt_path":
        yield "last", "the newest"
        yield from _paths(current)
    elif command == "config":
        yield from _configs(current)
        yield from _paths(current)
    else:
        yield from _paths(current)
