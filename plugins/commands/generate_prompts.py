"""Reads the prompts file of `generate`."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

from core.errors import ConfigError, nearest
from toolkit.bounded import MOST_BYTES, parse_json, read_error


def read_prompts(name: str, adapters: Collection[str] = ()) -> list[tuple[str, str | None]]:
    """Returns the prompts of a file, each with its adapter: one a line; of a .jsonl file strings, or objects with a `prompt`.

    Args:
        name: The file.
        adapters: Names that an `adapter` of an object may have.

    Raises:
        ConfigError: If it cannot be read, is not UTF-8, has no prompts, or a line has none or another adapter.
    """
    try:
        path = Path(name)
        if path.exists() and not path.is_file():
            raise ConfigError(f"--prompts {name}: it is no file.")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {name}: {read_error(error)}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"--prompts {name}: it has more than {MOST_BYTES >> 20} MiB.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"--prompts {name}:{line}: it is not UTF-8.") from error
    lines = [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]
    if not lines:
        raise ConfigError(f"--prompts {name}: it is empty.")
    as_json = path.suffix == ".jsonl"
    places = [f"--prompts {name}:{number}" for number in range(1, len(lines) + 1)]
    return [_prompt(line, place, as_json, adapters) for line, place in zip(lines, places, strict=True)]


def _prompt(line: str, place: str, as_json: bool, adapters: Collection[str]) -> tuple[str, str | None]:
    prompt: Any = line
    adapter: Any = None
    if as_json:
        try:
            prompt = parse_json(line.encode())
        except ValueError as error:
            raise ConfigError(f"{place}: it is no JSON: {str(error)[:200]}") from error
        if isinstance(prompt, dict):
            prompt, adapter = prompt.get("prompt"), prompt.get("adapter")
        if not isinstance(prompt, str):
            raise ConfigError(f"{place}: it is neither a string nor an object with a string `prompt`.")
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ConfigError(f"{place}: the prompt has half of a surrogate pair, which is no text.")
    if not prompt.strip():
        raise ConfigError(f"{place}: the prompt is empty.")
    if adapter is not None and adapter not in list(adapters):
        raise ConfigError(
            f"{place}: there is no adapter {str(adapter)[:80]!r}.{nearest(str(adapter), set(adapters))} "
            "Give it as --adapter NAME=PATH."
        )
    return prompt, adapter
