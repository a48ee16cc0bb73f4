"""Documents to train on."""

import json
import random
from pathlib import Path


def write_documents(folder: Path) -> None:
    folder.mkdir()
    words = random.Random(0)
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        for _ in range(60):
            text = " ".join(words.choice(["alpha", "beta", "gamma", "delta", "epsilon"]) for _ in range(60))
            file.write(json.dumps({"text": text}) + "\n")
