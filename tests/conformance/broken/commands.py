"""Commands that each break a promise."""

import torch  # what is broken


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
