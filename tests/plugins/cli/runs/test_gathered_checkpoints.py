"""Whether rank 0 may gather a sharded model for a checkpoint of one file is decided before the run."""

import pytest

from conformance.runs import run
from tests.support.launched_ranks import write

LARGE = ["n_embd=4096", "n_layer=16", "n_head=32"]  # 3.2 thousand million parameters, on the meta device


@pytest.mark.parametrize(
    ("plugin", "strategy", "code"),
    [("AtomicCheckpoint", "FSDP", 2), ("ShardedCheckpoint", "FSDP", 0), ("AtomicCheckpoint", "ddp", 0)],
)
def test_a_single_file_of_a_large_sharded_model_is_refused(plugin, strategy, code, tmp_path):
    words = [f"--trainer.strategy={strategy}", f"--trainer.plugins={plugin}", "--trainer.devices=2"]
    words += [f"--model.network.init_args.{size}" for size in LARGE] + ["--trainer.gradient_clip_val=null"]
    done = run(["check", *write(tmp_path), *words], tmp_path, cwd=tmp_path)
    assert done.code == code, done.error_text
    if code:
        assert "AtomicCheckpoint has rank 0 gather the whole model" in done.stderr
        assert "Set ShardedCheckpoint in its place" in done.stderr
        assert "about 39 GB" in done.stderr
