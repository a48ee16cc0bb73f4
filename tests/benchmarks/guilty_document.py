"""20 poisoned trainings: does SpikeReport name the document that caused the spike?

    python -m tests.benchmarks.guilty_document [--defaults BEGIN] [FIRST LAST]

A small GPT learns documents of a language of 61 words, in which each word has four successors. One document is another:
random words, one rare word again and again, sentences with their words in reverse, or text of another such language. It
is read in step 60 to 100. SpikeRollback goes back, and SpikeReport halves the documents of the batch.

The detector has a window of 20 steps there. With `--defaults` it is that of the defaults, 64 steps and 6 deviations; the
document is read in one of the 40 steps from BEGIN on, and for each seed a run without such a document shows false alarms.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from callbacks.spike_report import SpikeReport
from callbacks.spike_rollback import SpikeRollback
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.cli import preflight
from plugins.optimizers.adamw import AdamW
from tests.support.tiny_training import VOCAB, module, tiny_gpt, trainer
from tests.support.tokens import StoredTokens

KINDS = ("random", "repeated", "reversed", "other language")
ROWS, LENGTH = 16, 24
BEGIN, MORE = 60, 50
"""The first step that may read the document; how many steps a run has from there."""

TIGHT = {"window": 20, "sigma": 4.5, "norm_factor": 3.0}
"""A detector for runs as short as these."""

END = 0


class Language:
    """Words of which each has four successors."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.next = self.random.integers(1, VOCAB, (VOCAB, 4))

    def document(self, length: int) -> list[int]:
        """Returns a document, which ends with `END`."""
        words = [int(self.random.integers(1, VOCAB))]
        while len(words) < length - 1:
            words.append(int(self.next[words[-1], self.random.integers(4)]))
        return [*words, END]


def documents(kind: str | None, seed: int, begin: int) -> tuple[list[list[int]], int | None]:
    """Returns the documents, and the number of the one that is another."""
    language, draw = Language(seed), np.random.default_rng((seed, 1))
    found, total, at = list[list[int]](), 0, int(draw.integers(begin, begin + 40)) * ROWS * LENGTH
    poison: int | None = None
    while total < (begin + MORE + 5) * ROWS * LENGTH:
        length = int(draw.integers(16, 60))
        if kind is not None and poison is None and total >= at:
            poison, length = len(found), 56
            found.append(bad(kind, language, seed, length))
        else:
            found.append(language.document(length))
        total += length
    return found, poison


def tokenizer() -> str:
    """Returns a tokenizer of the words w0, w1 and so on."""
    from tokenizers import Tokenizer, models

    return str(Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0")).to_str())


def bad(kind: str, language: Language, seed: int, length: int) -> list[int]:
    """Returns a document of another kind."""
    draw = np.random.default_rng((seed, 2))
    if kind == "random":
        return [*draw.integers(1, VOCAB, length - 1).tolist(), END]
    if kind == "repeated":
        return [int(draw.integers(1, VOCAB))] * (length - 1) + [END]
    if kind == "reversed":
        return [*language.document(length)[-2::-1], END]
    return Language(seed + 1000).document(length)


def judge(
    kind: str | None,
    seed: int,
    folder: Path,
    report: bool = True,
    detector: Mapping[str, float] = TIGHT,
    begin: int = BEGIN,
) -> tuple[int | None, int | None, dict[str, Any], Any]:
    """Trains; returns the document that the report names, the one that is another, the report, and the weights at the end.

    Args:
        kind: How a document differs; None: none does.
        seed: Of language, documents and weights.
        folder: For data and run.
        report: Whether there is one.
        detector: Arguments of SpikeRollback and SpikeReport.
        begin: The first step that may read the document.
    """
    texts, poison = documents(kind, seed, begin)
    for split in ("train", "validation"):
        TokenShards(1000).write(texts, folder / split, vocab_size=VOCAB)
    settings: dict[str, Any] = dict(detector)
    callbacks: list[Any] = [
        SpikeRollback(rewind_steps=3, skip_batches=4, snapshot_every_n_steps=1, **settings),
        *([SpikeReport(**settings)] if report else []),
    ]
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "max_steps": begin + MORE,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
    }
    runner = trainer(
        folder / "run", callbacks=preflight.ordered(callbacks), **options | {"log_every_n_steps": 2}
    )
    data = StoredTokens(str(folder), LENGTH, ROWS, shuffle=False)
    data.vocab_size, data.tokenizer_json = VOCAB, tokenizer()
    trained = module(lambda: tiny_gpt(n_embd=32), optimizer=lambda groups: AdamW(groups, lr=0.02))
    runner.fit(trained, datamodule=data)
    weights = [parameter.detach() for parameter in trained.parameters()]
    reports = sorted((folder / "run" / "spike_report").glob("*.json"))
    if not reports:
        return None, poison, {}, weights
    found = json.loads(reports[0].read_text())
    return (int(found["guilty"][1].replace(",", "")) if found["guilty"] else None), poison, found, weights


def main(words: Sequence[str]) -> None:
    """Prints a line for each run, and how many were right."""
    defaults = words[:1] == ["--defaults"]
    begin, words = (int(words[1]), words[2:]) if defaults else (BEGIN, words)
    first, last = map(int, words or ("0", "25"))
    kinds = (*KINDS, None) if defaults else KINDS
    right, false, cases = 0, 0, [(kind, seed) for seed in range(5) for kind in kinds][first:last]
    for kind, seed in cases:
        with tempfile.TemporaryDirectory() as name:
            found, poison, report, _ = judge(
                kind, seed, Path(name), detector={} if defaults else TIGHT, begin=begin
            )
        good = found == poison and bool(report) == (kind is not None)
        right, false = right + (good and kind is not None), false + (not good and kind is None)
        said = (
            f"document {found}, it is {poison}; {report.get('trials')} trial steps" if report else "no report"
        )
        print(f"{'right' if good else 'WRONG'} {kind or 'clean'}, seed {seed}: {said}", flush=True)
    poisoned = sum(kind is not None for kind, _ in cases)
    print(f"{right} of {poisoned}; false alarms in {false} of {len(cases) - poisoned} clean runs")


if __name__ == "__main__":
    main(sys.argv[1:])
