"""Splits the words of a command line into configs, options and values, before they are parsed."""

from __future__ import annotations

from collections.abc import Iterator

from core.errors import ConfigError


def split_configs(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits `--config X`, `--config=X`, `-c X` from the other arguments."""
    configs, rest, words = [], [], iter(arguments)
    for word in words:
        if word in ("-c", "--config"):
            value = next(words, None)
            if value is None:
                raise ConfigError(
                    f"{word} needs a file or the name of a shipped config, for example quickstart."
                )
            configs.append(value)
        elif word.startswith(("--config=", "-c=")):
            configs.append(word.partition("=")[2])
        else:
            rest.append(word)
    return configs, rest


def option_values(arguments: list[str]) -> Iterator[tuple[int, int, str, str]]:
    """Yields (first word, words, key, value) of each option that has a value."""
    for index, word in enumerate(arguments):
        if not word.startswith("--"):
            continue
        key, equals, value = word[2:].partition("=")
        if equals:
            yield index, 1, key, value
        elif index + 1 < len(arguments) and not arguments[index + 1].startswith("--"):
            yield index, 2, key, arguments[index + 1]


def last(arguments: list[str], wanted: str) -> str | None:
    """Returns the last value of an option; None if it is not given."""
    found = [value for _, _, key, value in option_values(arguments) if key == wanted]
    return found[-1] if found else None


def without(arguments: list[str], unwanted: str) -> list[str]:
    """Returns the arguments without an option and its values."""
    drop = {
        i for at, count, key, _ in option_values(arguments) if key == unwanted for i in range(at, at + count)
    }
    return [word for index, word in enumerate(arguments) if index not in drop]
