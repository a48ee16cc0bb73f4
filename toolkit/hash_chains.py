"""Fingerprints of what a training step computes with, and the files in which a run keeps them, step by step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from toolkit.bounded import MOST_TABLE_BYTES, parse_json

__all__ = [
    "FOLDER",
    "Chain",
    "as_hex",
    "fingerprint",
    "group_of",
    "link",
    "ordered_fingerprint",
    "read_chain",
]

FOLDER = "hash_chain"
"""Folder of the files in a run folder: `rank0.jsonl` and so on, a line for each step."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor as a flat one of integers; a copy only where it is not contiguous."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])


def fingerprint(tensor: Tensor) -> Tensor:
    """Returns the sum of a tensor's bits as integers of 32 bits, 0-d, on its device, without waiting for it.

    Integers are summed exactly, in whatever order a device takes: equal tensors have equal fingerprints everywhere, and a
    tensor of which one element was changed has another. An exchange of elements is not seen.
    """
    return _bits(tensor).sum(dtype=torch.int32)


def ordered_fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a fingerprint, 0-d, that also changes when elements are exchanged; it takes several times as long."""
    found: Tensor | None = None
    for tensor in tensors:
        bits = _bits(tensor).to(torch.int32)
        # odd, so that each bit counts; consecutive ones would give a swap of equal steps the same sum
        weights = torch.arange(1, 2 * len(bits), 2, dtype=torch.int32, device=bits.device)
        own = (bits * weights * weights).sum(dtype=torch.int32)
        found = own if found is None else found * 31 + own
    return torch.zeros((), dtype=torch.int32) if found is None else found


def group_of(name: str) -> str:
    """Returns the module whose weights are one entry of the chain: the numbered block, otherwise the module itself."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1] or parts)


def link(before: str, line: Mapping[str, Any]) -> str:
    """Returns the hash of a step's line, and with it of all before."""
    text = before + json.dumps(line, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class Chain:
    """What one rank of a run recorded.

    Attributes:
        environment: Versions, threads, devices.
        groups: Names of the modules.
        steps: Optimizer step -> its line; 0 is before the first one.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)

    def weights(self, step: int) -> dict[str, str] | None:
        """Returns the fingerprint of each module after a step; None where it was not recorded."""
        text = self.steps.get(step, {}).get("weights")
        if not isinstance(text, str):
            return None
        return {name: text[8 * i : 8 * i + 8] for i, name in enumerate(self.groups)}


def read_chain(path: Path) -> Chain:
    """Returns what a file holds; of a step that was made again after a rollback, or a resume, what was done last.

    Raises:
        ConfigError: If it is not as HashChain writes it.
    """
    chain = Chain()
    try:
        if path.exists() and not path.is_file():  # such as a pipe, which would be waited for
            raise ValueError("it is no regular file")
        if path.stat().st_size > MOST_TABLE_BYTES:
            raise ValueError(f"it has more than {MOST_TABLE_BYTES:,} bytes")
        content = path.read_bytes()
        for text in content[: content.rfind(b"\n") + 1].splitlines():  # a killed run may end in mid-line
            _take(chain, parse_json(text))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not as HashChain writes it: {error}.") from None
    return chain


def _take(chain: Chain, line: Any) -> None:
    if not isinstance(line, dict):
        raise ValueError("a line is no object")
    if "groups" in line:
        if not isinstance(line.get("environment"), dict):
            raise ValueError("its environment is no object")
        chain.environment, chain.groups = dict(line["environment"]), _names(line["groups"])
        return
    step = line.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError("a line has no step")
    if chain.steps and step <= next(reversed(chain.steps)):
        chain.steps = {number: kept for number, kept in chain.steps.items() if number < step}
    chain.steps[step] = line


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("its groups are no names")
    return value


def as_hex(values: Sequence[int]) -> str:
    """Returns integers of 32 bits as text, 8 digits each."""
    return "".join(f"{value & 0xFFFFFFFF:08x}" for value in values)
