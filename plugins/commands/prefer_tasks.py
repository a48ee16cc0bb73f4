"""Pairs of answers to compare, from files that `generate` wrote."""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from core.errors import ConfigError, nearest
from toolkit.bounded import parse_json, read_error, read_inside

Answers = dict[str, list[str]]
"""Prompt -> answers to it, in the order of the file."""

RESERVED = TIE, SKIP, UNDONE = "tie", "skip", "undone"
"""What a choice is that prefers none of the two; the last takes back what was chosen before."""

_MOST_NAME = 80


class Task(NamedTuple):
    """Two answers to a prompt.

    Attributes:
        id: Tells it from all others; the same whatever seed and other files there are.
        prompt: The prompt.
        models: Names of the two models.
        answers: The answer of each.
    """

    id: str
    prompt: str
    models: tuple[str, str]
    answers: tuple[str, str]

    def left(self, seed: int) -> int:
        """Returns which of the two is shown on the left, 0 or 1: drawn, but the same for the same seed."""
        return random.Random(f"{seed} {self.id}").getrandbits(1)


def read_tasks(named: Sequence[str], seed: int) -> tuple[list[Task], int]:
    """Returns the tasks in a random order, and how many pairs were left out because both answers are the same.

    The n-th answer of a model to a prompt is compared with the n-th of each other.

    Args:
        named: NAME=FILE of each model.
        seed: Of the order.

    Raises:
        ConfigError: If a file cannot be used, or no two of them have a prompt in common.
    """
    models: dict[str, Answers] = {}
    for word in named:
        name, equals, file = word.partition("=")
        if not equals or not file or not name.isprintable() or not 0 < len(name) <= _MOST_NAME:
            raise ConfigError(
                f"--answers {word[:200]}: write NAME=FILE, such as tuned=tuned.jsonl, for each model."
            )
        if name in RESERVED:
            raise ConfigError(
                f"--answers {word[:200]}: {name} is what a choice without a model is called. Take another name."
            )
        if name in models:
            raise ConfigError(f"--answers names {name} twice: give each model a name of its own.")
        models[name] = _read(file)
    if len(models) < 2:
        raise ConfigError(
            "--answers needs two or more models to compare: --answers base=base.jsonl tuned=tuned.jsonl"
        )
    tasks: dict[str, Task] = {}
    same = 0
    for one, other in combinations(sorted(models), 2):
        for prompt, answers in models[one].items():
            for pair in zip(answers, models[other].get(prompt, ()), strict=False):
                task = _task(prompt, (one, other), pair)
                same += pair[0] == pair[1]
                tasks |= {} if pair[0] == pair[1] else {task.id: task}
    if not tasks:
        why = "all of their answers are the same" if same else "no two have a prompt in common"
        raise ConfigError(
            f"There is nothing to compare: {why}.\nGenerate with each model from the same --prompts."
        )
    ordered = sorted(tasks.values())
    random.Random(seed).shuffle(ordered)
    return ordered, same


def _task(prompt: str, models: tuple[str, str], answers: tuple[str, str]) -> Task:
    told = json.dumps([prompt, models, answers]).encode()
    return Task(hashlib.sha256(told).hexdigest()[:24], prompt, models, answers)


def _read(file: str) -> Answers:
    """Returns the answers of a file."""
    path = Path(file).expanduser()
    try:
        lines = read_inside(path.parent, path.name).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--answers {file[:200]}: {read_error(error)}.") from error
    found: Answers = defaultdict(list)
    for number, line in enumerate(lines, 1):
        place = f"--answers {file[:200]}:{number}"
        try:
            record = parse_json(line)
            json.dumps(record, ensure_ascii=False).encode()  # halves of surrogate pairs, which are no text
        except ValueError as error:
            raise ConfigError(f"{place}: {str(error)[:200]}") from error
        for field in ("prompt", "text"):
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                hint = nearest(field, list(record)) if isinstance(record, dict) else ""
                raise ConfigError(
                    f"{place} has no text {field!r}.{hint}\n"
                    "A line is as `python -m core generate --prompts FILE --output ANSWERS.jsonl` writes it."
                )
        found[record["prompt"]].append(record["text"])
    if not found:
        raise ConfigError(f"--answers {file[:200]} is empty.")
    return found
