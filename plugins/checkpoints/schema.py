"""The schema of checkpoints, which every reader checks before it uses the content.

A checkpoint may be untrusted or damaged. Invalid content is reported here in one sentence, instead of as some error
in the middle of a run. Of the states of techniques only the outer form is checked.
"""

from __future__ import annotations

import os
import stat
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_VALUES = 1_000_000
"""Limit of values in a checkpoint. A tensor counts as one; a list that is referred to twice counts twice."""
MOST_DEPTH = 64
MOST_TEXT = 64 * 2**20
"""Limit of characters in one string, such as the JSON of a tokenizer."""
EXPANSION, SLACK_BYTES = 8, 64 * 2**20
"""Tensors may take `EXPANSION` times the size of their file plus `SLACK_BYTES`: an expanded tensor is stored once."""

PROGRESS = ("ready", "completed")


def irregular(path: Path) -> str | None:
    """Returns why a path is not a regular file, or None: reading a pipe would block, reading a device never ends."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({getattr(error, 'strerror', None) or error})"
    return None if stat.S_ISREG(mode) else "it is not a regular file"


SETTLED_NS = 2 * 10**9
"""A file that was changed less than this before it was read may change again under the same modification time."""
_complete: set[tuple[int, ...]] = set()


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Returns what differs once another file has the name, or the file has been written again."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def is_settled(found: os.stat_result) -> bool:
    """Returns whether the identity of a file tells that it stays as it is read now."""
    return time.time_ns() - found.st_mtime_ns > SETTLED_NS


def file_defect(path: Path, tensors: bool = True) -> str | None:
    """Returns why a file is not a complete, undamaged checkpoint, or None; a file that was found complete is not read again.

    torch.save writes a zip archive: its directory is at the end, so that a file that was cut off has none, and each
    member carries a CRC-32, so that a damaged one is found. A file that claims to hold more than its size allows is
    refused before it is read.

    Args:
        path: The file.
        tensors: Whether the data of tensors are read and compared with their CRC-32; all else is.
    """
    if reason := irregular(path):
        return reason
    found = path.stat()
    if identity(found) in _complete:
        return None
    settled = is_settled(found)
    reason = _file_defect(path, found.st_size, tensors)
    if reason is None and tensors and settled:
        _complete.add(identity(found))
    return reason


def _file_defect(path: Path, size: int, tensors: bool) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            if reason := overblown(archive, size):
                return reason
            if bad := archive.testzip() if tensors else _bad_record(archive):
                return f"member {bad} is damaged"
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            return f"it holds more than tensors and plain values ({unsafe[0]}), which could run code"
        return oversized(torch.load(path, map_location="cpu", weights_only=True, mmap=True), size)
    except Exception:  # zipfile and pickle raise a dozen kinds on damaged bytes
        return f"cut off or not a checkpoint ({size:,} bytes)"


def _bad_record(archive: zipfile.ZipFile) -> str | None:
    """Returns the first damaged member that is not the data of a tensor, which torch.save names `NAME/data/NUMBER`."""
    for member in archive.namelist():
        if "/data/" not in member:
            try:
                archive.read(member)
            except zipfile.BadZipFile:
                return member
    return None


def overblown(archive: zipfile.ZipFile, size: int) -> str | None:
    """Returns why a zip archive claims to hold more than its file, or None; reads only its directory.

    torch.save stores members as they are. A compressed member, or members that share bytes, could take a
    thousand times the memory once they are read.

    Args:
        archive: The archive.
        size: Size of its file in bytes.
    """
    members = archive.infolist()
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            return f"its member {member.filename[:80]!r} is compressed, which torch.save does not do"
    claimed = sum(member.file_size for member in members)
    return f"it claims to hold {claimed:,} bytes in a file of {size:,}" if claimed > size else None


def oversized(content: Any, size: int) -> str | None:
    """Returns why a checkpoint exceeds the limits of values and tensor sizes, or None.

    Args:
        content: The content of the checkpoint.
        size: Size of its file in bytes.
    """
    values, tensor_bytes, waiting = 0, 0, [(content, 0)]
    while waiting:
        value, depth = waiting.pop()
        values += 1
        if values > MOST_VALUES or depth > MOST_DEPTH:
            return f"it holds more than {MOST_VALUES:,} values, or more than {MOST_DEPTH} levels of them"
        if isinstance(value, Mapping):
            waiting += ((item, depth + 1) for pair in value.items() for item in pair)
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += ((item, depth + 1) for item in value)
        elif type(value) is Tensor and value.layout == torch.strided:
            tensor_bytes += value.numel() * value.element_size()
        elif isinstance(value, str | bytes) and len(value) > MOST_TEXT:
            return f"it holds a text of {len(value):,} characters"
        elif isinstance(value, int) and value.bit_length() > 256:
            return f"it holds a number of {value.bit_length():,} bits"
    if tensor_bytes > SLACK_BYTES + EXPANSION * size:
        return f"its tensors take {tensor_bytes:,} bytes, the file {size:,}"
    return None


def fault(content: Any) -> str | None:
    """Returns what is wrong with the first field of a checkpoint that has a wrong type, or None.

    Missing fields are accepted, except those that another field needs.
    """
    if not isinstance(content, Mapping):
        return f"it is a {_name(content)}, not a dict"
    for key in content:
        if not isinstance(key, str):
            return f"it has a key {key!r}, which is no text"
    for key, look in FIELDS.items():
        if key in content and (wrong := look(content[key], key)):
            return wrong
    for key, value in content.items():  # of data modules, whose keys are the names of their classes
        if key not in FIELDS and isinstance(value, Mapping) and (wrong := _data(value, key)):
            return wrong
    return None


# -- the fields --------------------------------------------------------------------------------------

Look = Callable[[Any, str], str | None]


def _name(value: Any) -> str:
    return type(value).__name__


def _is(kinds: type | tuple[type, ...], called: str) -> Look:
    def look(value: Any, key: str) -> str | None:
        wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in _tuple(kinds))
        return f"{key} is a {_name(value)}, not {called}" if wrong else None

    return look


def _tuple(kinds: type | tuple[type, ...]) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


_mapping, _list = _is(Mapping, "a dict"), _is((list, tuple), "a list")
_text, _number = _is(str, "a text"), _is((int, float, Tensor), "a number")


def _count(value: Any, key: str) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{key} is a {_name(value)}, not an integer"
    return None if 0 <= value < 2**63 else f"{key} is {value:,}, out of range"


def _one_of(
    found: Mapping[str, Any], key: str, looks: Mapping[str, Look], needed: tuple[str, ...] = ()
) -> str | None:
    """Checks the fields of a mapping that are present."""
    for name in needed:
        if name not in found:
            return f"{key} has no {name}"
    for name, look in looks.items():
        if name in found and (wrong := look(found[name], f"{key}.{name}")):
            return wrong
    return None


def _weights(value: Any, key: str) -> str | None:
    if wrong := _mapping(value, key):
        return wrong
    for name in value:
        if not isinstance(name, str):
            return f"{key} has a key {name!r}, which is no text"
        if name.endswith("_extra_state"):
            continue
        if not hasattr(value[name], "shape"):
            return f"{key}.{name} is a {_name(value[name])}, not a tensor"
    return None


def _optimizers(value: Any, key: str) -> str | None:
    if wrong := _list(value, key):
        return wrong
    for index, optimizer in enumerate(value):
        place = f"{key}.{index}"
        looks: dict[str, Look] = {"state": _optimizer_state, "param_groups": _groups}
        if wrong := _mapping(optimizer, place) or _one_of(optimizer, place, looks, tuple(looks)):
            return wrong
    return None


def _optimizer_state(value: Any, key: str) -> str | None:
    if wrong := _mapping(value, key):
        return wrong
    kinds: dict[Any, bool] = {}
    for number, values in value.items():
        if isinstance(number, bool) or not isinstance(number, int | str):
            return f"{key} has a key {number!r}, which is no parameter"
        if wrong := _mapping(values, f"{key}.{number}"):
            return wrong
        for name, item in values.items():
            # If the momentum of one parameter is a tensor, so are all others; otherwise the file was changed afterwards.
            is_tensor = hasattr(item, "shape")
            if item is not None and kinds.setdefault(name, is_tensor) != is_tensor:
                return f"{key}.{number}.{name} is a {_name(item)}, which that of other parameters is not"
    return None


def _groups(value: Any, key: str) -> str | None:
    if wrong := _list(value, key):
        return wrong
    looks: dict[str, Look] = {"params": _list, "lr": _number, "weight_decay": _number}
    for index, group in enumerate(value):
        place = f"{key}.{index}"
        if wrong := _mapping(group, place) or _one_of(group, place, looks, ("params", "lr")):
            return wrong
    return None


def _schedulers(value: Any, key: str) -> str | None:
    if wrong := _list(value, key):
        return wrong
    looks: dict[str, Look] = {
        "last_epoch": _is(int, "an integer"),
        "base_lrs": _rates,
        "_last_lr": _rates,
        "tokens": _is(int, "an integer"),
    }
    for index, state in enumerate(value):
        place = f"{key}.{index}"
        if wrong := _mapping(state, place) or _one_of(state, place, looks):
            return wrong
    return None


def _rates(value: Any, key: str) -> str | None:
    return _list(value, key) or next(
        (wrong for index, rate in enumerate(value) if (wrong := _number(rate, f"{key}.{index}"))), None
    )


def _loops(value: Any, key: str) -> str | None:
    if wrong := _mapping(value, key):
        return wrong
    for name, loop in value.items():
        if wrong := _mapping(loop, f"{key}.{name}"):
            return wrong
        for part, state in loop.items():
            if str(part).endswith("progress") and (wrong := _progress(state, f"{key}.{name}.{part}")):
                return wrong
    fit = value.get("fit_loop")
    if fit is None:
        return None
    needed = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
    looks: dict[str, Look] = {"epoch_loop.state_dict": _stepped, "accumulated": _count}
    return _one_of(fit, f"{key}.fit_loop", {**looks, "state_dict": _mapping}, needed)


def _stepped(value: Any, key: str) -> str | None:
    """Checks what Lightning's training loop adds to its progress: counts, under names that are private to it."""
    return _mapping(value, key) or _one_of(value, key, dict.fromkeys(value, _count))


