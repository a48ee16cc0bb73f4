"""The command `config diff`: what differs between two runs or configs, techniques first."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core import catalog
from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.cli.configuration.class_paths import POSITIONS, resolve_names
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.config_files import compose, find_config
from plugins.cli.configuration.named_callbacks import PATHS
from plugins.cli.configuration.request import SECTIONS
from plugins.cli.configuration.yaml_texts import parse_yaml, read_yaml

ABSENT = "(absent)"


@dataclass
class Flat:
    """A configuration without its nesting; keys are spelled as on the command line, without `init_args`.

    Attributes:
        techniques: Key -> class path or name; "trainer.callbacks.LossCurve" for an item of a list.
        values: Key -> value; "trainer.callbacks.LossCurve.every_n_validations", say.
    """

    techniques: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def arguments(self, key: str) -> dict[str, Any]:
        """Returns the arguments of the technique at a key."""
        start = f"{key}."
        return {
            name.removeprefix(start): value for name, value in self.values.items() if name.startswith(start)
        }


@technique(paper="own work")
def config(arguments: list[str]) -> int:
    """Says what differs between two runs or configs: config diff A B.

    A and B: a run folder, a YAML file, the name of a config that ships with leyden, or a checkpoint.
    Callbacks, loggers and plugins are matched by class, whatever their place in the list. A config that
    is compared with a run is completed with the defaults that the run's record holds.

    Example:
        python -m core config diff quickstart runs/quickstart
        python -m core config diff runs/quickstart runs/quickstart-2 --json
    """
    parser = Parser(prog="python -m core config", description=config.__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    diff = actions.add_parser("diff", help="what differs between two runs or configs")
    for name in ("A", "B"):
        diff.add_argument(name, help="run folder, YAML file, shipped config or checkpoint")
    diff.add_argument("--json", action="store_true", help="as a JSON object")
    options = parser.parse_args(arguments)
    flats = [flatten(values) for values in read_all([options.A, options.B])]
    if options.json:
        print(json.dumps(_as_json(*flats), indent=2, default=str))
    else:
        print("\n".join(_as_text(options.A, options.B, *flats)))
    return 0


def read_all(names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the configuration of each name; see :func:`config` for what a name may be.

    Raises:
        ConfigError: If there is nothing of this name, or it holds no configuration.
    """
    found = [_read(name) for name in names]
    complete = any(recorded for _, recorded in found)
    return [
        values if recorded or not complete else _completed(name)
        for name, (values, recorded) in zip(names, found, strict=True)
    ]


def _read(name: str) -> tuple[dict[str, Any], bool]:
    """Returns a configuration, and whether it is a run's record, which holds every default."""
    path = Path(name)
    if path.is_dir() and (path / "config.yaml").is_file():
        return read_yaml(path / "config.yaml")[0], True
    if path.is_file() and path.name == "config.yaml" and (path.parent / "techniques.txt").is_file():
        return read_yaml(path)[0], True
    if path.suffix == ".ckpt" or (path.is_dir() and any(path.rglob("*.ckpt"))):
        return _of_checkpoint(name), True
    if path.is_dir():
        raise ConfigError(f"{name} is no run folder: it holds neither config.yaml nor a checkpoint.")
    try:
        find_config(name)
    except ConfigError as error:
        hint = (
            ""
            if "Did you mean" in str(error)
            else nearest(name, {str(other) for other in path.parent.glob("*")})
        )
        raise ConfigError(f"{error}{hint}") from None
    return compose([name]).values, False


def _of_checkpoint(name: str) -> dict[str, Any]:
    from plugins.checkpoints.checkpoint import stored_config
    from plugins.checkpoints.finding import resolve

    path = resolve(name, Path(name))
    values = stored_config(path)
    if not values:
        raise ConfigError(f"{path} holds no configuration: it was not written by `python -m core fit`.")
    return values


def _completed(name: str) -> dict[str, Any]:
    """Returns what `fit --config NAME` would run with, every default filled in."""
    from plugins.cli.run_commands import fit

    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        fit(["--config", name, "--print_config"])
    return parse_yaml(printed.getvalue(), name)[0]


def flatten(values: Mapping[str, Any]) -> Flat:
    """Returns the sections of a configuration without their nesting, short names resolved."""
    sections = deepcopy({key: values[key] for key in SECTIONS if key in values})
    resolve_names(sections)
    flat = Flat()
    if sections:
        _flatten(sections, "", flat)
    return flat


def _flatten(value: Any, key: str, flat: Flat) -> None:
    names = {entry.name for entry in catalog.entries() if entry.kind != "commands"}
    named = isinstance(value, Mapping) and "class_path" in value
    if key in PATHS and value and (named or isinstance(value, list | str)):
        _flatten_list(value if isinstance(value, list) else [value], key, flat)
    elif named:
        flat.techniques[key] = str(value["class_path"])
        rest = {name: item for name, item in value.items() if name not in ("class_path", "init_args")}
        for name, item in {**(value.get("init_args") or {}), **rest}.items():
            _flatten(item, f"{key}.{name}", flat)
    elif isinstance(value, Mapping) and value:
        for name, item in value.items():
            _flatten(item, f"{key}.{name}".removeprefix("."), flat)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        _flatten_list(value, key, flat)
    elif isinstance(value, str) and (key in POSITIONS or value in names):
        flat.techniques[key] = value
    else:
        flat.values[key] = value


