"""The loss of averaged weights where no rank holds them whole."""

import pytest
import torch

from conformance.workshop import workshop
from plugins.checkpoints import sharded
from plugins.checkpoints.checkpoint import read_checkpoint
from tests.support.same_run import STEPS, fit, one_process, same_bits

AVERAGED = {"callbacks": [{"class_path": "ExponentialMovingAverage", "init_args": {"decay": 0.9}}]}


@pytest.mark.parametrize(
    ("strategy", "init_args"),
    [
        pytest.param("FSDP", {"stage": 3}, marks=pytest.mark.slow),
        pytest.param("FSDP", {"stage": 2}, marks=pytest.mark.slow),
        pytest.param("HybridParallel", {"tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_loss_of_the_averages_is_that_of_one_process(strategy, init_args):
    chosen = {"strategy": {"class_path": strategy, "init_args": init_args}}
    found = fit({"trainer": chosen | AVERAGED}, 2)
    assert found.code == 0, found.error_text
    figures, expected = (
        run.record["figures"][str(STEPS)] for run in (found, one_process({"trainer": AVERAGED}))
    )
    # that of the weights, which a block that was gathered before would give, is 1e-2 away
    assert abs(expected["val/ema_loss"] / expected["val/loss"] - 1) > 1e-4
    assert figures["val/ema_loss"] == pytest.approx(expected["val/ema_loss"], rel=1e-6)


@pytest.mark.ci
def test_averages_are_saved_in_shards_and_gone_on_from_whatever_the_form_and_the_ranks():
    """The first rank's part of the checkpoint holds none of them; whole, it is the file that rank 0 gathers."""
    found = {}
    for plugin in ("AtomicCheckpoint", "ShardedCheckpoint"):
        trainer = {"strategy": "FSDP", "plugins": [plugin], **AVERAGED}
        name = f"averages {plugin}"
        done = fit({"trainer": trainer}, 2, name=name, save_at=STEPS // 2)
        assert done.code == 0, done.error_text
        path = workshop() / name / "checkpoints" / f"step-{STEPS // 2}.ckpt"
        found[plugin] = read_checkpoint(path)["callbacks"]["ExponentialMovingAverage"]
        words = [f"--ckpt_path={path}", f"--trainer.default_root_dir={workshop() / name}-on"]
        again = fit({"trainer": trainer}, 2, *words, name=f"{name}-on")
        alone = fit({"trainer": AVERAGED}, 1, *words, name=f"{name}-alone")
        figures = [run.record["figures"][str(STEPS)]["val/ema_loss"] for run in (done, again, alone)]
        assert figures[0] == figures[1]
        assert figures[2] == pytest.approx(figures[0], rel=1e-6)
    assert same_bits(found["AtomicCheckpoint"], found["ShardedCheckpoint"])
    assert all(isinstance(value, torch.Tensor) for value in found["ShardedCheckpoint"]["averages"].values())
    assert sharded.state(path)["callbacks"]["ExponentialMovingAverage"]["averages"] == {}


@pytest.mark.ci
@pytest.mark.parametrize(
    "plugin", ["AtomicCheckpoint", pytest.param("ShardedCheckpoint", marks=pytest.mark.slow)]
)
def test_averages_of_all_stages_of_a_pipeline_are_saved(plugin):
    stages = {"class_path": "HybridParallel", "init_args": {"pipeline": 2}}
    trainer, name = {"strategy": stages, "plugins": [plugin], **AVERAGED}, f"averages of stages {plugin}"
    done = fit({"trainer": trainer}, 2, name=name, save_at=STEPS // 2)
    assert done.code == 0, done.error_text
    path = workshop() / name / "checkpoints" / f"step-{STEPS // 2}.ckpt"
    words = [f"--ckpt_path={path}", f"--trainer.default_root_dir={workshop() / name}-on"]
    again = fit({"trainer": trainer}, 2, *words, name=f"{name}-on")
    figures = [run.record["figures"][str(STEPS)]["val/ema_loss"] for run in (done, again)]
    assert figures[0] == figures[1]
