"""Commands that each break a promise."""

import traceback

import torch  # what is broken

from core.errors import ConfigError


def heavy(arguments):
    """Adds up.

    Example:
        python -m core heavy
    """
    return int(torch.zeros(()))


def careless(arguments):
    """Takes whatever it is given."""
    return 0


def verbose(arguments):
    """Says too much."""
    raise SystemExit(print("usage\n" * 20) or 2)


def breaking(arguments):
    """Does something that takes more than a line
    to say.
    """


def crashing(arguments):
    """Opens what it is given, whatever that is."""
    for path in arguments:
        open(path, encoding="utf-8").read()  # noqa: SIM115
    return 0


def tracing(arguments):
    """Shows where it failed, as a library does."""
    try:
        [path] = arguments
        print(path)
    except ValueError:
        traceback.print_exc()
    return 2


def careful(arguments):
    """Opens what it is given, and says what is wrong with it."""
    try:
        [path] = arguments
        open(path, encoding="utf-8").read()  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise ConfigError(f"careful takes a text file: {error}") from None
    return 0
