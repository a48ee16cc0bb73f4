"""On one GPU, where NCCL is the ranks' library: strategies, precisions and sharded checkpoints give one device's run."""

import pytest

from tests.support.same_run import differences, fit, same_bits

pytestmark = pytest.mark.gpu

GPU = ("--trainer.accelerator=gpu", "--trainer.deterministic=warn")
STRICT = ("--trainer.accelerator=gpu", "--trainer.deterministic=true")
NEAR = {"32-true": 1e-4, "bf16-mixed": 2**-4, "16-mixed": 2**-6}
"""Relative, after 4 steps: in float32 what a GPU's kernels differ by, and otherwise rounding to 8 or 11 bits."""

STRATEGIES = {
    "DDP": {"class_path": "DDP"},
    "FSDP 2": {"class_path": "FSDP", "init_args": {"stage": 2}},
    "FSDP 3": {"class_path": "FSDP"},
    "FSDP offload": {"class_path": "FSDP", "init_args": {"offload": True}},
    "HybridParallel": {"class_path": "HybridParallel"},
}
ADAM = {"class_path": "AdamW", "init_args": {"lr": 0.01}}


def overlay(strategy, precision, optimizer=None):
    changed = {"trainer": {"precision": precision}}
    if strategy is not None:
        changed["trainer"]["strategy"] = STRATEGIES[strategy]
    return changed | ({"model": {"optimizer": optimizer}} if optimizer else {})


@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_the_run_of_a_strategy_is_near_that_of_the_cpu(strategy, precision):
    found = fit(overlay(strategy, precision), 1, *GPU, name=f"gpu-{strategy}-{precision}".replace(" ", "-"))
    apart = differences(found, fit(overlay(None, "32-true"), 1))
    assert max(apart.values()) <= NEAR[precision], apart


def test_a_compiled_run_goes_on_bitwise_with_kernels_that_are_compiled_anew(tmp_path):
    def compiled(cache):
        callbacks = [{"class_path": "Compile", "init_args": {"cache": str(tmp_path / cache)}}]
        return overlay(None, "bf16-mixed", ADAM) | {
            "trainer": {"precision": "bf16-mixed", "callbacks": callbacks}
        }

    whole = fit(compiled("whole"), 1, *STRICT, name="gpu-compiled-whole")
    assert whole.code == 0, whole.error_text
    assert fit(compiled("parts"), 1, *STRICT, name="gpu-compiled", kill_at=3).code == -9
    found = fit(compiled("other"), 1, *STRICT, "--ckpt_path=last", name="gpu-compiled")
    assert found.code == 0, found.error_text
    assert found.record["losses"] == whole.record["losses"]
    assert same_bits(found.checkpoint()["state_dict"], whole.checkpoint()["state_dict"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", [None, "FSDP 3", "FSDP offload", "HybridParallel"])
def test_a_killed_run_goes_on_bitwise(strategy, precision):
    values = overlay(strategy, precision, ADAM)
    label = f"gpu-kill-{strategy}-{precision}".replace(" ", "-")
    whole = fit(values, 1, *GPU, name=f"{label}-whole")
    assert whole.code == 0, whole.error_text
    assert fit(values, 1, *GPU, name=label, kill_at=3).code == -9
    found = fit(values, 1, *GPU, "--ckpt_path=last", name=label)
    assert found.code == 0, found.error_text
    assert found.record["losses"] == whole.record["losses"]
    assert same_bits(found.checkpoint()["state_dict"], whole.checkpoint()["state_dict"])
