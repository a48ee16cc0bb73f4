"""TrainingDoctor and the command `doctor`: on real runs, through the command line; what is measured of networks and gradients."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, EarlyStopping

from callbacks.batch_size_ramp import BatchSizeRamp
from callbacks.training_doctor import TrainingDoctor
from core.errors import ConfigError
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.optimizers.adamw import AdamW
from tests.faults.recipes import recipe
from tests.faults.running import composed, train
from tests.support.cli_runs import core  # noqa: F401
from tests.support.same_run import fit as same_run
from tests.support.tiny_training import Record, fit, module, tiny_gpt, trainer, uneven_batches
from tests.support.tokens import StoredTokens
from toolkit.diagnosis.gradient_probes import OptimizerState
from toolkit.diagnosis.network_probes import (
    backward_gains,
    coarse_share,
    inner_state,
    visibility,
    weights_at_start,
)
from toolkit.diagnosis.probes import first_tokens


def test_it_says_what_is_wrong_and_writes_what_to_do(core, tmp_path):  # noqa: F811
    """A rate a thousand times too high, from the command line to the remedy, which is laid over the config again."""
    wrong = ["--trainer.callbacks+=TrainingDoctor", "--model.optimizer=AdamW", "--model.optimizer.lr=5.0"]
    done = core(
        "fit", "--config", "tiny", *wrong, "--trainer.logger=MetricsCSV", "--trainer.log_every_n_steps=1"
    )
    assert done.code == 0, done.err
    [line] = [line for line in done.err.splitlines() if "rate too high" in line]
    assert line.startswith("TrainingDoctor: rate too high since step 1 (")
    remedy = tmp_path / "runs/tiny/doctor/remedy-rate_too_high.yaml"
    rate = yaml.safe_load(remedy.read_text())["model"]["optimizer"]["init_args"]["lr"]
    assert 1e-4 < rate < 0.05
    found = [json.loads(one) for one in (remedy.parent / "findings.jsonl").read_text().splitlines()]
    assert (found[0]["cause"], found[0]["since"]) == ("rate_too_high", 1)
    assert f"{found[0]['evidence']}. {found[0]['advice']}." in line
    remedy.replace(tmp_path / "remedy.yaml")
    again = core("doctor", "runs/tiny")
    assert again.code == 0, again.err
    assert line.removeprefix("TrainingDoctor: ") in again.out.splitlines()
    assert f"  --config {remedy.relative_to(tmp_path)}" in again.out.splitlines()
    checked = core("check", "--config", "tiny", *wrong[:2], "--config", str(remedy))
    assert checked.code == 0, checked.err
    none = core("doctor", "runs/tiny", "--least_confidence", "1")
    assert (none.code, none.out.startswith("Nothing is wrong")) == (0, True), none.err
    assert (remedy.parent / "findings.jsonl").read_text() == ""  # `watch` shows what the last look found
    assert not remedy.exists()
    mistaken = core("doctor", "runs/tiny", "--least_confidence", "60")
    assert (mistaken.code, mistaken.out) == (2, "")
    assert "--least_confidence 60 must be from 0 to 1" in mistaken.err
    mistaken = core("doctor", "runs/tin")
    assert (mistaken.code, mistaken.out) == (2, "")
    assert "There is no run folder runs/tin. Did you mean runs/tiny?" in mistaken.err


@pytest.mark.ci
def test_a_part_of_others_is_compared_with_leydens_own(core, tmp_path):  # noqa: F811
    """A callback that turns the sign of the z-loss: the loss is not that of the configured objective."""
    item = "{class_path: tests.faults.broken_models.RewardedLogits, init_args: {coefficient: 0.1}}"
    more = ["--trainer.callbacks+=TrainingDoctor", f"--trainer.callbacks+={item}", "--trust", "tests"]
    done = core("fit", "--config", "tiny", *more, "--trainer.log_every_n_steps=1")
    assert done.code == 0, done.err
    assert "TrainingDoctor: logit growth since step 1 (96%): the loss is not that of leyden's" in done.err
    remedy = tmp_path / "runs/tiny/doctor/remedy-logit_growth.yaml"
    taken_out = {"tests.faults.broken_models.RewardedLogits": None}
    assert yaml.safe_load(remedy.read_text()) == {"trainer": {"callbacks": taken_out}}


def examined(tmp_path, *others, **options):
    doctor = TrainingDoctor(every_n_steps=2)
    trained = module(tiny_gpt, optimizer=lambda groups: AdamW(groups, lr=1e-3))
    fit(tmp_path, trained, uneven_batches(8), [*others, doctor], max_epochs=1, **options)
    return doctor


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.01}])
def test_gradients_are_those_of_the_loss(options, tmp_path):
    """Computed again, with another order of sums: to float32's rounding."""
    doctor = examined(tmp_path, **options)
    for name in ("ratio", "cosine"):
        values = doctor.history.series(f"doctor/gradient_{name}").values
        assert len(values) >= 3
        torch.testing.assert_close(
            torch.tensor(values), torch.ones(len(values)).double(), rtol=1e-5, atol=1e-5
        )
    # a sum that cancels may be 0 in one order alone
    assert doctor.history.series("doctor/gradients_lost").values.max() < 1e-3
    assert not doctor.history.series("doctor/weights_unchanged").values.any()
    assert not doctor.history.series("doctor/optimizer_steps_behind").values.any()


