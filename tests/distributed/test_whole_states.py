"""A checkpoint of any strategy is that of one process, which goes on from it as if nothing had been."""

import pytest
import torch

from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.checkpoints.shared_memory import separate
from tests.support.same_run import SAVED, STEPS, TOLERANCE, fit, one_process, same_bits, weights_apart

# eps far above the noise of sums in another order, which would decide on the sign of Adam's updates
ADAM = {"model": {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.1, "eps": 0.1}}}}
ALONE = {"trainer": {"strategy": "auto"}}  # what is not written is taken from the checkpoint


def zero(stage, where="none"):
    moved = {"offload_optimizer": where, "offload_parameters": where if stage == 3 else "none"}
    return {"class_path": "DeepSpeedZero", "init_args": {"stage": stage, "persistence_threshold": 0, **moved}}


PIPELINE, TENSOR = (
    {"class_path": "HybridParallel", "init_args": {axis: 2}} for axis in ("pipeline", "tensor")
)


def case(name, strategy, ranks, *marks):
    return pytest.param(strategy, ranks, id=f"{name} on {ranks}", marks=marks)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        case("ZeRO-1", zero(1), 2, pytest.mark.slow),
        case("ZeRO-2", zero(2), 2),
        case("ZeRO-3", zero(3), 2),
        case("ZeRO-3", zero(3), 1, pytest.mark.slow),
        case("ZeRO-3 in the host's memory", zero(3, "cpu"), 2, pytest.mark.slow),
        case("FSDP", {"class_path": "FSDP"}, 2),
        case("tensor", TENSOR, 2),
        case("pipeline", PIPELINE, 2),
        case("DDP", {"class_path": "DDP"}, 2),
    ],
)
def test_one_process_goes_on_from_it_as_if_it_had_been_alone(strategy, ranks):
    source = fit({"trainer": {"strategy": strategy}} | ADAM, ranks)
    assert source.code == 0, source.error_text
    path = source.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    [state] = read_checkpoint(path)["optimizer_states"]
    assert {float(values["step"]) for values in state["state"].values()} == {float(SAVED)}
    assert separate(state) == 0
    found = fit(ALONE | ADAM, 1, f"--ckpt_path={path}", name=f"{source.folder.name} alone")
    assert found.code == 0, found.error_text
    expected = one_process(ADAM)
    assert weights_apart(found, expected) < TOLERANCE
    assert found.record["figures"][str(STEPS)]["train/loss"] == pytest.approx(
        expected.record["figures"][str(STEPS)]["train/loss"], rel=TOLERANCE
    )


def test_a_checkpoint_whose_parameters_share_a_count_of_steps_is_gone_on_from(tmp_path):
    """As DeepSpeedZero wrote them once."""
    expected = one_process(ADAM)
    checkpoint = read_checkpoint(expected.folder / "checkpoints" / f"step-{SAVED}.ckpt")
    [state] = checkpoint["optimizer_states"]
    for values in state["state"].values():
        values["step"] = state["state"][0]["step"]
    torch.save(checkpoint, tmp_path / "shared.ckpt")
    found = fit(ADAM, 1, f"--ckpt_path={tmp_path / 'shared.ckpt'}", name="shared step")
    assert found.code == 0, found.error_text
    assert weights_apart(found, expected) == 0


@pytest.mark.parametrize(
    ("optimizer", "strategy", "plugin"),
    [
        ("pytorch_optimizer.Prodigy", "auto", "AtomicCheckpoint"),
        pytest.param("pytorch_optimizer.AdaBelief", "FSDP", "ShardedCheckpoint", marks=pytest.mark.slow),
        pytest.param("pytorch_optimizer.AdaBelief", "FSDP", "AtomicCheckpoint", marks=pytest.mark.slow),
        pytest.param("ScheduleFreeAdamW", "FSDP", "ShardedCheckpoint", marks=pytest.mark.ci),
        pytest.param("ScheduleFreeAdamW", PIPELINE, "ShardedCheckpoint", marks=pytest.mark.slow),
        pytest.param("ScheduleFreeAdamW", TENSOR, "AtomicCheckpoint", marks=pytest.mark.slow),
        pytest.param("schedulefree.AdamWScheduleFree", "DDP", "AtomicCheckpoint", marks=pytest.mark.slow),
    ],
)
def test_what_an_optimizer_keeps_in_its_groups_goes_on(optimizer, strategy, plugin):
    ranks = 1 if strategy == "auto" else 2
    overlay = {
        "trainer": {"strategy": strategy, "plugins": [plugin]},
        "model": {"optimizer": {"class_path": optimizer, "init_args": {"lr": 0.1}}},
    }
    if optimizer == "ScheduleFreeAdamW":
        overlay["model"]["optimizer"]["init_args"]["eps"] = 0.1  # as ADAM's
    whole = fit(overlay, ranks)
    assert whole.code == 0, whole.error_text
    path = whole.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    resumed = fit(overlay, ranks, f"--ckpt_path={path}", name=f"{whole.folder.name} resumed")
    assert resumed.code == 0, resumed.error_text
    found, expected = resumed.checkpoint(), whole.checkpoint()
    assert {group.get("k", group.get("step")) for group in found["optimizer_states"][0]["param_groups"]} <= {
        STEPS,
        STEPS + 1,
    }
    for part in ("state_dict", "optimizer_states", "weights_in_training"):
        assert same_bits(found.get(part), expected.get(part))
    if optimizer == "ScheduleFreeAdamW":
        alone = one_process({"model": overlay["model"]})
        assert weights_apart(whole, alone) < TOLERANCE
        average, last = (alone.checkpoint()[part] for part in ("state_dict", "weights_in_training"))
        assert not same_bits(average, last)
        for name, weight in last.items():  # of float32, see TOLERANCE
            torch.testing.assert_close(found["weights_in_training"][name], weight, rtol=1e-4, atol=TOLERANCE)
