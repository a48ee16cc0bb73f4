"""The quickstart on a GPU, as a user runs it: trained, gone on with, and texts written."""

import json
import re
import shlex

import pytest

from tests.conftest import begun

pytestmark = pytest.mark.gpu

SHORT = ("--trainer.max_steps=60", "--trainer.val_check_interval=30", "--trainer.accelerator=gpu")


@pytest.fixture(
    scope="module",
    params=[(), ("--trainer.precision=bf16-mixed", "--trainer.callbacks+=Compile"), ("--trainer.strategy=fsdp",)],
    ids=["float32", "bf16 and compiled", "FSDP"],
)  # fmt: skip
def quickstart(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, begun(folder, "fit", "--config", "quickstart", *SHORT, *request.param).stdout


def test_the_model_beats_the_unigram_entropy_and_goes_on(quickstart):
    folder, printed = quickstart
    figures = dict(re.findall(r"^(Validation loss|Unigram entropy)\D*([\d.]+)", printed, re.MULTILINE))
    assert float(figures["Validation loss"]) < float(figures["Unigram entropy"]) - 0.3
    _, resume = (line.strip() for line in printed.splitlines() if line.startswith("  python -m core "))
    printed = begun(folder, *shlex.split(resume)[3:-1], "70", "--trainer.limit_val_batches=1").stdout
    assert "From checkpoint: runs/quickstart/checkpoints/step-00000060.ckpt" in printed


def test_texts_are_written_from_it(quickstart):
    folder, _ = quickstart
    (folder / "prompts.txt").write_text("The function\nIf the\n")
    usual = ("generate", "--ckpt_path=last", "--device=cuda", "--max_new_tokens=20", "--seed=1")
    one, two = (begun(folder, *usual, "--prompts=prompts.txt").stdout for _ in range(2))
    assert one == two
    for words in ("--dtype=bfloat16", "--quantize=int8", "--quantize=nf4", "--num_beams=2"):
        texts = [
            json.loads(line)["text"]
            for line in begun(folder, *usual, "--prompts=prompts.txt", words).stdout.splitlines()
        ]
        assert len(texts) == 2, words
        assert all(texts), words
