"""Paths in the configuration that a checkpoint holds: inside the run folder, unless the user wrote them.

A checkpoint may have been copied from another machine, or come from an untrusted source. Paths for writing in its
configuration are therefore relative to the folder of the resumed run. A path outside of it has to be written by the
user, as an option or in a config; where a checkpoint on object storage is, the URL says so. Sources of data are only read,
and used as they are. A `cache_dir` is used if it holds prepared data already: files are added to it, and none is replaced.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from plugins.cli.configuration.arguments import last
from plugins.cli.configuration.config_files import Composed
from plugins.cli.configuration.yaml_texts import Keys
from toolkit.local_paths import is_url

PLACEHOLDER = "${run_folder}"
"""Means the run's folder, which is known only when the run starts."""

_PATH_LIKE = re.compile(r"(^|_)(dir|dirpath|path|folder|file|filename|directory|root)$")
"""Names of arguments that are paths, whatever the value looks like."""


class Outside(str):
    """A path of a stored configuration that lies outside of the run folder."""


def rebase(stored: dict[str, Any], folder: Path | None) -> None:
    """Moves the paths of a stored configuration into the run folder in use, in place; marks those outside of it.

    Args:
        stored: The configuration; that of the run's root is left to the caller.
        folder: The run folder in use; None where it is not known yet.
    """
    trainer = stored.get("trainer")
    root = trainer.get("default_root_dir") if isinstance(trainer, dict) else None
    for section in ("trainer", "data"):
        _walk(stored.get(section), (section,), root if isinstance(root, str) else None, folder)


def _walk(value: Any, keys: Keys, root: str | None, folder: Path | None) -> None:
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(item, str) and _is_path(item, (*keys, key)) and not _is_cache(item, (*keys, key)):
                value[key] = _rebased(item, root, folder)
            else:
                _walk(item, (*keys, key), root, folder)


def _is_path(value: str, keys: Keys) -> bool:
    name = str(keys[-1])
    if keys[0] == "data":
        return name == "cache_dir"
    if name == "class_path" or keys == ("trainer", "default_root_dir"):
        return False
    looks = value.startswith(("/", "~", PLACEHOLDER)) or ".." in Path(value).parts or ":/" in value
    return looks or (bool(value) and _PATH_LIKE.search(name) is not None)


def _is_cache(value: str, keys: Keys) -> bool:
    """Whether a folder of prepared data is in use on this machine."""
    if keys[0] != "data":
        return False
    try:
        folder = Path(value).expanduser()
        return any(
            next(folder.glob(pattern), None) for pattern in ("*/manifest.json", "remote/*/manifest.json")
        )
    except (OSError, ValueError, RuntimeError):
        return False


def _rebased(value: str, root: str | None, folder: Path | None) -> str:
    if value.startswith(PLACEHOLDER):
        below = os.path.normpath(f"./{value.removeprefix(PLACEHOLDER)}")
        safe = value.removeprefix(PLACEHOLDER)[:1] in ("", "/") and not below.startswith("..")
        return _linked(value, below, folder) if safe and PLACEHOLDER not in below else Outside(value)
    if PLACEHOLDER in value or "\0" in value or ":/" in value:
        return Outside(value)
    path = os.path.abspath(os.path.expanduser(value))
    for old in (str(folder) if folder else None, root):
        rest = _below(path, os.path.abspath(os.path.expanduser(old))) if old else None
        if rest is not None:
            return _linked(f"{PLACEHOLDER}/{rest}".removesuffix("/"), rest, folder)
    return Outside(value)


def _linked(value: str, below: str, folder: Path | None) -> str:
    """Returns a path below the run folder, or where it leads to if a symbolic link in the folder leads out of it."""
    if folder is None or "\0" in below:
        return value
    found = os.path.realpath(folder / below)
    return value if Path(found).is_relative_to(os.path.realpath(folder)) else Outside(found)


def check_links(folder: Path) -> None:
    """Raises a ConfigError for a file of a run folder that is a link out of it: a resumed run would write to its target."""
    inside = os.path.realpath(folder)
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        target = os.path.realpath(path)
        if path.is_symlink() and not os.path.isdir(target) and not Path(target).is_relative_to(inside):
            raise ConfigError(
                f"{path} is a link to {target}, outside of the run folder: a resumed run would write to it.\n"
                f"Put the file itself in its place, or remove the link: rm {path}"
            )


def _below(path: str, root: str) -> str | None:
    """Returns a path relative to a run folder, or to one of its later runs root-2, root-3...; None outside of them."""
    found = re.fullmatch(rf"{re.escape(root)}(?:-[0-9]+)?(?:/(.*))?", path)
    return (found[1] or "") if found else None


def check(composed: Composed, arguments: list[str], checkpoint: Path, wanted: str = "") -> None:
    """Raises a ConfigError for the first path outside of the run folder that the user has not written.

    Args:
        composed: The stored configuration with the user's over it; what the user wrote is no `Outside` any more.
        arguments: The remaining command line.
        checkpoint: Where the stored configuration is from.
        wanted: The checkpoint as the user named it: if by a URL, the folder there is written by the user.
    """
    from plugins.checkpoints.remote_copies import shown

    place = shown(checkpoint).rpartition("/")[0] if is_url(wanted) else ""
    for holder, keys in list(_outside(composed.values, ())):
        option = ".".join(str(key) for key in keys if key != "init_args")
        value = str(holder[keys[-1]])
        holder[keys[-1]] = value
        if is_place(value, place):
            holder[keys[-1]] = place
            continue
        if any(last(arguments, name) is not None for name in (option, ".".join(map(str, keys)))):
            continue
        name = _by_name(composed.values, keys) or f"--{option}"
        raise ConfigError(
            f"{shown(checkpoint)}: its stored config sets {option.rpartition('.')[2]} of {_owner(composed.values, keys)} to "
            f"{value}, outside of the run folder.\nA checkpoint alone does not decide where is written. If you want "
            f"that, write it yourself:\n{name}={shlex.quote(value)}\nElse give another folder, such as {name}='{PLACEHOLDER}/"
            f"{Path(value).name or 'output'}'."
        )


def is_place(value: str, place: str) -> bool:
    """Returns whether a URL of a stored configuration, with the run folder of its run, was that of a folder."""
    parts = (re.escape(part) for part in value.rstrip("/").split(PLACEHOLDER))
    return is_url(value) and re.fullmatch(".+".join(parts), place) is not None


def _outside(value: Any, keys: Keys) -> Iterator[tuple[Any, Keys]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, Outside):
                yield value, (*keys, key)
            else:
                yield from _outside(item, (*keys, key))


def _class_at(values: Any, keys: Keys) -> str:
    """Returns the name of the innermost class whose argument is at `keys`; "" for none."""
    name = ""
    for key in keys:
        if isinstance(values, dict) and isinstance(values.get("class_path"), str):
            name = values["class_path"].rpartition(".")[2]
        values = values[key]
    return name


def _owner(values: Any, keys: Keys) -> str:
    return _class_at(values, keys) or ".".join(map(str, keys[:-1]))


def _by_name(values: Any, keys: Keys) -> str | None:
    """Returns the option that sets an argument of a callback of a list."""
    if keys[:2] != ("trainer", "callbacks") or len(keys) < 5:
        return None
    return f"--callbacks.{_class_at(values, keys[:4])}." + ".".join(map(str, keys[4:]))