def _flatten_list(items: Iterable[Any], key: str, flat: Flat) -> None:
    for index, item in enumerate(items):
        item = {"class_path": item} if isinstance(item, str) and key in PATHS else item
        named = isinstance(item, Mapping) and isinstance(item.get("class_path"), str)
        name, number = short(item["class_path"]) if named else str(index), 1
        while f"{key}.{name}" in flat.techniques:  # the same class again
            number += 1
            name = f"{short(item['class_path'])}#{number}"
        _flatten(item, f"{key}.{name}", flat)


def short(class_path: str) -> str:
    """Returns the class name at the end of a path."""
    return class_path.rpartition(".")[2]


def differing(flats: Sequence[Flat]) -> tuple[list[str], list[str]]:
    """Returns the keys of the techniques and of the values that are not the same in all configurations.

    The arguments of a technique that some do not have at all are not among the values: they are shown
    with it.
    """
    first = flats[0]
    techniques = [
        key
        for key in _keys(flat.techniques for flat in flats)
        if not all(_same(flat.techniques.get(key), first.techniques.get(key)) for flat in flats)
    ]
    lonely = [key for key in techniques if any(key not in flat.techniques for flat in flats)]

    def is_shown(key: str) -> bool:
        """Whether a value belongs to such a technique, or is at the place of one in another configuration."""
        return any(key == k or key.startswith(f"{k}.") or k.startswith(f"{key}.") for k in lonely)

    values = [
        key
        for key in _keys(flat.values for flat in flats)
        if not is_shown(key) and any(_value(flat, key) != _value(first, key) for flat in flats)
    ]
    return techniques, values


def _keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the keys of all, by section."""
    return sorted({key for mapping in mappings for key in mapping}, key=_by_section)


def _by_section(key: str) -> tuple[int, str]:
    return SECTIONS.index(key.partition(".")[0]), key


def _same(one: str | None, other: str | None) -> bool:
    """Whether two class paths are equal, or one is the bare name at the end of the other."""
    if one is None or other is None:
        return one is other
    return one == other or (not ("." in one and "." in other) and short(one) == short(other))


def technique_cells(flats: Sequence[Flat], key: str) -> list[str]:
    """Returns the class at a key in each configuration; with its arguments if some do not have it."""
    lonely = any(key not in flat.techniques for flat in flats)
    paths = [flat.techniques.get(key) for flat in flats]
    alike = not lonely and len({short(str(path)) for path in paths}) == 1  # of two packages
    cells = []
    for flat, path in zip(flats, paths, strict=True):
        name = ABSENT if path is None else path if alike else short(path)
        arguments = flat.arguments(key) if lonely and path is not None else {}
        listed = ", ".join(f"{argument}={plain(value)}" for argument, value in arguments.items())
        cells.append(f"{name}({listed})" if listed else name)
    return cells


def value_cells(flats: Sequence[Flat], key: str) -> list[str]:
    """Returns the value at a key in each configuration, as YAML has it."""
    return [plain(flat.values[key]) if key in flat.values else ABSENT for flat in flats]


def _value(flat: Flat, key: str) -> Any:
    return flat.values.get(key, ABSENT)


def plain(value: Any) -> str:
    """Returns a value as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _as_text(a: str, b: str, one: Flat, two: Flat) -> Iterator[str]:
    techniques, values = differing([one, two])
    yield f"A: {a}\nB: {b}"
    if not techniques and not values:
        yield "\nThere is no difference."
    if techniques:
        yield "\nTechniques:"
    for key in techniques:
        parent = key.rpartition(".")[0]
        place = parent if parent in PATHS else key
        old, new = technique_cells([one, two], key)
        if ABSENT in (old, new):
            yield f"  + {place}: {new}" if old == ABSENT else f"  - {place}: {old}"
        else:
            yield f"  ~ {place}: {old} -> {new}"
    if values:
        yield "\nValues:"
    for key in values:
        yield f"  {key}: {' -> '.join(value_cells([one, two], key))}"


def _as_json(one: Flat, two: Flat) -> dict[str, Any]:
    techniques, values = differing([one, two])

    def row(key: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
        change = "added" if key not in a else "removed" if key not in b else "replaced"
        sides = {"a": a, "b": b}
        return {"key": key, "change": change} | {side: of[key] for side, of in sides.items() if key in of}

    changed = []
    for key in techniques:
        entry = row(key, one.techniques, two.techniques)
        if entry["change"] != "replaced":
            entry["arguments"] = (one if entry["change"] == "removed" else two).arguments(key)
        changed.append(entry)
    return {"techniques": changed, "values": [row(key, one.values, two.values) for key in values]}
