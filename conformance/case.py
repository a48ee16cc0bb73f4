"""What is tried: a technique with arguments, and the configuration of a tiny run that selects it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from conformance.workshop import text, workshop
from core import catalog
from core.errors import ConfigError
from core.technique import Declaration, Device, Feature, Need, Package, WorldSize, declaration_of
from plugins.cli.configuration import named_callbacks
from plugins.cli.configuration.class_paths import POSITIONS, qualify, resolve_names
from plugins.cli.configuration.config_files import merge
from plugins.cli.configuration.docstrings import sections
from plugins.cli.configuration.signatures import parameters
from plugins.cli.configuration.yaml_texts import parse_yaml, read_yaml
from toolkit.selection import Run

TOLERANCE = 3e-6
"""Relative difference of losses and gradient norms after 8 steps in float32 (2^-24 = 6e-8 each sum); 3.5e-7 is usual."""

TOLERANCES = {"precision": 2.0**-7}
"""Kind -> relative difference that rounding explains: bfloat16's is up to 2^-9 each; 4.1e-3 is the most seen, in bf16-true."""

CALM = {"precision": {"model": {"optimizer": {"init_args": {"lr": 0.05}}}}}
"""Kind -> what is laid over the tiny run: at its rate of 0.25, 8 steps make 3% of a rounding to bfloat16."""


class Case:
    """A technique with the arguments to try it with.

    Args:
        technique: Its registered name, its full path, or its entry in the catalogue.
        init_args: Its arguments, as YAML would give them; None: those of its docstring's `Example:`.
        kind: Its kind, where techniques of two kinds share the name.
        config: Laid over the tiny run on top: what else the technique needs, such as another network.
        exempt: Proof -> why the technique does not give this promise.
        tolerance: How far losses on two ranks may be from one process's, relatively; None: what adding float32
            numbers in another order does, for a precision what bfloat16 does.
        batch: Changes a batch of the proofs of objectives, (B, T) ids and labels of tokens, into what the objective takes;
            None: it is as it is.

    Attributes:
        entry: The technique in the catalogue.

    Raises:
        ConfigError: If there is no such technique.
    """

    def __init__(
        self,
        technique: str | catalog.Entry,
        init_args: Mapping[str, Any] | None = None,
        *,
        kind: str | None = None,
        config: Mapping[str, Any] | None = None,
        exempt: Mapping[str, str] | None = None,
        tolerance: float | None = None,
        batch: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self.entry = technique if isinstance(technique, catalog.Entry) else catalog.find(technique, kind)
        self.init_args = init_args
        self.config: dict[str, Any] = copy.deepcopy(CALM.get(self.entry.kind, {}))
        merge(self.config, copy.deepcopy(dict(config or {})))
        self.exempt, self.batch = exempt or {}, batch
        self.tolerance = TOLERANCES.get(self.entry.kind, TOLERANCE) if tolerance is None else tolerance

    def __repr__(self) -> str:
        return f"Case({self.entry.name})"

    @property
    def target(self) -> Any:
        """The class, or a command's function; ConfigError if it cannot be imported."""
        return self.entry.load()

    @property
    def ranks(self) -> int:
        """The least number of processes that it runs on."""
        return max([1, *(need.at_least for need in self._needs() if isinstance(need, WorldSize))])

    def absent(self) -> str | None:
        """Returns which package or device it needs is not there, or None."""
        found = (need.missing(Run()) for need in self._needs() if isinstance(need, Package | Device))
        return next(filter(None, found), None)

    @property
    def _comes_with_others(self) -> bool:
        """Whether network, objective and data of its example are for each other: without one, none of them is used."""
        declared = declaration_of(self.target) or Declaration(paper="")
        bound = any(isinstance(need, Feature) for need in declared.needs) or bool(declared.offers)
        return bound and self.entry.kind in ("networks", "objectives", "datamodules")

    def _needs(self) -> tuple[Need, ...]:
        return tuple((declaration_of(self.target) or Declaration(paper="")).needs)

    @cached_property
    def overlay(self) -> dict[str, Any]:
        """What to lay over a configuration to select the technique with these arguments."""
        example = sections(getattr(self.target, "__doc__", None)).get("Example", "")
        try:
            values, _ = parse_yaml(example, "the example")
        except ConfigError:  # that the example is no YAML is a proof of its own
            values = {}
        found = _qualified(values, self.entry, self.init_args)
        if found is not None:
            return dict(found)
        if position_of(self.entry) is None:  # such as a stage that another technique calls
            return values
        return at_position(self.entry, _selected(self.entry, self.init_args))

    @cached_property
    def values(self) -> dict[str, Any]:
        """The configuration of the tiny run with the technique in it, short names resolved."""
        given = self.init_args if self.entry.kind == "datamodules" else None
        values = with_text(tiny([self.overlay]), given or {})
        self._fit_vocabulary(values)
        merge(values, copy.deepcopy(self.config))
        resolve_names(values)
        return values

    @cached_property
    def plain_values(self) -> dict[str, Any]:
        """The configuration of the tiny run in one process without the technique, but with what comes with it.

        That is what its example sets besides, such as an accumulation, and what the case lays over it.
        """
        rest = [_without(self.overlay, self.entry) or {}, self.config]
        if self._comes_with_others:
            rest = []
        values = with_text(tiny(rest), at(self.config, "data.init_args") or {})
        for name in ("devices", "num_nodes"):
            values["trainer"].pop(name, None)
        return values | {"trainer": values["trainer"] | {"devices": 1}}

    def _fit_vocabulary(self, values: dict[str, Any]) -> None:
        """Keeps network and tokenizer to the tiny run's vocabularies, unless the case says otherwise."""
        for position in ("model.network", "data.init_args.tokenizer"):
            here, usual = at(values, position), at(tiny([]), position)
            own = self.init_args is not None and self.entry.kind == "datamodules"
            if not isinstance(here, dict) or here == usual or own:
                continue
            given = self.init_args if here["class_path"] == self.entry.class_path else None
            takes = parameters(resolve_name(here["class_path"]))[0]
            if "vocab_size" in takes and "vocab_size" not in (given or {}):
                merge(here, {"init_args": {"vocab_size": usual["init_args"]["vocab_size"]}})

    def build(self, position: str, hint: Any) -> Any:
        """Builds what the configuration names at a position, as a run would; `hint` is its type there."""
        from jsonargparse import ArgumentParser

        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=hint)
        return parser.instantiate(
            parser.parse_object({"value": copy.deepcopy(at(self.values, position))})
        ).value


