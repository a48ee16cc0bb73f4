"""Parses a composed configuration and the arguments over it with jsonargparse, values as they are, not as text.

LightningCLI does the same and more, by ways that have no public name; what a run needs of it is the parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from traceback import walk_tb
from typing import Any, NoReturn

import lightning.pytorch
from jsonargparse import ActionConfigFile, Namespace, set_dumper
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from core.errors import ConfigError
from core.language_module import LanguageModule
from plugins.cli.configuration import trust
from plugins.cli.configuration.arguments import option_values
from plugins.cli.configuration.docstrings import summary
from plugins.cli.configuration.mistakes import Keys, explain, finder, laid_over, main_reason
from plugins.cli.configuration.print_config import annotating
from plugins.cli.configuration.request import Request
from plugins.cli.configuration.yaml_texts import dump_yaml
from plugins.cli.error_messages import explain_error

_HEADER = f"lightning.pytorch=={lightning.pytorch.__version__}"
_STRUCTURE = "leyden_structure"

set_dumper(_STRUCTURE, lambda values: values)  # type: ignore[arg-type, return-value]


class Parser(LightningArgumentParser):
    """Reports a mistake as a ConfigError: a few lines, without usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises instead of printing the usage and ending the process."""
        if re.match("unrecognized arguments: [^-]", message):
            message += ". An option begins with `--`, such as --trainer.max_steps=100."
        raise ConfigError(message) from ex


def parser_of(command: str) -> tuple[Parser, list[str]]:
    """Returns the parser of fit, validate, test or predict, and the arguments of the Trainer's method of that name."""
    parser = Parser(
        prog=f"python -m core {command}",
        description=summary(getattr(Trainer, command)),
        allow_abbrev=False,  # `--trainer.max_step` is a mistake, not `max_steps`
        dump_header=[_HEADER],
    )
    parser.add_argument(
        "-c",
        "--config",
        action=ActionConfigFile,
        help="A YAML file or the name of a shipped config; several compose.",
    )
    parser.add_argument(
        "--seed_everything",
        type=bool | int,
        default=0,
        help="The seed, set before anything is built; true: a seed drawn at random; false: none is set.",
    )
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(LanguageModule, "model")
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    skip: set[str | int] = set(LightningCLI.subcommands()[command])
    return parser, parser.add_method_arguments(Trainer, command, skip=skip)


class Parsed:
    """A configuration as jsonargparse took it.

    Args:
        command: fit, validate, test or predict.
        request: The composed configuration and its origin.

    Attributes:
        parser: The parser, which builds the classes.
        method_arguments: Names of the arguments of the Trainer's method.
        values: The parsed values, defaults included.

    Raises:
        ConfigError: For a mistake; says where and what instead.
    """

    def __init__(self, command: str, request: Request) -> None:
        self._composed, self._arguments = request.composed, request.arguments
        self.parser, self.method_arguments = parser_of(command)
        try:
            self.values = self._parse()
        except SystemExit as error:  # by --help and --print_config, or by a module that is imported
            if all(frame.f_code.co_name != "<module>" for frame, _ in walk_tb(error.__traceback__)):
                raise
            self.explain()
            raise ConfigError(explain_error(error)) from error
        except ConfigError as error:
            self.explain()
            key = re.match(r'Parser key "(.*)":', str(error))
            where = f"{self.where(tuple(key[1].split('.')))}: " if key else ""
            denied = re.search(r"Importing '([\w.]+)' is not allowed", str(error))
            text = trust.rule(denied[1]) if denied else main_reason(str(error))
            raise ConfigError(where + "\n".join(text.splitlines()[:6])) from error
        except RecursionError as error:
            raise ConfigError(
                "The configuration holds a text that is nested too deeply to be read."
            ) from error

    def _parse(self) -> Namespace:
        values = deepcopy(self._composed.values)
        if "config" in values:  # it would be taken for the option: a file to read
            self.explain()
        with annotating(self._arguments) as arguments:
            # Required values may be in the arguments: only all of it together is validated.
            below = self.parser.parse_object(values, defaults=False, _skip_validation=True)
            return self.parser.parse_args(arguments, namespace=below)

    def explain(self) -> None:
        """Raises a ConfigError for the first mistake that shows in the values; returns if none does."""
        explain(self._composed.values, self._composed.positions, self._options)

    @cached_property
    def _options(self) -> list[tuple[str, str]]:
        options = option_values(self._arguments)
        return [(key, value) for _, _, key, value in options if key != "print_config"]

    @cached_property
    def places(self) -> dict[Keys, str]:
        """Path of keys -> "file:line", or the argument, that wrote a value."""
        return laid_over(self._composed.values, self._composed.positions, self._options)[1]

    def where(self, keys: Keys) -> str:
        """Returns the nearest known place of a value."""
        return finder(self.places)(keys)

    def plain(self) -> dict[str, Any]:
        """Returns the values as mappings, lists and scalars, but for the checkpoint: that is another one each time."""
        repeatable = self.values.clone()
        repeatable.pop("ckpt_path", None)
        found: Any = self.parser.dump(repeatable, format=_STRUCTURE, skip_none=False, skip_validation=True)
        return _plain(found)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise ConfigError(f"the configuration: the key {key!r} is no text; put it in quotes.")
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def as_text(plain: Mapping[str, Any]) -> str:
    """Returns a plain configuration as the YAML that is kept with a run."""
    return f"# {_HEADER}\n{dump_yaml(plain)}"
