"""Rows and batches that grow in a real run: closed forms, no token lost or repeated, bitwise resume."""

import json
import math

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback

from callbacks.adaptive_batch_size import AdaptiveBatchSize
from callbacks.batch_size_ramp import BatchSizeRamp
from callbacks.sequence_length_schedule import SequenceLengthSchedule
from core.__main__ import main
from core.errors import ConfigError
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.checkpoints import checkpoint, finding
from tests.conftest import TINY
from tests.support.tiny_training import module, trainer
from tests.support.toy import ToyData
from toolkit.batch_shapes import Shape

FULL = Shape(256, 8, 1)


class Stop(Callback):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.should_stop = True


@pytest.mark.parametrize(
    "options", [{"growth": "doubling", "start": 256}, {"growth": "stages", "stages": [256]}]
)
def test_a_schedule_that_begins_with_full_rows_has_no_others(options):
    schedule = SequenceLengthSchedule(duration=10, intermittent_short=0.5, **options)
    assert {schedule.shape(step, 0, 40, FULL) for step in range(40)} == {FULL}


@pytest.fixture
def fit(tmp_path, monkeypatch, capfd):
    """Trains in this process on tokens that equal their position (8,001 of them)."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tokens"
    for split, count in (("train", 8001), ("validation", 100)):
        TokenShards(1000).write([np.arange(count)], folder / split, vocab_size=1 << 17)
    config = yaml.safe_load(yaml.safe_dump(TINY))
    config["model"]["network"]["init_args"].update(vocab_size=8192, max_sequence_length=32)
    config["trainer"].update(log_every_n_steps=1)
    config["data"] = {"class_path": "tests.support.tokens.StoredTokens", "init_args": {
        "folder": str(folder), "sequence_length": 32, "batch_size": 4, "shuffle": False}}  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))

    monkeypatch.setenv("LEYDEN_TRUST", "tests")

    def run(name, *words, code=0):
        words = ["--trainer.callbacks+=tests.support.shape_schedules.Log", *words]
        found = main(["fit", "--config=tiny.yaml", f"--trainer.default_root_dir={name}", *words])
        run.said = said = capfd.readouterr().err
        assert found == code, said
        return said if code else checkpoint.read_checkpoint(finding.newest(tmp_path / name))

    return run


def steps_of():
    from tests.support.shape_schedules import Log as Logged  # as the run imported it

    return Logged.steps


def trained_on(steps):
    """Returns all labels, in order: each step's micro-batches, each row from left to right."""
    return [label for _, _, labels, _ in steps for label in labels.flatten().tolist()]


# Closed forms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["tokens", "batch"])
def test_linear_growth_is_the_papers(keep):
    schedule = SequenceLengthSchedule(start=8, duration=100, keep=keep)
    for step in range(130):
        found = schedule.shape(step, 0, 1000, FULL)
        paper = min(8 + (256 - 8) * min(step / 100, 1.0), 256)
        assert found.sequence_length == paper // 8 * 8
        assert found.batch_size == (8 * (256 // found.sequence_length) if keep == "tokens" else 8)
    assert schedule.shape(0, 0, 1000, FULL).sequence_length == 8
    assert schedule.shape(99, 0, 1000, FULL).sequence_length < 256
    assert schedule.shape(100, 0, 1000, FULL) == FULL


def test_lengths_of_a_share_of_the_run():
    schedule = SequenceLengthSchedule(start=64, duration=0.5, growth="doubling")
    lengths = [schedule.shape(step, 0, 40, Shape(512, 1, 1)).sequence_length for step in range(40)]
    assert lengths == [64] * 7 + [128] * 7 + [256] * 6 + [512] * 20
    schedule = SequenceLengthSchedule(duration=6, growth="stages", stages=[16, 48])
    lengths = [schedule.shape(step, 0, -1, Shape(64, 1, 1)).sequence_length for step in range(8)]
    assert lengths == [16, 16, 16, 48, 48, 48, 64, 64]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 1.0])
def test_short_rows_come_back_in_their_share(share):
    schedule = SequenceLengthSchedule(start=64, duration=20, growth="doubling", intermittent_short=share)
    later = [schedule.shape(step, 0, 1000, FULL).sequence_length for step in range(20, 1020)]
    short = [length for length in later if length < 256]
    assert len(short) == math.floor(1000 * share)
    assert {*short} == ({64, 128} if share else set())
    assert abs(short.count(64) - short.count(128)) <= 1


