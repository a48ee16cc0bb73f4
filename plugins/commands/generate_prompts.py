"""Reads the prompts file of `generate`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from toolkit.bounded import MOST_BYTES, parse_json, read_error


def read_prompts(name: str) -> list[str]:
    """Returns the prompts of a file: one a line; of a .jsonl file strings, or objects with a `prompt`.

    Raises:
        ConfigError: If it cannot be read, is not UTF-8, has no prompts, or a line has none.
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
    return [_prompt(line, f"--prompts {name}:{number}", as_json) for number, line in enumerate(lines, 1)]


def _prompt(line: str, place: str, as_json: bool) -> str:
    prompt: Any = line
    if as_json:
        try:
            prompt = parse_json(line.encode())
        except ValueError as error:
            raise ConfigError(f"{place}: it is no JSON: {str(error)[:200]}") from error
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt")
        if not isinstance(prompt, str):
            raise ConfigError(f"{place}: it is neither a string nor an object with a string `prompt`.")
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ConfigError(f"{place}: the prompt has half of a surrogate pair, which is no text.")
    if not prompt.strip():
        raise ConfigError(f"{place}: the prompt is empty.")
    return prompt