def tiny(overlays: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the configuration of the tiny run under overlays, short names resolved."""
    values, _ = read_yaml(Path(__file__).with_name("tiny.yaml"))
    qualify(values, package="leyden")  # another package's namesake does not break the kit
    for overlay in overlays:
        merge(values, copy.deepcopy(dict(overlay)))
    resolve_names(values)
    return values


def at(values: Mapping[str, Any], position: str) -> Any:
    """Returns the value at a position such as "model.network"; None if there is none."""
    value: Any = values
    for key in position.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def with_text(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with the kit's text for data modules that prepare text, whatever an example names.

    What a case gives the data module itself stays.
    """
    kind = values["data"]["class_path"]
    if kind.endswith(".PretrainDataModule") or _prepares_text(resolve_name(kind)):
        data = {"source": str(text()), "cache_dir": str(workshop() / "prepared")}
        merge(values["data"], {"init_args": {key: value for key, value in data.items() if key not in given}})
    return values


def _prepares_text(kind: Any) -> bool:
    from core.pretrain_datamodule import PretrainDataModule

    return isinstance(kind, type) and issubclass(kind, PretrainDataModule)


def _selected(entry: catalog.Entry, init_args: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"class_path": entry.class_path} | ({"init_args": dict(init_args)} if init_args else {})


def _qualified(value: Any, entry: catalog.Entry, init_args: Mapping[str, Any] | None) -> Any:
    """Returns the value with the technique by its full path, and with other arguments if there are any.

    None where the technique does not occur.
    """
    names = (entry.name, entry.class_path)
    if isinstance(value, str) and value in names:
        return _selected(entry, init_args)
    if isinstance(value, Mapping) and value.get("class_path") in names:
        return _selected(entry, value.get("init_args") if init_args is None else init_args)
    if not isinstance(value, Mapping | list):
        return None
    keys = list(value) if isinstance(value, Mapping) else range(len(value))
    result: Any = copy.copy(value)
    occurs = False
    for key in keys:
        found = _qualified(value[key], entry, init_args)
        if found is not None:
            result[key], occurs = found, True
    return result if occurs else None


def _without(value: Any, entry: catalog.Entry) -> Any:
    """Returns a value of a configuration without the technique; None where nothing is left."""
    names = (entry.name, entry.class_path)
    if (value["class_path"] if isinstance(value, Mapping) and "class_path" in value else value) in names:
        return None
    if isinstance(value, list):
        left = [item for item in (_without(item, entry) for item in value) if item is not None]
        return left or None
    if isinstance(value, Mapping):
        rest = {
            key: _without(one, entry) for key, one in value.items() if one is not None and key not in names
        }
        nulls = {key: None for key, one in value.items() if one is None}
        return {key: one for key, one in rest.items() if one is not None} | nulls or None
    return copy.deepcopy(value)


def position_of(entry: catalog.Entry) -> str | None:
    """Returns the position of techniques of this kind in a configuration; None if it depends on the technique."""
    return next((key for key, kinds in POSITIONS.items() if entry.kind in kinds), None)


def at_position(entry: catalog.Entry, named: Any) -> dict[str, Any]:
    """Returns a configuration with a technique, or what names it, at the position of its kind."""
    position = position_of(entry) or ""
    if position in named_callbacks.PATHS:
        position, named = f"{position}+", [named]
    for part in reversed(position.split(".") if position else []):
        named = {part: named}
    return dict(named)


def cases(package: str, own: Iterable[Case] = ()) -> list[Case]:
    """Returns the cases of a package's techniques: its own where there are some, else the docstring's example.

    Raises:
        ConfigError: If no such package registers anything; names those that do.
    """
    own = list(own)
    found = []
    for entry in entries_of(package):
        found += [case for case in own if case.entry == entry] or [Case(entry)]
    return found


def entries_of(package: str) -> list[catalog.Entry]:
    """Returns what a distribution registers, its name compared as pip does (PEP 503).

    Raises:
        ConfigError: If that is nothing.
    """
    from packaging.utils import canonicalize_name

    from core.errors import nearest

    wanted = canonicalize_name(package)
    found = [entry for entry in catalog.entries() if canonicalize_name(entry.package) == wanted]
    if not found:
        packages = {entry.package for entry in catalog.entries()}
        raise ConfigError(
            f"No installed package named {package!r} registers a technique.{nearest(package, packages)}\n"
            f"These do: {', '.join(sorted(packages))}. After a change to pyproject.toml, `pip install -e .` again."
        )
    return found
