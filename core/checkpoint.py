"""Reads checkpoints safely: which file is whole, which is the newest, what a checkpoint says of itself."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from core.config_files import parse_yaml
from core.contracts import Network
from core.errors import ConfigError, nearest

RECORD = "leyden"
"""Key of what :class:`core.run_folder.RunRecord` writes into every checkpoint."""


def defect(path: Path) -> str | None:
    """Returns why a file is no whole checkpoint, or None if every byte is as it was written.

    torch.save writes a zip archive: its directory stands at the end, so that a file that was cut off
    has none, and each member carries a CRC-32, so that a damaged one is found.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if bad := archive.testzip():
                return f"member {bad} is damaged"
        if not (unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path)):
            read(path)
    except FileNotFoundError:
        return "there is no such file"
    except Exception:  # zipfile and pickle raise a dozen kinds on damaged bytes
        return f"cut off or not a checkpoint ({path.stat().st_size:,} bytes)"
    return (
        f"it holds more than tensors and plain values ({unsafe[0]}), which could run code" if unsafe else None
    )


def newest(root: Path) -> Path:
    """Returns the newest whole checkpoint below a folder or its numbered siblings (root-2, root-3...).

    Broken ones are named on stderr and passed over.

    Raises:
        ConfigError: If there is no whole checkpoint.
    """
    found = sorted(_candidates(root), key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
    for path in found:
        reason = defect(path)
        if reason is None:
            return path
        print(f"{path} is left aside: {reason}. Looking for the one before.", file=sys.stderr)
    raise ConfigError(
        f"--ckpt_path last: there is no whole checkpoint below {root} ({len(found)} looked at).\n"
        "Leave --ckpt_path out to start from the beginning, or name the run with --trainer.default_root_dir."
    )


def _candidates(root: Path) -> Iterator[Path]:
    numbered = re.compile(rf"{re.escape(root.name)}-\d+")
    for folder in [root, *(path for path in root.parent.glob("*") if numbered.fullmatch(path.name))]:
        yield from (p for p in folder.rglob("*.ckpt") if p.is_file() and not p.name.startswith("."))


def resolve(name: str, root: Path) -> Path:
    """Returns the file that a `--ckpt_path` means: `last`, a file, or a run folder (its newest).

    Raises:
        ConfigError: If it does not exist or is not whole.
    """
    path = Path(name)
    if name == "last":
        return newest(root)
    if path.is_dir():
        return newest(path)
    if reason := defect(path):
        beside = (
            {str(other) for other in path.parent.glob("*.ckpt")} - {name} if path.parent.is_dir() else set()
        )
        raise ConfigError(
            f"--ckpt_path {name}: {reason}.{nearest(name, beside)} `last` finds the newest whole one."
        )
    return path


def read(path: Path) -> dict[str, Any]:
    """Loads a checkpoint onto the CPU, memory-mapped, tensors and plain values only."""
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return checkpoint


def stored_config(path: Path) -> dict[str, Any]:
    """Returns the configuration of the run that wrote a checkpoint; empty for a foreign checkpoint."""
    text = read(path).get(RECORD, {}).get("config")
    return parse_yaml(text, f"{path} (stored config)")[0] if text else {}


def load_network(path: Path) -> tuple[Network, str]:
    """Rebuilds the network of a checkpoint, in eval mode on the CPU.

    Returns:
        The network and its tokenizer as the JSON of the `tokenizers` library.

    Raises:
        ConfigError: If the checkpoint holds no configuration or no tokenizer.
    """
    from core.cli import build_network

    checkpoint = read(path)
    text = checkpoint.get(RECORD, {}).get("config")
    tokenizer = next((_tokenizer(value) for value in checkpoint.values() if _tokenizer(value)), None)
    if text is None or tokenizer is None:
        raise ConfigError(
            f"{path} was not written by `python -m core fit`: it lacks its config or tokenizer."
        )
    network = build_network(parse_yaml(text, f"{path} (stored config)")[0]["model"]["network"])
    prefix = "network."
    weights = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    network.load_state_dict(weights)
    return network.eval(), tokenizer


def _tokenizer(state: Any) -> str | None:
    found = state.get("tokenizer") if isinstance(state, Mapping) else None
    return found if isinstance(found, str) else None