def test_the_ramp_is_gpt3s():
    ramp, full = BatchSizeRamp(start=0.01, tokens_until_full=4_000_000), Shape(2048, 8, 195)  # 3.2M tokens
    for tokens in (0, 1_000_000, 2_000_000, 3_999_999):
        found = ramp.shape(0, tokens, -1, full)
        share = 0.01 + 0.99 * tokens / 4_000_000
        assert found.batch_size <= full.batch_size
        assert found.batch_size * found.accumulated == pytest.approx(share * 8 * 195, abs=found.accumulated)
    assert ramp.shape(0, 4_000_000, -1, full) == full


def test_doubling_goes_with_the_square_root_of_two():
    ramp, full = (
        BatchSizeRamp(start=0.125, tokens_until_full=600, growth="doubling", scale_lr=True),
        Shape(16, 4, 4),
    )
    found = [ramp.shape(0, tokens, -1, full) for tokens in (0, 199, 200, 399, 400, 599, 600)]
    assert [shape.batch_size * shape.accumulated for shape in found] == [2, 2, 4, 4, 8, 8, 16]
    assert [ramp.lr_factor(tokens) ** 2 for tokens in (0, 200, 400, 600)] == pytest.approx(
        [0.125, 0.25, 0.5, 1]
    )


# In a run -----------------------------------------------------------------------------------------------

GROWING = ["--trainer.callbacks+=SequenceLengthSchedule", "--trainer.callbacks.start=4", "--trainer.callbacks.duration=8",
           "--trainer.callbacks.multiple=4"]  # fmt: skip
RAMP = ["--trainer.callbacks+=BatchSizeRamp", "--trainer.callbacks.start=0.1", "--trainer.callbacks.tokens_until_full=900",
        "--trainer.callbacks.scale_lr=true", "--trainer.accumulate_grad_batches=4"]  # fmt: skip
NOISE = [1000.0] * 5 + [10.0]
ADAPTIVE = ["--trainer.callbacks+=tests.support.scripted_noise.ScriptedNoise", f"--trainer.callbacks.tokens={NOISE}",
            "--trainer.callbacks+=AdaptiveBatchSize", "--trainer.callbacks.patience=1"]  # fmt: skip
