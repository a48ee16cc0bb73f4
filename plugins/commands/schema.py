"""The command `schema`: a JSON schema of configs, for editors.

jsonargparse 4.53 makes a schema of a parser, too (`--print_completion=jsonschema`). For Lightning's Trainer and for our
LanguageModule it ends with "unbound method type.__subclasses__() needs an argument", and what is ours in a config it cannot
know: `base:`, callbacks by name. With ours all shipped configs pass and 13 of 13 mistakes are found
(`python -m tests.benchmarks.completion`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from core import catalog
from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.class_names import names_for
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.config_files import configs_folder
from plugins.cli.configuration.named_callbacks import LISTS


@technique(paper="JSON Schema draft-07: what VS Code's YAML extension knows best")
def schema(arguments: list[str]) -> int:
    """Prints a JSON schema of configs, with every installed technique, for completion and checks in editors.

    An editor takes it from a comment at the top of a config, `# yaml-language-server: $schema=FILE`, or from
    its settings. Print it again after installing or removing a package.

    Example:
        python -m core schema > leyden.schema.json
    """
    Parser(prog="python -m core schema", description=schema.__doc__).parse_args(arguments)
    print(json.dumps(build(), indent=1))
    return 0


def build() -> dict[str, Any]:
    """Returns the schema; says on stderr which techniques cannot be imported and are left out."""
    from plugins.cli.configuration.signatures import sections
    from plugins.commands.schema_types import Builder

    targets = sections()
    builder = Builder(_loaded())
    properties = {
        "base": _base(),
        **_of_subcommands(builder, targets["trainer"]),
        "seed_everything": builder.argument(bool | int, 0, "Seeds every generator; true: at random."),
        "trainer": builder.arguments(targets["trainer"]),
        "model": builder.arguments(targets["model"]),
        "data": builder.argument(targets["data"]),
    }
    _complete(builder, targets["trainer"])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A config of leyden",
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
        "definitions": builder.definitions,
    }


def _loaded() -> dict[str, Any]:
    found = {}
    for entry in catalog.entries():
        if entry.kind != "commands":
            try:
                found[entry.class_path] = entry.load()
            except (ConfigError, SystemExit) as error:
                said = (str(error).splitlines() or ["it ends the process when it is imported"])[0]
                print(f"Left out: {said}", file=sys.stderr)
    return found


def _base() -> dict[str, Any]:
    folder = configs_folder()
    shipped = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    names = [{"enum": shipped}, {"type": "string"}]
    return {
        "description": "Configs that this one starts from: shipped ones by name, or files.",
        "anyOf": [*names, {"type": "array", "items": {"anyOf": names}}],
    }


def _of_subcommands(builder: Any, trainer: type) -> dict[str, Any]:
    """Returns the arguments of fit, validate, test and predict themselves, such as `ckpt_path`."""
    from lightning.pytorch.cli import LightningCLI

    from plugins.cli.configuration.docstrings import described
    from plugins.cli.configuration.signatures import parameters

    found = {}
    for name, supplied in LightningCLI.subcommands().items():
        method = getattr(trainer, name)
        texts = described(method)
        for key, argument in parameters(method)[0].items():
            if key not in supplied:
                found[key] = builder.argument(argument.hint, argument.default, texts.get(key, ""))
    return found


def _complete(builder: Any, trainer: type) -> None:
    """Adds what the Trainer's types do not say: strategies and accelerators by name, lists as mappings."""
    from lightning.pytorch.accelerators import AcceleratorRegistry
    from lightning.pytorch.strategies import Strategy, StrategyRegistry

    from plugins.cli.configuration.signatures import class_types, parameters

    options = builder.definitions[builder.arguments(trainer)["$ref"].rpartition("/")[2]]["properties"]
    choices = {
        "accelerator": {"auto", "gpu", *AcceleratorRegistry.available_accelerators()},
        "strategy": {"auto", *StrategyRegistry.available_strategies()} - set(names_for((Strategy,))),
    }
    for name, allowed in choices.items():
        named = {"enum": sorted(allowed)}
        forms = options[name]["anyOf"]
        options[name]["anyOf"] = [named if form == {"type": "string"} else form for form in forms]
    for name in LISTS:
        options[name]["anyOf"].append(builder.by_name(class_types(parameters(trainer)[0][name].hint)))
