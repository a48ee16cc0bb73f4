"""DeepSpeedZero beyond the table: formats, checkpoints, what else touches gradients, refusals."""

import json
import math
import re
from copy import deepcopy
from functools import cache

import pytest

from conformance.runs import run
from conformance.workshop import workshop, write_config
from core.__main__ import main
from core.errors import ConfigError
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.checkpoints.finding import resolve
from plugins.cli import preflight, selection
from plugins.cli.configuration.config_files import merge
from tests.support.same_run import (
    CLIP,
    CONFIG,
    SAVED,
    STEPS,
    TOLERANCE,
    differences,
    fit,
    one_process,
    same_bits,
    weights_apart,
)
from tests.support.shapes import shapes
from toolkit.selection import Run

ADAM = {"model": {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}}}}
ALL_OFF = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
NOTHING_OFF = {"offload_optimizer": "none", "offload_parameters": "none"}
AT_ONCE = {"class_path": "ShardedCheckpoint", "init_args": {"asynchronous": False}}
ALONE = {"trainer": {"strategy": "auto"}}  # what is not written is taken from the checkpoint


def zero(stage=3, more=None, **init_args):
    default = {"stage": stage, "persistence_threshold": 0}
    return {
        "trainer": {"strategy": {"class_path": "DeepSpeedZero", "init_args": default | init_args}}
        | (more or {})
    }


def done(overlay, ranks, *words, **named):
    """Returns a run that was not to fail."""
    found = fit(overlay, ranks, *words, **named)
    assert found.code == 0, found.error_text
    return found


@cache
def _at_once(text, ranks):
    return done(json.loads(text), ranks)


def whole_run(overlay, ranks):
    """Returns a run without a stop, which tests share."""
    return _at_once(json.dumps(overlay), ranks)


@pytest.fixture(scope="module")
def whole():
    return whole_run(zero(3, **ALL_OFF) | ADAM, 2)


# -- checkpoints -------------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_checkpoint_is_that_of_a_single_process(whole):
    one, other = whole.checkpoint(), one_process(ADAM).checkpoint()
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert repr(shapes(one[part])) == repr(shapes(other[part]))


@pytest.mark.parametrize(
    "stage", [pytest.param(3, marks=pytest.mark.ci), pytest.param(2, marks=pytest.mark.slow)]
)
def test_it_begins_with_the_weights_of_one_process(stage):
    still = {"model": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.0}}}}
    found, expected = done(zero(stage) | still, 2), one_process(still)
    assert "rank 0 initialises" not in found.stderr
    assert same_bits(found.checkpoint()["state_dict"], expected.checkpoint()["state_dict"])


@pytest.mark.ci
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_that_get_the_weights_have_no_copy_on_the_host(stage):
    """Where the device is no host, theirs would be converted there, and sent to the device, for nothing."""
    counted = {"trainer": {"callbacks": ["tests.support.rounded.RoundsOnRankZero"]}}
    done(merge(zero(stage, {"precision": "bf16-mixed"}), counted), 2)


@pytest.mark.ci
def test_it_goes_on_from_a_checkpoint_of_one_process():
    expected = one_process({})
    source = expected.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    assert weights_apart(done(zero(3), 2, f"--ckpt_path={source}", name="one-to-zero"), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("overlay", "ranks"),
    [
        pytest.param(zero(3, **ALL_OFF) | ADAM, 2, marks=pytest.mark.ci),
        pytest.param(zero(2, {"precision": "bf16-mixed"}) | ADAM, 2, marks=pytest.mark.slow),
        pytest.param(zero(3, {"precision": "bf16-mixed"}, **ALL_OFF) | ADAM, 1, marks=pytest.mark.slow),
        pytest.param(zero(1) | ADAM, 4, marks=pytest.mark.slow),
        pytest.param(zero(3, {"plugins": [AT_ONCE]}) | ADAM, 4, marks=pytest.mark.slow),
    ],
    ids=["stage 3", "bf16", "bf16, stage 3", "stage 1 on 4", "sharded on 4"],
)
def test_killed_and_resumed_it_is_bitwise_the_same(overlay, ranks):
    expected = whole_run(overlay, ranks)
    name = f"killed {expected.folder.name}"
    assert fit(overlay, ranks, kill_at=3, name=name).code == -9
    path = workshop() / name / "checkpoints" / f"step-{SAVED}.ckpt"
    found = done(overlay, ranks, f"--ckpt_path={path}", name=f"{name} resumed").checkpoint()
    for part in ("state_dict", "optimizer_states"):
        assert same_bits(found[part], expected.checkpoint()[part])