@pytest.mark.parametrize(("kind", "told"), [(Callback, [3]), (EarlyStopping, [])])
def test_a_run_that_is_ended_is_told_unless_a_kind_of_early_stopping_is_there(kind, told, tmp_path):
    class Stops(kind):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop |= trainer.global_step == 3

    stops = Stops() if kind is Callback else Stops(monitor="val/loss", strict=False)
    doctor = examined(tmp_path, stops, max_steps=8)
    assert doctor.history.series("doctor/ended_at").values.tolist() == told


def test_training_is_bitwise_the_same(tmp_path):
    weights = []
    for callbacks in ([], [TrainingDoctor(every_n_steps=1)]):
        trained = module(lambda: tiny_gpt(dropout=0.3))
        fit(tmp_path, trained, uneven_batches(6), callbacks, max_epochs=1)
        weights.append([p.detach().clone() for p in trained.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


class OwnPosition(StoredTokens):
    """Its training rows go on from where they were read last, whatever the cursor is."""

    def packed(self, split, **order):
        batches = super().packed(split, **order)
        take, own = batches.take, [batches.cursor]

        def taken(cursor, count):
            rows, own[0] = take(own[0], count)
            return rows, own[0]

        if split == "train":
            batches.take = taken
        return batches


def test_a_packing_that_keeps_a_position_of_its_own_is_not_moved(tmp_path):
    tokens = np.random.default_rng(0).integers(1, 61, 4000)
    for split in ("train", "validation"):
        TokenShards(1000).write([tokens], tmp_path / split, vocab_size=61)
    losses = []
    for callbacks in ([], [TrainingDoctor(batches=2)]):
        record = Record()
        torch.manual_seed(0)
        runner = trainer(tmp_path, callbacks=[record, *callbacks], max_steps=3, limit_val_batches=0)
        runner.fit(module(), datamodule=OwnPosition(str(tmp_path), 12, 4, shuffle=True, vocab_size=61))
        losses.append([figures["train/loss"] for figures in record.figures])
    assert callbacks[0].history.last_step == 3
    assert losses[0] == losses[1]


def test_rows_are_those_of_the_step_where_a_schedule_doubles_the_batch(tmp_path):
    tokens = np.random.default_rng(0).integers(1, 61, 4000)
    for split in ("train", "validation"):
        TokenShards(1000).write([tokens], tmp_path / split, vocab_size=61)
    ramp = BatchSizeRamp(0.125, 12 * 12, growth="doubling")
    doctor = TrainingDoctor(every_n_steps=1, batches=2)
    runner = trainer(tmp_path, callbacks=[ramp, doctor], max_steps=16, limit_val_batches=0)
    runner.fit(module(), datamodule=StoredTokens(str(tmp_path), 12, 8, shuffle=True, vocab_size=61))
    given = doctor.history.series("doctor/rows_given").values
    assert runner.datamodule.training_loader.batch_size == 8  # it began with 1
    assert given.tolist() == [1.0] * 16
    assert not doctor._probes._buffers  # of examined steps nothing stays


def test_long_rows_are_cut_before_the_network_is_examined():
    ids = torch.arange(6 * 3000).view(6, 3000)
    cut = first_tokens({"input_ids": ids, "labels": ids + 1, "row": torch.arange(6)})
    assert torch.equal(cut["input_ids"], ids[:4, :1024])
    assert torch.equal(cut["labels"], ids[:4, :1024] + 1)
    assert cut["row"].tolist() == [0, 1, 2, 3]


def test_time_of_a_validation_is_none_of_checkpoints(monkeypatch):
    """A checkpoint that takes 1 s before a validation of 8 s, of 10 s in all."""
    now, logged = [0.0], {}
    doctor, runner = TrainingDoctor(), SimpleNamespace(global_step=1, log_every_n_steps=5)
    monkeypatch.setattr("callbacks.training_doctor.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "callbacks.training_doctor.log_figures", lambda trainer, values: logged.update(values)
    )
    nothing = dict.fromkeys(("pause", "begin_batch"), lambda *_: None)
    lists = dict.fromkeys(("sizes", "kept_state"), lambda *_: [])
    monkeypatch.setattr(doctor, "_probes", SimpleNamespace(**nothing, **lists))
    now[0] = 1.0
    doctor.on_save_checkpoint(runner, None, {})
    now[0] = 2.0
    doctor.on_validation_start(runner, None)
    now[0] = 10.0
    doctor.on_train_batch_start(runner, None, None, 0)
    assert logged == {"time/checkpoint_share": 0.1}


def test_what_a_network_sees_is_measured():
    torch.manual_seed(0)
    network = tiny_gpt(position="rotary").eval()
    [batch] = uneven_batches(1)
    assert not any(visibility(network, batch).values())
    ids = torch.tensor([[0] * 5 + [1] * 7] * 2)
    positions = torch.tensor([[*range(5), *range(7)]] * 2)
    separate = batch | {"document_ids": ids, "position_ids": positions}
    assert visibility(network, separate)["doctor/sees_documents"] == 0.0
    mixed = separate | {"document_ids": torch.zeros_like(ids)}
    assert visibility(network, mixed)["doctor/sees_documents"] > 0.01
    for block in network.blocks:
        block.attention.causal = False
    assert visibility(network, batch)["doctor/sees_future"] > 0.01


def test_rows_that_see_each_other_see_no_future(monkeypatch):
    torch.manual_seed(0)
    network = tiny_gpt(position="rotary").eval()
    [batch] = uneven_batches(1)
    forward = network.forward

    def flat(batch):
        rows = {"input_ids": batch["input_ids"].flatten()[:16].view(1, -1)}  # two rows of 8 as one
        return forward(rows).view(2, 8, -1)

    monkeypatch.setattr(network, "forward", flat)
    seen = visibility(network, {"input_ids": batch["input_ids"].flatten()[:16].view(2, 8)})
    assert seen["doctor/sees_rows"] > 0.01
    assert seen["doctor/sees_future"] == 0.0


def test_blocks_that_are_not_run_are_counted(monkeypatch):
    network = tiny_gpt(position="rotary")
    [batch] = uneven_batches(1)
    assert inner_state(network, batch)["doctor/blocks_idle"] == 0
    embed = torch.nn.Embedding(network.vocab_size, network.n_embd)
    monkeypatch.setattr(
        network, "forward", lambda batch: network.blocks[0](embed(batch["input_ids"]), None, None, None)
    )
    assert inner_state(network, batch)["doctor/blocks_idle"] == len(network.blocks) - 1


def test_what_a_block_adds_to_all_tokens_alike_is_nothing():
    network = tiny_gpt(position="rotary")
    [batch] = uneven_batches(1)
    with torch.no_grad():
        network.blocks[1].attention.o_proj.weight.zero_()
        network.blocks[1].mlp.down_proj.weight.zero_()
        network.blocks[1].mlp.down_proj.bias.fill_(0.5)
    assert inner_state(network, batch)["doctor/block_adds"] < 1e-6
    with torch.no_grad():
        network.blocks[1].mlp.down_proj.weight.normal_()
    assert inner_state(network, batch)["doctor/block_adds"] > 1e-2


def test_attention_units_and_zeros_are_measured():
    torch.manual_seed(0)
    network = tiny_gpt(activation="relu")
    [batch] = uneven_batches(1)
    plain = inner_state(network, batch)
    assert plain["doctor/attention_entropy"] > 0.99  # small weights: equal attention
    assert plain["doctor/dead_units"] < 0.1
    broken = copy.deepcopy(network)
    with torch.no_grad():
        broken.blocks[1].mlp.up_proj.bias.fill_(-100.0)
        broken.blocks[0].attention.q_proj.weight.mul_(1e4)
        for parameter in broken.blocks[1].attention.parameters():
            parameter.zero_()
    found = inner_state(broken, batch)
    assert found["doctor/attention_entropy"] < 0.1
    assert found["doctor/dead_units"] == 1.0
    assert weights_at_start(broken)["doctor/blocks_of_zeros"] == 0
    with torch.no_grad():
        for parameter in broken.blocks[1].parameters():
            parameter.zero_()
    assert weights_at_start(broken)["doctor/blocks_of_zeros"] == 1


@pytest.mark.ci
@pytest.mark.parametrize("network", [None, "tests.faults.broken.SeeingGPT"])
def test_what_a_sharded_network_sees_is_looked_at(network, tmp_path):
    values = composed(
        recipe("gpt-2-ranks", tmp_path, 0), {"trainer": {"max_steps": 7, "strategy": {"class_path": "FSDP"}}}
    )
    if network is not None:
        values["model"]["network"]["class_path"] = network
    train(values, tmp_path / "run")
    findings = (tmp_path / "run/doctor/findings.jsonl").read_text().splitlines()
    found = {json.loads(line)["cause"] for line in findings}
    assert found & {"sees_future", "mask_leak"} == ({"sees_future"} if network else set())


@pytest.mark.ci
def test_ranks_that_drift_apart_are_found():
    callbacks = [
        {"class_path": "tests.support.drifting.Drifting", "init_args": {"first": 3}},
        {"class_path": "TrainingDoctor", "init_args": {"every_n_steps": 1}},
    ]
    done = same_run({"trainer": {"callbacks": callbacks, "strategy": {"class_path": "DDP"}}}, 2)
    assert done.code == 0, done.error_text
    logged = done.figures["metrics"]
    apart = {
        int(step): values["doctor/ranks_apart"]
        for step, values in logged.items()
        if "doctor/ranks_apart" in values
    }
    assert apart[1] == apart[2] == 0.0
    assert apart[3] > 1e-4
    assert all(abs(logged[step]["doctor/gradient_ratio"] - 1) < 1e-4 for step in ("1", "2"))
    assert "TrainingDoctor: ranks differ since step 3" in done.error_text


@pytest.mark.parametrize(("gain", "name"), [(1e3, "gain_most"), (1e-3, "gain_least")])
def test_the_gradient_on_its_way_down_is_measured(gain, name):
    """A block whose input passes on so many times its gradient: by definition the factor is that of the others times it."""
    torch.manual_seed(0)
    network = tiny_gpt()
    [batch] = uneven_batches(1)
    plain = backward_gains(network, batch)
    assert 0.8 < plain["doctor/gain_least"] <= plain["doctor/gain_most"] < 1.5  # small weights: the sum alone

    def amplify(block, inputs):
        x, *others = inputs
        return (x.detach() + gain * (x - x.detach()), *others)

    network.blocks[1].register_forward_pre_hook(amplify)
    assert backward_gains(network, batch)[f"doctor/{name}"] == pytest.approx(gain, rel=0.5)


def test_coarse_weights_and_equal_units_are_known():
    torch.manual_seed(0)
    network = tiny_gpt(n_embd=64)
    assert coarse_share(network) == 0.0
    assert weights_at_start(network)["doctor/units_alike"] == 0.0
    rounded = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in rounded.blocks.parameters():
            parameter.copy_(parameter.bfloat16().float())
    assert coarse_share(rounded) == 1.0
    with torch.no_grad():
        for parameter in network.blocks.parameters():
            parameter.copy_((parameter / 1e-3).round() * 1e-3)  # about 120 values
        network.blocks[1].mlp.up_proj.weight[1:].copy_(network.blocks[1].mlp.up_proj.weight[:1])
    assert coarse_share(network) == 1.0
    assert weights_at_start(network)["doctor/units_alike"] > 0.99


def test_a_state_that_was_lost_is_known_by_its_squares():
    """Adam's second moments fall by no more than their decay, whatever gradients do; cleared ones do."""
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = AdamW([weight], lr=0.1, betas=(0.9, 0.95))
    state, found = OptimizerState(), []
    for step in range(1, 13):
        weight.grad = torch.full((8,), 1e-6 if step > 5 else 1.0)
        if step == 11:
            optimizer.state[weight]["exp_avg_sq"].zero_()
        optimizer.step()
        if step in (4, 8, 12):
            found.append(state.figures(optimizer, step)["doctor/state_lost"])
    assert found == [0.0, 0.0, 1.0]


def test_mistakes():
    for options in ({"every_n_steps": 0}, {"batches": -1}, {"least_confidence": 1.5}):
        with pytest.raises(ConfigError, match="TrainingDoctor takes"):
            TrainingDoctor(**options)
