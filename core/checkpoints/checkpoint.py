"""Reads checkpoints safely: which file is whole, which is the newest, what a checkpoint says of itself."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import _get_rank

from core import catalog
from core.checkpoints import sharded
from core.configuration.config_files import parse_yaml, read_yaml
from core.contracts import Network
from core.errors import ConfigError, nearest

EXTRA_STATE = "_extra_state"
"""What a name in a `state_dict` ends in that stands for a module's own affair (torch's `get_extra_state`), no weight."""

RECORD = "leyden"
"""Key of what :class:`core.runs.run_folder.RunRecord` writes into every checkpoint."""


def defect(path: Path) -> str | None:
    """Returns why a file or folder is no whole checkpoint, or None if every byte is as it was written.

    torch.save writes a zip archive: its directory stands at the end, so that a file that was cut off
    has none, and each member carries a CRC-32, so that a damaged one is found.
    """
    if sharded.is_sharded(path):
        # Of the ranks that a launcher has started none need read all: they share the reading when they load.
        return sharded.defect(path, sharded.ALL if _get_rank() is None else sharded.NONE)
    try:
        with zipfile.ZipFile(path) as archive:
            if bad := archive.testzip():
                return f"member {bad} is damaged"
        if not (unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path)):
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return "there is no such file"
    except Exception:  # zipfile and pickle raise a dozen kinds on damaged bytes
        return f"cut off or not a checkpoint ({path.stat().st_size:,} bytes)"
    return (
        f"it holds more than tensors and plain values ({unsafe[0]}), which could run code" if unsafe else None
    )


def newest(root: Path, siblings: bool = False) -> Path:
    """Returns the newest whole checkpoint below a folder.

    Broken ones are named on stderr and passed over.

    Args:
        root: The folder.
        siblings: Also look into the later runs of the same root: root-2, root-3...

    Raises:
        ConfigError: If there is no whole checkpoint.
    """
    folders = [root, *(_later_runs(root) if siblings else [])]
    candidates = [path for folder in folders for path in _files(folder)]
    if found := next(_whole(candidates), None):
        return found
    raise ConfigError(
        f"--ckpt_path last: there is no whole checkpoint below {root} ({len(candidates)} looked at).\n"
        "Leave --ckpt_path out to start from the beginning, or name the run: --ckpt_path RUN_FOLDER."
    )


def of_folder(folder: Path, since_ns: int = 0) -> Path | None:
    """Returns the newest whole checkpoint below a folder, or None; broken ones are passed over as in `newest`.

    Args:
        folder: The folder.
        since_ns: Older ones are not looked at; as files' times are given.
    """
    return next(_whole([path for path in _files(folder) if path.stat().st_mtime_ns >= since_ns]), None)


def _files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*.ckpt") if not path.name.startswith("."))
    return [path for path in found if path.is_file() or sharded.is_sharded(path)]


def _whole(candidates: list[Path]) -> Iterator[Path]:
    for path in sorted(candidates, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True):
        reason = defect(path)
        if reason is None:
            yield path
        else:
            print(f"{path} is left aside: {reason}. Looking for the one before.", file=sys.stderr)


def numbered(root: Path) -> list[Path]:
    """Returns the folders root-2, root-3... that are there: later runs of that root, or others of such a name."""
    pattern = re.compile(rf"{re.escape(root.name)}-\d+")
    return sorted(folder for folder in root.parent.glob("*") if pattern.fullmatch(folder.name))


def _later_runs(root: Path) -> Iterator[Path]:
    for folder in numbered(root):
        record = folder / "config.yaml"
        if record.is_file():
            trainer = read_yaml(record)[0].get("trainer", {})
            if Path(trainer.get("default_root_dir", "")).absolute() == root.absolute():
                yield folder


def resolve(name: str, root: Path) -> Path:
    """Returns the file that a `--ckpt_path` means: `last`, a file, or a run folder (its newest).

    Raises:
        ConfigError: If it does not exist or is not whole.
    """
    path = Path(name)
    if name == "last":
        return newest(root, siblings=True)
    if path.is_dir() and not sharded.is_sharded(path):
        if (path / "zero_to_fp32.py").is_file():
            raise ConfigError(
                f"{path} was written by DeepSpeed itself, in pickles, which may run code: it is not read.\n"
                "What a run with the strategy DeepSpeedZero writes is taken everywhere."
            )
        return newest(path)
    if reason := defect(path):
        near = (other for other in path.parent.glob("*") if other.suffix == ".ckpt" or other.is_dir())
        beside = {str(other) for other in near} - {name}
        raise ConfigError(
            f"--ckpt_path {name}: {reason}.{nearest(name, beside)} `last` finds the newest whole one."
        )
    return path


def read(path: Path) -> dict[str, Any]:
    """Loads a checkpoint onto the CPU, tensors and plain values only; a single file is memory-mapped.

    Raises:
        ConfigError: If it is no Lightning checkpoint.
    """
    if sharded.is_sharded(path):
        return sharded.read(path)
    checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if (
        not isinstance(checkpoint, dict)
        or not {"state_dict", "pytorch-lightning_version"} <= checkpoint.keys()
    ):
        raise ConfigError(f"{path} is no checkpoint of `python -m core fit`: it has no Lightning state.")
    return checkpoint


def record(path: Path) -> dict[str, Any]:
    """Returns what a run wrote of itself into its checkpoint; empty for a foreign checkpoint."""
    whole = sharded.state(path) if sharded.is_sharded(path) else read(path)
    found: dict[str, Any] = whole.get(RECORD, {})
    return found


def stored_config(path: Path) -> dict[str, Any]:
    """Returns the configuration of the run that wrote a checkpoint; empty for a foreign checkpoint."""
    text = record(path).get("config")
    return parse_yaml(text, f"{path} (stored config)")[0] if text else {}


def load_network(path: Path) -> tuple[Network, str, int | None]:
    """Rebuilds the network of a checkpoint, in eval mode on the CPU.

    Returns:
        The network, its tokenizer as the JSON of the `tokenizers` library, and the end-of-text id.

    Raises:
        ConfigError: If the checkpoint holds no configuration or no tokenizer.
    """
    checkpoint = sharded.read(path, optimizers=False) if sharded.is_sharded(path) else read(path)
    text = checkpoint.get(RECORD, {}).get("config")
    states = (value for value in checkpoint.values() if isinstance(value, Mapping))
    data = next((state for state in states if isinstance(state.get("tokenizer"), str)), None)
    if text is None or data is None:
        raise ConfigError(
            f"{path} was not written by `python -m core fit`: it lacks its config or tokenizer."
        )
    config = parse_yaml(text, f"{path} (stored config)")[0]
    network = build_network(config["model"]["network"])
    prefix = "network."
    weights = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    if network.state_dict().keys() != weights.keys():
        _change_as_trained(network, config["trainer"])
    network.load_state_dict(weights)
    return network.eval(), data["tokenizer"], data.get("end_of_text_id")


def build_network(config: Mapping[str, Any]) -> Any:
    """Builds a network from the `model.network` part of a saved configuration.

    Raises:
        ConfigError: If it names a class that is no network, or that does not belong among its arguments.
    """
    return _build(Network, config, ("model", "network"))


def _change_as_trained(network: Network, trainer: Mapping[str, Any]) -> None:
    """Lets those techniques change a network that changed it in its run: quantised weights have other names."""
    for name in ("plugins", "callbacks"):
        for index, item in enumerate(trainer.get(name) or []):
            entry = catalog.by_class_path(item["class_path"])
            if entry is not None and hasattr(entry.load(), "change_network"):
                _build(entry.load(), item, ("trainer", name, index)).change_network(network)


def _build(base: type, config: Mapping[str, Any], place: tuple[str | int, ...]) -> Any:
    from jsonargparse import ArgumentParser

    from core.configuration.class_check import ClassChecker

    ClassChecker(lambda keys: ".".join(map(str, (*place, *keys)))).value(base, config, ())
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "built")
    return parser.instantiate(parser.parse_object({"built": dict(config)})).built


def check_weights(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises a ConfigError that names the first weight of another shape, or that one side does not have."""
    for name in [*own, *saved]:
        if name.endswith(EXTRA_STATE):
            continue
        here, there = (tuple(d[name].shape) if name in d else "absent" for d in (own, saved))
        if here != there:
            raise ConfigError(
                f"The checkpoint holds another network: {name} is {there} there and {here} here.\n"
                "Give the network the checkpoint's arguments, or leave them out: what you do not write is "
                "taken from the checkpoint."
            )