def _progress(value: Any, key: str) -> str | None:
    """Checks the counts of one loop: of all epochs (total) and of this one (current)."""
    if wrong := _mapping(value, key):
        return wrong
    for name, counts in value.items():
        place = f"{key}.{name}"
        if name in ("total", "current"):
            looks = dict.fromkeys(("ready", "started", "processed", "completed"), _count)
            if wrong := _mapping(counts, place) or _one_of(counts, place, looks, PROGRESS):
                return wrong
        elif isinstance(counts, Mapping):
            if wrong := _progress(counts, place):
                return wrong
        elif not isinstance(counts, bool | int):
            return f"{place} is a {_name(counts)}, not a number"
    return None


def _callbacks(value: Any, key: str) -> str | None:
    return _mapping(value, key) or next(
        (f"{key} has a key {name!r}, which is no text" for name in value if not isinstance(name, str)), None
    )


def _record(value: Any, key: str) -> str | None:
    looks: dict[str, Look] = {"config": _text, "version": _text, "ranks": _count}
    if wrong := _mapping(value, key) or _one_of(value, key, looks):
        return wrong
    return f"{key}.ranks is 0" if value.get("ranks") == 0 else None


def _language_module(value: Any, key: str) -> str | None:
    needed: dict[str, Look] = {"tokens_seen": _number, "window": _mapping}
    return _mapping(value, key) or _one_of(value, key, {**needed, "groups": _settings}, tuple(needed))