CASES = {
    "growing": [*GROWING, "--trainer.callbacks.intermittent_short=0.5"],
    "growing, as many rows": [*GROWING, "--trainer.callbacks.keep=batch"],
    "doubling, accumulated": [
        *GROWING,
        "--trainer.callbacks.growth=doubling",
        "--trainer.accumulate_grad_batches=2",
    ],
    "ramp": RAMP,
    "ramp, doubling": [*RAMP, "--trainer.callbacks.growth=doubling"],
    "adaptive": ADAPTIVE,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_token_is_lost_or_repeated(name, workers, fit):
    fit("run", *CASES[name], "--trainer.max_steps=12", f"--data.num_workers={workers}")
    steps = steps_of()
    found = trained_on(steps)
    assert found == list(range(1, len(found) + 1))  # over all changes
    shapes = [tuple(ids.shape) for _, ids, _, _ in steps]
    assert len(set(shapes)) >= 3, shapes
    assert all(rows * length <= 4 * 32 for rows, length in shapes)
    assert shapes[-1] == (4, 32) or "intermittent" in " ".join(CASES[name]) or name == "adaptive"


@pytest.mark.ci
@pytest.mark.parametrize("dynamic", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_compiled_network_is_compiled_at_most_once_for_each_length(dynamic, fit, tmp_path):
    """Behind eight graphs torch compiles nothing more, unless it is told to."""
    torch.compiler.reset()
    words = [*GROWING, "--trainer.callbacks.duration=10", "--trainer.callbacks.keep=batch"]
    words += ["--trainer.callbacks+=Compile", "--trainer.callbacks.backend=eager"]
    words += [f"--trainer.callbacks.dynamic={dynamic}", "--trainer.max_steps=12"]
    fit("run", *words, "--data.sequence_length=48", "--model.network.max_sequence_length=48")
    lengths = {ids.shape[1] for _, ids, _, _ in steps_of()}
    graphs = json.loads((tmp_path / "run" / "compile.json").read_text())["graphs"]
    assert len(lengths) > 8
    # dynamic: the first length is the number of rows, too, and taken for the same size
    assert len(graphs) == 2 * (2 if dynamic == "true" else len(lengths))  # of blocks, and of the loss


def tokens_of_steps():
    taken, sizes = 0, []
    for _, ids, _, stepped in steps_of():
        taken += ids.numel()
        if stepped:
            sizes.append(taken)
            taken = 0
    return sizes


def test_the_batch_follows_the_noise_within_its_limits_and_changes_only_where_it_is_far(fit):
    fit("run", *ADAPTIVE, "--trainer.max_steps=14")
    # 1,000 is more than twice 128 and 256 tokens, and not twice 512, the largest of 4 x 128. Two micro-batches a step
    # could begin behind an even number of them; by then four are wanted, behind four. 10 is less than half of 32.
    assert tokens_of_steps() == [128, 128, 128, 128, 512, 512, 256, 128, 64, *[32] * 5]
    assert "AdaptiveBatchSize: 2 times the configured batch after step " in fit.said


def test_a_change_takes_as_many_measurements_in_a_row():
    adaptive = AdaptiveBatchSize(patience=2, scale_lr="linear")
    shares = []
    for ratio in (3.0, 1.5, 3.0, 3.0, None, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4):
        adaptive._decide(ratio)
        shares.append(adaptive.share)
    assert shares == [1, 1, 1, 2, 2, 2, 1, 1, 0.5, 0.5, 0.25]
    assert adaptive.lr_factor(0) == 0.25


def test_what_the_ramp_trains_on_is_what_it_says(fit):
    fit("run", *CASES["ramp, doubling"], "--trainer.max_steps=12")
    sizes = tokens_of_steps()
    assert sizes == sorted(sizes)
    assert sizes[0] == 64  # a tenth of 16 rows
    assert sizes[-1] == 512
    assert {64, 192, 512} <= set(sizes)


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_every_step_can_be_resumed_from(name, fit):
    usual = [*CASES[name], "--model.lr_scheduler=null"]
    whole = fit("whole", *usual, "--trainer.max_steps=12")
    expected = trained_on(steps_of())
    seen = []
    for stop in (3, 5, 12):
        ending = [
            "--trainer.callbacks+=tests.callbacks.test_shape_schedules.Stop",
            f"--trainer.callbacks.step={stop}",
        ]
        resuming = ["--ckpt_path=last"] if stop > 3 else []
        last = fit("parts", *usual, *ending, "--trainer.max_steps=12", *resuming)
        seen += trained_on(steps_of())
    assert seen == expected
    for key, weight in whole["state_dict"].items():
        assert torch.equal(weight, last["state_dict"][key])


# Mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"start": 0}, "at least 1"),
        ({"duration": 1.5}, "share of the run below 1.0"),
        ({"growth": "stages"}, "stages are given"),
        ({"growth": "stages", "stages": [64, 32]}, "stages rise"),
        ({"intermittent_short": 2.0}, "share from 0 to 1"),
    ],
)
def test_mistakes_of_lengths(options, said):
    with pytest.raises(ConfigError, match=said):
        SequenceLengthSchedule(**options)


@pytest.mark.parametrize("options", [{"start": 0.0}, {"start": 2.0}, {"tokens_until_full": -1}])
def test_mistakes_of_the_ramp(options):
    with pytest.raises(ConfigError, match="start above 0 and at most 1"):
        BatchSizeRamp(**options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*GROWING, "--trainer.callbacks.start=64"], "longer than --data.sequence_length=32"),
        ([*GROWING, "--trainer.callbacks.duration=20"], "duration is 20 steps, the run 12"),
        ([*RAMP, "--trainer.callbacks.tokens_until_full=90000"], "and the run has at most 6,144 tokens"),
        (
            [*GROWING, "--trainer.callbacks+=BatchSizeRamp", "--trainer.callbacks.tokens_until_full=9"],
            "exclude each other",
        ),
    ],
)
def test_mistakes_in_a_run(words, said, fit):
    message = fit("run", *words, "--trainer.max_steps=12", code=2)
    assert said in message
    assert len(message.splitlines()) <= 10


def test_rows_that_are_not_of_stored_tokens_are_refused(tmp_path):
    class Reshaped(ToyData):
        def reshape_batches(self, sequence_length, batch_size):
            raise AssertionError("it is not to be asked")

    runner = trainer(tmp_path, callbacks=[SequenceLengthSchedule(start=8, duration=2)], max_steps=2)
    with pytest.raises(ConfigError, match=r"which Reshaped does not read\.\nTrain on"):
        runner.fit(module(), datamodule=Reshaped(vocab_size=61))
