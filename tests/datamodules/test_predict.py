"""The command `predict` on stored tokens, whatever the packing."""

import re

import pytest
from safetensors.torch import load_file

from core.__main__ import main
from tests.support.corpus import corpus, prepare
from toolkit.prepared import read_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    return prepare(corpus(folder / "source", documents=60), folder / "out")


@pytest.mark.parametrize(
    ("packing", "per_document"),
    [
        pytest.param("PaddedDocuments", 1, marks=pytest.mark.ci),
        ("BestFit", 1),
        pytest.param("Concatenate", 0, marks=pytest.mark.ci),
    ],
)
def test_every_label_has_the_log_probability_that_validate_averages(
    folder, tiny, write_yaml, tmp_path, capsys, packing, per_document
):
    stages = {
        "reader": "TextDocuments",
        "tokenizer": "BPETokenizer",
        "writer": "TokenShards",
        "packing": packing,
    }
    options = {"source": str(folder), "sequence_length": 160, "batch_size": 3, **stages}
    tiny["data"] = {"class_path": "PretrainDataModule", "init_args": options}
    tiny["trainer"] |= {"default_root_dir": str(tmp_path / "run"), "max_steps": 3, "limit_val_batches": 0}
    tiny["model"]["network"]["init_args"] |= {"vocab_size": 320, "max_sequence_length": 160}
    config = f"--config={write_yaml('run.yaml', tiny)}"
    assert main(["fit", config]) == 0
    checkpoint = ["--ckpt_path", str(tmp_path / "run")]
    assert main(["validate", config, *checkpoint, "--trainer.limit_val_batches=1.0"]) == 0
    [loss] = re.findall(r"val/loss\W+([\d.]+)", capsys.readouterr().out)
    assert main(["predict", config, *checkpoint]) == 0
    rows = load_file(tmp_path / "run" / "predictions.safetensors")["log_probability_nats"]
    manifest = read_manifest(folder)
    labels = manifest["validation_tokens"] - (manifest["validation_documents"] if per_document else 1)
    assert f"Log-probabilities of {labels:,} labels" in capsys.readouterr().out
    assert int((rows != 0).sum()) == labels
    assert -rows.sum().item() / labels == pytest.approx(float(loss), rel=1e-5)  # as many digits are printed
