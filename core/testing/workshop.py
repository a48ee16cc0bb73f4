"""Where the kit's runs are made, and the text that they train on."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from core.configuration.config_files import dump_yaml

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


def write_config(name: str, values: Mapping[str, Any]) -> Path:
    """Writes a configuration to a file of the workshop."""
    path = workshop() / f"{name}.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    return path
