"""Where the kit's runs are made, and the text that they train on."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from plugins.cli.configuration.yaml_texts import dump_yaml

DOCUMENTS = 120
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")  # few: a tokenizer soon has nothing left to merge


@cache
def _holder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="leyden-kit-")  # removed when the interpreter ends


def workshop() -> Path:
    """The folder of all runs of this process."""
    return Path(_holder().name)


@cache
def text() -> Path:
    """The JSON Lines file that runs train on."""
    path = workshop() / "text.jsonl"
    chance = random.Random(0)
    texts = (" ".join(chance.choices(WORDS, k=40)) for _ in range(DOCUMENTS))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


VARIED = (
    "naïve café 北京 🙂",
    "tabs\tand\n\nlines ",
    "<|endoftext|>",
    "a",
    "\u200bno width",
    "ONE LINE ALL CAPITALS",
    "Mixed Case, Digits 1234 5678 and marks !? {} [] <b>bold</b> https://example.org/a?b=c name@example.org",
    "  Leading,\r\ntrailing \u00a0\n\n\n\n",
    "The same line of the text.\n" * 6
    + "Another one, of the same text and with the words that are in most texts.\n",
    "- a bullet\n- a bullet\n* a third ...\nand so on \u2026 \u201cquoted\u201d \u2014 it's",
    "word " * 400,
    "x" * 5000,
)
"""Texts on which options matter: short and long, capitals, digits, marks, blanks, lines that come again."""


@cache
def varied_text() -> Path:
    """A JSON Lines file with such texts between others, and with further fields."""
    path = workshop() / "varied.jsonl"
    texts = [*VARIED, *(" ".join(WORDS[(n * step) % len(WORDS)] for step in range(n + 1)) for n in range(30))]
    lines = (
        {"text": text, "title": f"Title {n}", "source": f"source-{n % 3}", "id": f"number-{n}"}
        for n, text in enumerate(texts)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_config(name: str, values: Mapping[str, Any]) -> Path:
    """Writes a configuration to a file of the workshop."""
    path = workshop() / f"{name}.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    return path