@pytest.mark.ci
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_validate_computes_what_the_run_did(whole, stage):
    path = whole.folder / "checkpoints" / f"step-{STEPS}.ckpt"
    config = write_config("validate", merge(deepcopy(CONFIG), zero(stage, **NOTHING_OFF)))
    words = [f"--config={config}", f"--ckpt_path={path}", "--trainer.devices=2"]
    found = run(["validate", *words], whole.folder, ranks=2)
    assert found.code == 0, found.error_text
    expected = whole.record["figures"][str(STEPS)]["val/loss"]
    assert float(re.search(r"val/loss\D+([\d.]+)", found.stdout)[1]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.ci
def test_a_folder_of_parts_is_consolidated_and_gone_on_from(tmp_path):
    first = done(zero(3, {"plugins": ["ShardedCheckpoint"]}) | ADAM, 2)
    parts, whole = first.folder / "checkpoints" / f"step-{SAVED}.ckpt", tmp_path / "whole.ckpt"
    assert {path.name[:4] for path in parts.glob("*.distcp")} == {"__0_", "__1_"}
    assert main(["consolidate", str(parts), str(whole)]) == 0
    alone = {"trainer": {"strategy": "auto", "plugins": ["AtomicCheckpoint"]}}
    second = done(alone | ADAM, 1, f"--ckpt_path={whole}", name="consolidated")
    losses = [[found.record["figures"][step]["train/loss"] for step in "34"] for found in (first, second)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)  # Adam makes 1e-7 larger


def test_what_deepspeed_itself_wrote_is_not_read(tmp_path):
    (tmp_path / "zero_to_fp32.py").touch()
    with pytest.raises(ConfigError, match="written by DeepSpeed itself, as pickles, which may run code"):
        resolve(str(tmp_path), tmp_path)


# -- formats -----------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("overlay", [zero(2), zero(3)], ids=["stage 2", "stage 3"])
def test_bfloat16_rounds_as_it_should_and_the_optimizers_weights_are_float32(overlay):
    found = done(merge(deepcopy(overlay), {"trainer": {"precision": "bf16-mixed"}}), 2)
    apart = differences(found, one_process({}))
    assert 2**-13 < apart["gradient norm"] < 2**-5, (
        apart
    )  # all of the network rounds to 2^-9, not its blocks alone
    weight = found.checkpoint()["state_dict"]["network.layers.0.mlp.up_proj.weight"]
    assert not same_bits(weight, weight.bfloat16().float())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("init_args", [{"stage": 2}, {"stage": 3}, {"stage": 3, **ALL_OFF}], ids=str)
def test_on_a_gpu_it_is_near_the_cpu(precision, init_args):
    on_gpu = {"accelerator": "gpu", "precision": precision}
    apart = differences(done(zero(more=on_gpu, **init_args), 1), one_process({}))
    assert max(apart.values()) < {"16-mixed": 2**-6, "bf16-mixed": 2**-4, "32-true": 1e-4}[precision], apart


# -- what touches gradients and weights ------------------------------------------------------------------


CLIPPED = {
    "gradient_clip_val": None,
    "callbacks": [{"class_path": "GradientClip", "init_args": {"limit": CLIP}}],
}


@pytest.mark.parametrize(
    "init_args",
    [
        pytest.param({}, marks=pytest.mark.slow),  # what the other one does in its first steps
        pytest.param({"method": "adaptive", "warmup_steps": 3, "z": 0.5}, marks=pytest.mark.ci),
        pytest.param({"method": "value", "limit": CLIP / 100}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_clipped_by_a_callback(init_args):
    clip = {"class_path": "GradientClip", "init_args": {"limit": CLIP} | init_args}
    more = {"gradient_clip_val": None, "callbacks": [clip]}
    apart = differences(done(zero(3, more), 2), one_process({"trainer": more}))
    assert max(apart.values()) <= TOLERANCE, apart


@pytest.mark.ci
def test_callbacks_are_told_of_backward_passes():
    counted = {"trainer": {"callbacks": [{"class_path": "tests.support.counting.BackwardHooks"}]}}
    found = [re.search(r"BACKWARD_HOOKS (\d+) (\d+)", run.stdout) for run in
             (done(zero(1, counted["trainer"]), 1, name="counted"), done(counted, 1, name="counted-alone"))]  # fmt: skip
    assert found[0].groups() == found[1].groups()
    assert int(found[0][1]) > 0


@pytest.mark.ci
def test_weights_are_averaged_in_stage_2():
    more = {"callbacks": [{"class_path": "ExponentialMovingAverage", "init_args": {"decay": 0.9}}]}
    found, expected = (
        r.record["figures"][str(STEPS)]["val/ema_loss"]
        for r in (done(zero(2, more), 2), one_process({"trainer": more}))
    )
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("more", "init_args"),
    [
        ({}, {"stage": 1}),
        pytest.param({}, {"stage": 2, "offload_optimizer": "cpu"}, marks=pytest.mark.slow),
        (CLIPPED, {"stage": 3}),
    ],
    ids=str,
)
def test_steps_whose_gradients_are_not_finite_change_nothing(more, init_args):
    poison = {"class_path": "tests.support.poisoned_ranks.PoisonedSteps", "init_args": {"start": SAVED + 1}}
    more = merge(deepcopy(more), {"callbacks": [poison, *more.get("callbacks", [])]})
    found = done(zero(more=more, **init_args), 2)
    before, after = (
        read_checkpoint(found.folder / "checkpoints" / f"step-{step}.ckpt") for step in (SAVED, STEPS)
    )
    assert same_bits(after["state_dict"], before["state_dict"])
    states = [saved["optimizer_states"][0]["state"] for saved in (after, before)]
    assert states[0]
    assert same_bits(*states)
    norms = [figures["train/grad_norm"] for figures in found.record["figures"].values()]
    assert [math.isinf(norm) for norm in norms] == [False] * SAVED + [True] * (STEPS - SAVED)


@pytest.mark.parametrize(
    "init_args",
    [
        pytest.param({"stage": 1}, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "offload_optimizer": "cpu"}, marks=pytest.mark.slow),
        pytest.param({"stage": 3}, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_a_step_that_is_not_finite_is_repeated_and_named_as_in_one_process(init_args):
    poison = {"class_path": "tests.support.poisoned_ranks.PoisonedSteps", "init_args": {"start": STEPS - 1}}
    more = {"callbacks": [poison, {"class_path": "NonFiniteGuard"}], "log_every_n_steps": STEPS}
    found, expected = fit(zero(more=more, **init_args), 2), fit({"trainer": more}, 1)
    told = [
        re.search(
            r"NonFiniteGuard: in step 3 .*, the gradient norm (\w+)\. First found: ([^,]+)", one.error_text
        )
        for one in (found, expected)
    ]
    assert found.code == expected.code == 2, found.error_text
    assert told[0][2] == told[1][2], found.error_text
    assert "going backward" in told[0][2]
    assert told[0][1] == "inf"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_an_outlier_is_dropped_as_in_one_process(stage):
    more = {"callbacks": [{"class_path": "SkipStep", "init_args": {"window": 2, "sigma": 1e-3}}]}
    sgd = {"model": {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.5, "momentum": 0.9}}}}
    found, expected = done(zero(stage, more) | sgd, 2), one_process({"trainer": more} | sgd)
    skipped = [each.checkpoint()["callbacks"]["SkipStep"]["skipped"] for each in (found, expected)]
    assert skipped[0] == skipped[1] > 0
    assert weights_apart(found, expected) < TOLERANCE


@pytest.mark.slow  # a minute of compiling
def test_deepspeeds_own_adam_steps_where_it_is_named():
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()  # for the runs below, which have less time
    values = {"lr": 0.01, "weight_decay": 0.1}
    own, torchs = (
        {"model": {"optimizer": {"class_path": name, "init_args": values}}}
        for name in ("deepspeed.ops.adam.DeepSpeedCPUAdam", "torch.optim.AdamW")
    )
    found = done(zero(2, offload_optimizer="cpu") | own, 1)
    assert "DeepSpeedCPUAdam" in found.stdout
    apart = differences(found, one_process(torchs))
    assert max(apart["loss"], apart["gradient norm"]) < 1e-4, apart  # Adam makes 1e-7 larger


@pytest.mark.slow  # some minutes of compiling
def test_on_nvme_it_is_bitwise_what_it_is_in_memory(tmp_path):
    import deepspeed

    if not deepspeed.ops.__compatible_ops__.get("async_io"):
        pytest.skip("libaio is not here")
    wide = {
        "model": {**ADAM["model"], "network": {"init_args": {"n_embd": 192}}}
    }  # under 1 MiB nothing is moved
    expected = done(zero(3, **ALL_OFF) | wide, 1)
    on_disk = zero(3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path=str(tmp_path)) | wide
    first = done(on_disk, 1)
    path = first.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    second = done(on_disk, 1, f"--ckpt_path={path}", name="resumed from nvme")
    assert any(path.is_file() for path in tmp_path.rglob("*"))
    for found in (first, second):
        for part in ("state_dict", "optimizer_states"):
            assert same_bits(found.checkpoint()[part], expected.checkpoint()[part])


# -- refusals ----------------------------------------------------------------------------------------

REFUSED = [
    (
        zero(2, {"precision": "16-mixed"}, offload_parameters="nvme", offload_optimizer="nvme"),
        {"model": {"optimizer": {"class_path": "Muon", "init_args": {"lr": 0.1}}}},
        [
            "offload_parameters is nvme, and stage 2 keeps full parameters on the device: set stage to 3",
            "offload_optimizer is nvme, which needs stage 3, not 2",
            "nvme_path is missing: name a folder on the NVMe disk",
            "Muon (refused.yaml:",
            "cannot step flat partitions of many weights, as ZeRO has them: take AdamW, SGD, or deepspeed.ops.adam",
            "precision 16-mixed (refused.yaml:",
            "is not supported by DeepSpeed on a CPU: take bf16-mixed or 32-true",
        ],
    ),
    (
        zero(
            3,
            {"gradient_clip_algorithm": "value", "callbacks": ["WeightMonitor", "ExponentialMovingAverage"]},
            offload_optimizer="nvme",
        ),
        ADAM,
        [
            "keeps the optimizer's weights of a step, which are on the disk: set offload_optimizer to cpu",
            "trainer.gradient_clip_algorithm value clips single values of gradients, which are on the disk",
            "averages full weights in float32, which the network only has in stages 1 and 2",
        ],
    ),
    (
        zero(1, {"precision": "bf16-mixed"}),
        {"model": {"optimizer": {"class_path": "AdamW8bit", "init_args": {"lr": 0.1}}}},
        ["stage 1 would sum gradients in bfloat16", "AdamW8bit (refused.yaml:"],
    ),
    (zero(2, {"precision": "bf16-true"}), {}, ["is not supported by DeepSpeed: take 32-true or bf16-mixed"]),
    (zero(2, {"plugins": [{"class_path": "Float8"}]}), {}, ["and DeepSpeed both change the format of weights"]),
    (zero(4), {}, ["stage", "4"]),
    (zero(3, offload_parameters="disk"), {}, ["disk", "nvme"]),
]  # fmt: skip


@pytest.mark.parametrize(("overlay", "more", "messages"), REFUSED, ids=lambda value: str(value)[-40:])
def test_what_does_not_fit_is_refused_before_a_process_starts(overlay, more, messages):
    values = merge(merge(deepcopy(CONFIG), deepcopy(overlay)), deepcopy(more))
    values["trainer"] |= {"devices": 2}
    found = run(["check", f"--config={write_config('refused', values)}"], workshop())
    assert found.code == 2
    errors = (workshop() / "output.0.err").read_text()
    assert [line for line in messages if line not in errors] == [], errors
    assert len(errors.splitlines()) <= 10


def test_lightnings_own_strategy_is_refused():
    values = merge(deepcopy(CONFIG), {"trainer": {"strategy": "deepspeed_stage_2"}})
    found = run(["check", f"--config={write_config('lightnings', values)}"], workshop())
    assert found.code == 2
    assert "take --trainer.strategy=DeepSpeedZero" in found.error_text


@pytest.mark.ci
def test_nvme_says_what_is_missing_here(tmp_path):
    import deepspeed

    if deepspeed.ops.__compatible_ops__.get("async_io"):
        pytest.skip("libaio is here")
    values = merge(deepcopy(CONFIG), zero(3, offload_optimizer="nvme", nvme_path=str(tmp_path / "fast")))
    (tmp_path / "fats").mkdir()
    found = run(["check", f"--config={write_config('nvme', values)}"], workshop())
    assert found.code == 2
    assert f"nvme_path is {tmp_path}/fast, which is not a folder. Did you mean fats?" in found.error_text
    assert (
        "nvme needs libaio, whose library and headers are not found: apt install libaio-dev"
        in found.error_text
    )


def test_without_a_compiler_what_would_be_compiled_is_refused():
    own = {"class_path": "deepspeed.ops.adam.DeepSpeedCPUAdam", "init_args": {"lr": 0.01}}
    values = merge(deepcopy(CONFIG), {**zero(2, offload_optimizer="cpu"), "model": {"optimizer": own}})
    words = ["check", f"--config={write_config('compiler', values)}"]
    found = run(words, workshop(), environments=[{"CXX": "no-such-compiler"}])
    assert found.code == 2
    assert "there is no C++ compiler (no-such-compiler): apt install g++, or take AdamW" in found.stderr
    assert len(found.stderr.splitlines()) <= 10


def test_without_deepspeed_the_pip_line_is_told(monkeypatch):
    from importlib import metadata

    from plugins.strategies.deepspeed_zero import DeepSpeedZero

    real = metadata.version

    def without(name):
        if name == "deepspeed":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without)
    path = "plugins.strategies.deepspeed_zero.DeepSpeedZero"
    chosen = selection.describe("trainer.strategy", DeepSpeedZero, path)
    with pytest.raises(
        ConfigError, match=re.escape("deepspeed is not installed: pip install 'leyden[deepspeed]'")
    ):
        preflight.check(Run([chosen]))
