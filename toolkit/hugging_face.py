"""A network's form in the Hugging Face ecosystem: names of weights and keys of config.json, in both directions.

A network that has one carries a :class:`HuggingFaceForm` as its class attribute `hugging_face`. Nothing here imports
transformers: weights are renamed tensor by tensor.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from core.errors import ConfigError

__all__ = ["HasHuggingFaceForm", "HuggingFaceForm", "Rename", "StoredTensor"]


@dataclass(frozen=True)
class Rename:
    """A line of a table of names: a module of ours, or several, and the module of theirs that has their parameters.

    Args:
        ours: "*" stands for the number of a layer. Several: theirs has their tensors side by side along the
            output features, in this order.
        theirs: With a "*" where ours have one.
        transposed: Whether their matrices are (in, out), as those of GPT-2.
        stacked: Whether ours is a parameter of which dimension 0 is that of the experts, and theirs one for each: it
            then has a last "*" for the number of the expert.
    """

    ours: str | tuple[str, ...]
    theirs: str
    transposed: bool = False
    stacked: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Ours, also where it is one."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of theirs, and the one of ours, or several, that it holds.

    Attributes:
        theirs: Its name in their files.
        ours: Names in our `state_dict`.
        transposed: Whether it is (in, out).
        index: Where ours is a stack of experts, which of them it is; None: ours is no stack.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    index: int | None = None

    def to_theirs(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns their tensor, given ours in the order of `ours`."""
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
        if self.index is not None:
            return tensor[self.index]
        return tensor.t().contiguous() if self.transposed and tensor.ndim == 2 else tensor

    def to_ours(self, tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Returns our tensors as views of theirs, given the first dimension of each of ours.

        Of a stack it is the expert with this tensor's index.

        Raises:
            ConfigError: If theirs has another size.
        """
        if self.index is not None:
            return (tensor,)
        tensor = tensor.t() if self.transposed and tensor.ndim == 2 else tensor
        if tensor.shape[0] != sum(sizes):
            raise ConfigError(f"{self.theirs} has {tensor.shape[0]} rows, not {sum(sizes)}.")
        return tensor.split(list(sizes))


@dataclass(frozen=True)
class HuggingFaceForm:
    """What a network class is called in transformers.

    Args:
        architecture: Class of transformers, such as "LlamaForCausalLM".
        model_type: As in config.json.
        renames: Each parameter of ours is in a module of one line; the longest name that fits counts.
        arguments: Key of config.json -> argument of our class, for values that are the same in both.
        defaults: What transformers takes for keys that config.json leaves out.
        constants: Keys that have one value in all networks of our class; another is refused.
        to_config: Returns further keys of config.json, given all arguments. Raises a ConfigError that names the argument
            where a value has no form in transformers.
        to_arguments: Returns further arguments, given config.json with its defaults.
        otherwise: The form of networks that have none here.
        copies: Their names for tensors that others of theirs hold as well: tied ones.
        left_out: Beginnings of names of theirs that a network of ours has no place for, and can do without.
    """

    architecture: str
    model_type: str
    renames: tuple[Rename, ...]
    arguments: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    to_config: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda arguments: {}
    to_arguments: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    otherwise: HuggingFaceForm | None = None
    copies: tuple[str, ...] = ("lm_head.weight",)
    left_out: tuple[str, ...] = ()

    def forms(self) -> Iterator[HuggingFaceForm]:
        """Yields this form, and those that networks have which have none here."""
        form: HuggingFaceForm | None = self
        while form is not None:
            yield form
            form = form.otherwise

    def tensors(self, names: Iterable[str]) -> list[StoredTensor]:
        """Returns their tensors for our names, in the order of ours: the plan of an import and of an export.

        Args:
            names: Of a network's `state_dict`; with experts that, or a mapping of them to shapes.

        Raises:
            ConfigError: If a name has no line, or a line of several modules lacks one of them.
        """
        found: dict[str, tuple[bool, dict[int, str]]] = {}
        wanted: dict[str, int] = {}
        stacks: list[StoredTensor] = []
        for name in names:
            line, place, theirs = self._find(name)
            if line.stacked:
                tensors: Any = names
                stack = tensors[name]
                shape = getattr(stack, "shape", stack)  # a tensor, read or not, or a shape
                stacks += [
                    StoredTensor(theirs.replace("*", str(index)), (name,), index=index)
                    for index in range(shape[0])
                ]
                continue
            found.setdefault(theirs, (line.transposed, {}))[1][place] = name
            wanted[theirs] = len(line.modules)
        for theirs, (_, parts) in found.items():
            if len(parts) != wanted[theirs]:
                raise ConfigError(
                    f"{self.architecture}: {theirs} needs more than {', '.join(parts.values())}."
                )
        return [
            StoredTensor(theirs, tuple(parts[place] for place in sorted(parts)), transposed)
            for theirs, (transposed, parts) in found.items()
        ] + stacks

    def _find(self, name: str) -> tuple[Rename, int, str]:
        """Returns the line of a name of ours, its place in the line, and their name."""
        matches = [
            (len(module), line, place, match)
            for line in self.renames
            for place, module in enumerate(line.modules)
            if (match := re.fullmatch(_pattern(module) + ("()" if line.stacked else r"(\..*)"), name))
        ]
        if not matches:
            raise ConfigError(f"{self.architecture} of transformers has no place for {name}.")
        _, line, place, match = max(matches, key=lambda found: found[0])
        *numbers, leaf = match.groups()
        theirs = line.theirs
        for number in numbers:
            theirs = theirs.replace("*", number, 1)
        return line, place, theirs + leaf

    def config(self, network: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns config.json for a network.

        Args:
            network: Its class, for the defaults of arguments that are not given.
            arguments: Arguments of its constructor.

        Raises:
            ConfigError: If it has no form in transformers; names the argument.
        """
        given = {
            name: parameter.default
            for name, parameter in inspect.signature(network).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        } | dict(arguments)
        same = {key: given[name] for key, name in self.arguments.items()}
        head = {"architectures": [self.architecture], "model_type": self.model_type}
        return head | same | dict(self.constants) | self.to_config(given)

    def init_args(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of our class for a config.json.

        Raises:
            ConfigError: If a key is missing, or has a value that our class does not compute; names the key.
        """
        found = {**self.constants, **self.defaults, **config}
        if missing := [key for key in self.arguments if key not in found]:
            raise ConfigError(f"config.json ({self.architecture}) has no {missing[0]}.")
        for key, value in self.constants.items():
            if found[key] != value:
                raise ConfigError(
                    f"config.json: {key} is {found[key]!r}; {self.architecture} is read with {value!r}."
                )
        return {name: found[key] for key, name in self.arguments.items()} | self.to_arguments(found)


def _pattern(module: str) -> str:
    return re.escape(module).replace(r"\*", r"(\d+)")


@runtime_checkable
class HasHuggingFaceForm(Protocol):
    """A network that can be read from and written as a transformers checkpoint."""

    hugging_face: ClassVar[HuggingFaceForm]
