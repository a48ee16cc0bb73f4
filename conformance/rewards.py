"""Proofs for rewards: each answer gets a finite number, which depends on this answer alone.

The answers are of every form that a network may give. Their record is the kit's, with the usual fields; a case of a reward
that reads others names a file of records: `Case("Mine", config={"data": {"init_args": {"source": "records.jsonl"}}})`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.case import Case, at
from conformance.proof import proof, require
from conformance.workshop import VARIED
from plugins.cli.configuration.class_paths import qualify
from toolkit.rewards import Reward, Sample, score

RECORD: Mapping[str, Any] = {
    "prompt": "What is 4 + 14?",
    "question": "What is 4 + 14?",
    "answer": "4 and 14 are 18.\n#### 18",
    "label": "18",
    "harmful": False,
    "tests": "assert add(4, 14) == 18",
}
"""The usual fields of a record with a prompt."""

ANSWERS = (
    "",
    " \n",
    "18",
    "4 + 14 = 18.\n#### 18",
    "I cannot help with that.",
    "```python\ndef add(a, b):\n    return a + b\n```",
    "```python\nwhile",
    "a word " * 300,
    *VARIED[:5],
)


def build(case: Case) -> Reward:
    """Builds the reward with the case's arguments, or with those of its example."""
    from jsonargparse import ArgumentParser

    named = selected(case.overlay, (case.entry.name, case.entry.class_path))
    require(named is not None, "its example does not name it at a `class_path`")
    qualify(named)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=Reward)
    return parser.instantiate(parser.parse_object({"reward": named})).reward


def selected(value: Any, names: tuple[str, ...]) -> Any:
    """Returns the part of a configuration that selects a class by one of these names."""
    if isinstance(value, Mapping) and value.get("class_path") in names:
        return dict(value)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((found for item in items if (found := selected(item, names))), None)


def samples(case: Case) -> list[Sample]:
    """Returns answers of every form, with their records."""
    source = at(case.config, "data.init_args.source")
    lines = Path(source).read_text(encoding="utf-8").splitlines() if source else []
    records = [json.loads(line) for line in lines] or [RECORD]
    return [
        Sample(str(record.get("prompt", "")), answer, list(answer.encode()), len(answer) % 3 > 0, record)
        for record in records
        for answer in ANSWERS
    ]


@proof("rewards")
def judges_each_answer_alone(case: Case) -> None:
    """An answer has the same value, to rounding, in whatever company and order, each time, and from a second instance."""
    reward, given = build(case), samples(case)
    usual = score(reward, given).values
    alone = [score(reward, [sample]).values[0] for sample in given]
    reverse = score(reward, given[::-1]).values[::-1]
    again = score(build(case), given).values
    for found, where in ((alone, "alone"), (reverse, "in reverse order"), (again, "from a second instance")):
        for one, other, sample in zip(found, usual, given, strict=True):
            require(
                abs(one - other) <= case.tolerance * max(1.0, abs(other)),
                f"{where}, the answer {sample.answer[:40]!r} has the value {one!r}, not {other!r}",
            )


@proof("rewards")
def has_no_value_without_an_answer(case: Case) -> None:
    """For no samples it returns no values: a rank may have none."""
    score(build(case), [])
