"""What a run prepares for itself is cleaned as configs/defaults.yaml has it, and it says so."""

import json

import pytest

from conformance.runs import run
from tests.support.corpus import texts, write_lines

ARGUMENTS = [
    "--data.tokenizer.vocab_size=300",
    "--trainer.max_steps=1",
    "--trainer.val_check_interval=1",
    "--trainer.limit_val_batches=1",
    "--trainer.callbacks=[]",
    "--model.lr_scheduler=null",
    "--data.sequence_length=16",
    "--model.network={class_path: GPT, init_args: {max_sequence_length: 16, n_layer: 1, n_head: 1, n_embd: 8}}",
]


def prepared_by_fit(folder, *arguments):
    """Returns what a run says, and the manifest of what it prepared."""
    words = ["fit", "--config", "quickstart", f"--data.source={folder / 'notes'}", *ARGUMENTS, *arguments]
    done = run([*words, f"--data.cache_dir={folder / 'cache'}"], folder, cwd=folder)
    assert done.code == 0, done.error_text
    [manifest] = (folder / "cache").glob("*/manifest.json")
    return done.error_text, json.loads(manifest.read_text())


@pytest.fixture
def notes(tmp_path):
    """Sixty documents, the first ten of them twice, one with control characters."""
    documents = texts(60)
    documents[20] += "\x00\x07 and\ttwo  spaces \n"
    write_lines(tmp_path / "notes" / "all.jsonl", documents + documents[:10])
    return tmp_path


def test_a_run_drops_exact_duplicates_and_control_characters(notes):
    said, manifest = prepared_by_fit(notes)
    assert "Cleaned by Normalise, ExactDuplicates: 10 documents dropped. `data.transforms: []`" in said
    assert manifest["train_documents"] + manifest["validation_documents"] == 60
    assert manifest["flow"][0]["bytes"] - manifest["flow"][1]["bytes"] == len("\x00\x07")  # spaces stay


def test_without_transforms_documents_are_taken_as_they_are(notes):
    said, manifest = prepared_by_fit(notes, "--data.transforms=[]")
    assert "Prepared 70 documents" in said
    assert "Cleaned" not in said
    assert manifest["train_documents"] + manifest["validation_documents"] == 70
