"""A rollback on several real gloo ranks is the one of a single process, however weights are spread."""

import json

import pytest

from conformance.case import tiny, with_text
from conformance.runs import run
from conformance.workshop import workshop, write_config
from tests.support.same_run import weights_apart

TOLERANCE = 1e-5
"""Relative, in float32: sums of a few hundred terms in another order (6e-8 each), which 8 steps let grow."""

STEP = 8 * 16
"""Tokens of an optimizer step, of all ranks and micro-batches."""

GUARD = {
    "window": 3, "sigma": 50.0, "rewind_steps": 2, "skip_batches": 5, "snapshot_every_n_steps": 2, "lr_factor": 0.5,
}  # fmt: skip


ON_TWO = {"ranks": 2, "readers": 2}


def start(
    name,
    *words,
    ranks=1,
    readers=1,
    strategy=None,
    last=5,
    gradient=1e4,
    kill_at=None,
    averages=True,
    **guard,
):
    """Trains 8 steps, spoilt from the fifth to the `last`, on `ranks`, of which `readers` have different rows."""
    folder = workshop() / f"rollback-{name}"
    spoilt = {"first": 4 * STEP, "last": last * STEP, "gradient": gradient}
    record, saver = {"folder": str(folder), "kill_at": kill_at}, {"folder": str(folder), "save_at": 4}
    callbacks = [
        {"class_path": "conformance.recorder.Recorder", "init_args": record},
        {"class_path": "tests.support.poison.Poison", "init_args": spoilt},
        {"class_path": "SpikeRollback", "init_args": GUARD | guard},
        *([{"class_path": "ExponentialMovingAverage", "init_args": {"decay": 0.9}}] if averages else []),
        {"class_path": "conformance.recorder.Saver", "init_args": saver},
    ]
    trainer = {
        "devices": ranks, "strategy": strategy or "auto", "default_root_dir": str(folder), "callbacks": callbacks,
        "log_every_n_steps": 2, "accumulate_grad_batches": 2, "limit_train_batches": 1.0,
        "plugins": [{"class_path": "AtomicCheckpoint"}],
    }  # fmt: skip
    network = {"init_args": {"n_layer": 2, "max_sequence_length": 16}}
    data = {"init_args": {"batch_size": 4 // readers}}
    values = with_text(tiny([{"trainer": trainer, "model": {"network": network}, "data": data}]), {})
    return run(["fit", f"--config={write_config(f'rollback-{name}', values)}", *words], folder, ranks=ranks)


def fit(name, *words, **options):
    """Trains; returns the run and what the rollbacks' file tells."""
    done = start(name, *words, **options)
    assert done.code == 0, done.error_text
    return done, json.loads((done.folder / "spike_rollbacks.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def one_process():
    return fit("one-process")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "readers", "init_args", "on_disk"),
    [
        ("DDP", 2, {}, False),
        ("FSDP", 2, {"stage": 3}, True),
        ("FSDP", 2, {"stage": 2}, False),
        ("HybridParallel", 1, {"tensor": 2}, True),
        ("HybridParallel", 1, {"pipeline": 2}, False),
        pytest.param("DeepSpeedZero", 2, {"stage": 2}, False, marks=pytest.mark.slow),
        pytest.param(
            "DeepSpeedZero", 2, {"stage": 3, "persistence_threshold": 0}, True, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else str(value),
)
def test_a_rollback_is_that_of_one_process(name, readers, init_args, on_disk, one_process):
    expected, [rollback] = one_process
    assert (rollback["step"], rollback["seen_at_step"], rollback["rewound_to_step"]) == (5, 6, 2)
    label = "-".join(map(str, (name, *init_args, *init_args.values())))
    strategy = {"class_path": name, "init_args": init_args}
    averages = init_args.get("persistence_threshold") is None  # in ZeRO's stage 3 nothing has full weights
    options = {"readers": readers, "strategy": strategy, "on_disk": on_disk, "averages": averages}
    found, [told] = fit(label, ranks=2, **options)
    assert told == pytest.approx(rollback, rel=TOLERANCE)
    for step, figures in expected.record["figures"].items():
        for figure, value in figures.items():
            if not averages and "ema" in figure:
                continue
            assert found.record["figures"][step][figure] == pytest.approx(value, rel=TOLERANCE), (
                step,
                figure,
            )
    assert weights_apart(found, expected) < TOLERANCE
    if on_disk:
        assert len({path.name.split(".")[1] for path in (found.folder / "snapshots").iterdir()}) == 2


@pytest.mark.ci
def test_when_tries_are_used_up_all_ranks_stop_as_for_other_mistakes():
    done = start("stop", **ON_TWO, strategy={"class_path": "DDP"}, last=99, gradient=float("nan"), retries=2)
    assert done.code == 2
    assert "The run has gone back as often as it may (retries: 2)" in done.error_text
    assert len(json.loads((done.folder / "spike_rollbacks.json").read_text(encoding="utf-8"))) == 2


@pytest.mark.ci
def test_a_resumed_run_takes_up_the_snapshots_of_every_rank():
    options = {**ON_TWO, "strategy": {"class_path": "FSDP"}, "on_disk": True}
    expected, told = fit("whole", **options)
    killed = start("killed", **options, kill_at=5)  # after the spike, before it is seen
    assert killed.code == -9, killed.error_text
    found, again = fit("killed", "--ckpt_path=last", **options)
    assert again == told
    assert found.record["losses"] == expected.record["losses"]
    assert weights_apart(found, expected) == 0