def _settings(value: Any, key: str) -> str | None:
    """Checks the settings with which the optimizer's groups were built; older checkpoints do not have them."""
    return _list(value, key) or next(
        (wrong for index, group in enumerate(value) if (wrong := _mapping(group, f"{key}.{index}"))), None
    )


def _data(value: Mapping[str, Any], key: str) -> str | None:
    if "tokenizer" not in value:
        return None
    optional = _is((int, type(None)), "an integer")
    position = _is((Mapping, type(None)), "a dict")
    looks = {"tokenizer": _text, "end_of_text_id": optional, "position": position, "reshuffled": _count}
    return _one_of(value, key, looks)


def _names(value: Any, key: str) -> str | None:
    return _list(value, key) or next(
        (f"{key} holds {name!r}, which is no text" for name in value if not isinstance(name, str)), None
    )


FIELDS: dict[str, Look] = {
    "state_dict": _weights,
    "pytorch-lightning_version": _text,
    "epoch": _count,
    "global_step": _count,
    "loops": _loops,
    "optimizer_states": _optimizers,
    "lr_schedulers": _schedulers,
    "callbacks": _callbacks,
    "leyden": _record,
    "language_module": _language_module,
    "weights_in_training": _weights,
    "state_dict_order": _names,
}
"""Field -> function that returns what is wrong with its value, or None."""
