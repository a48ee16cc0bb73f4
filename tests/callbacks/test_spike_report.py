"""SpikeReport: a poisoned run names the document, and goes on as without the report; the 20 of the benchmark take minutes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from callbacks.spike_report import REQUEST, SpikeReport
from core.errors import ConfigError
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.optimizers.adamw import AdamW
from tests.benchmarks.guilty_document import judge, tokenizer
from tests.support.tiny_training import VOCAB, module, trainer
from tests.support.tokens import StoredTokens


@pytest.mark.ci
def test_a_poisoned_run_names_the_document_and_goes_on_as_without_the_report(tmp_path):
    ends = []
    for reports in (True, False):
        found, poison, _report, weights = judge("random", 0, tmp_path / str(reports), reports)
        ends.append(weights)
        assert found == (poison if reports else None)
    assert all(map(torch.equal, *ends))
    text = next((tmp_path / "True/run/spike_report").glob("*.md")).read_text()
    assert f"**Guilty: document {poison}**" in text
    assert "Training went back to step" in text


@pytest.fixture
def train(tmp_path):
    """Trains some steps on random tokens with a report; returns the reports."""
    for split in ("train", "validation"):
        tokens = np.random.default_rng(0).integers(0, VOCAB, (80, 50)).tolist()
        TokenShards(1000).write(tokens, tmp_path / split, vocab_size=VOCAB)

    def run(**options):
        torch.manual_seed(0)
        runner = trainer(
            tmp_path / "run", callbacks=[SpikeReport(window=100)], max_steps=4, limit_val_batches=0, **options
        )
        data = StoredTokens(str(tmp_path), 12, 4, shuffle=True)
        data.vocab_size, data.tokenizer_json = VOCAB, tokenizer()
        runner.fit(module(optimizer=lambda groups: AdamW(groups, lr=0.01)), datamodule=data)
        return [
            json.loads(path.read_text()) for path in sorted((tmp_path / "run/spike_report").glob("*.json"))
        ]

    return run


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_report_on_request_lists_the_documents_of_the_step(train, tmp_path, micro_batches):
    Path(tmp_path, "run").mkdir()
    Path(tmp_path, "run", REQUEST).touch()
    (report,) = train(
        accumulate_grad_batches=micro_batches, use_distributed_sampler=False, log_every_n_steps=2
    )
    assert report["step"] == 2
    assert report["guilty"] is None  # an ordinary step
    assert not Path(tmp_path, "run", REQUEST).exists()
    lines = (
        next((tmp_path / "run/spike_report").glob("*.md"))
        .read_text()
        .partition("## Documents")[2]
        .splitlines()
    )
    places = [line.split(" | ")[0] for line in lines if line.startswith("| 0")]
    parts = [part for place in places for part in place.split("; ")]
    assert sum(int(part.rpartition("+")[2]) for part in parts) == 4 * 12 * micro_batches
    assert set(report["blocks"]) >= {"embed_tokens", "layers.0", "layers.1"}


def test_mistakes():
    with pytest.raises(ConfigError, match="window >= 2"):
        SpikeReport(window=1)
