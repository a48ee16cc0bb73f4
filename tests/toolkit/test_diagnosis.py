"""The rules of a diagnosis on given figures; reading and writing; what is measured of data, against closed forms."""

import sys

import numpy as np
import pytest
import torch
import yaml

from core.errors import ConfigError
from toolkit.diagnosis import Case, History, diagnose, read_history
from toolkit.diagnosis.data_probes import (
    common_text,
    figures_of,
    label_counts,
    neighbours,
    position_counts,
    repeated_rows,
    seen_spans,
)
from toolkit.diagnosis.foreign import found
from toolkit.diagnosis.network import dropout_too_high
from toolkit.diagnosis.network_probes import copied_buffers, kept_buffers
from toolkit.diagnosis.report import read_config, remedy_text

CONFIG = {
    "trainer": {"max_steps": 100, "gradient_clip_val": 1.0, "callbacks": []},
    "model": {
        "network": {"class_path": "GPT", "init_args": {"vocab_size": 256}},
        "objective": {"class_path": "CausalLM"},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 6e-3}},
        "lr_scheduler": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": 10}},
    },
    "data": {"class_path": "PretrainDataModule", "init_args": {"packing": {"class_path": "Concatenate"}}},
}


def healthy(steps=40):
    """Figures of a run without fault."""
    history = History()
    for step in range(1, steps + 1):
        rate = 6e-3 * min(step / 10, 1)
        loss = 2.5 + 3 * np.exp(-step / 10) + 0.03 * np.sin(7 * step)
        history.add(step, {"train/loss": loss, "train/lr": rate, "train/grad_norm": 1.0 + 0.2 * np.sin(step)})
        if step & (step - 1) == 0:
            measured = {
                "update_ratio": 0.2 * rate / 6e-3,
                "gradient_ratio": 1.0,
                "gradient_cosine": 1.0,
                "gradients_lost": 0.0,
                "weights_unchanged": 0.0,
                "optimizer_steps_behind": 0.0,
                "anchor_loss": loss,
                "plain_loss": loss,
                "max_logit": 4.0,
                "logit_deviation": 0.5,
            }
            history.add(step, {f"doctor/{name}": value for name, value in measured.items()})
    data = {
        "labels_elsewhere": 0.04,
        "labels_offset": -3.0,
        "labels_next": 1.0,
        "labelled": 1.0,
        "sees_future": 0.0,
    }
    data |= {
        "repeated_rows": 0.0,
        "validation_seen": 0.01,
        "neighbours_alike": 0.5,
        "round_trip": 1.0,
        "like_source": 0.97,
        "frozen": 0.0,
    }
    history.add(1, {f"doctor/{name}": value for name, value in data.items()})
    return history


def with_figure(name, value, steps=(1, 2, 4)):
    def change(history):
        for step in steps:
            history.add(step, {name: value})

    return change


def jump(history, anchor):
    before = float(history.series("train/loss").values[-1])
    history.add(41, {"train/loss": before + 2.0, "doctor/anchor_loss": 2.5 + anchor})


CASES = {
    "labels_shifted": lambda history: history.add(
        1, {"doctor/labels_next": 0.05, "doctor/labels_elsewhere": 1.0}
    ),
    "few_labels": with_figure("doctor/labelled", 0.05, (1,)),
    "mask_leak": with_figure("doctor/sees_documents", 0.2, (1,)),
    "position_ids": with_figure("doctor/positions_wrong", 0.5, (1,)),
    "tokenizer_mismatch": with_figure("doctor/round_trip", 0.2, (1,)),
    "duplicates": with_figure("doctor/repeated_rows", 0.5, (1,)),
    "not_shuffled": with_figure("doctor/neighbours_alike", 20.0, (1,)),
    "validation_leak": with_figure("doctor/validation_seen", 0.9, (1,)),
    "sees_future": with_figure("doctor/sees_future", 0.3, (1,)),
    "non_finite": with_figure("train/grad_norm", float("nan"), (41,)),
    "fp16_underflow": with_figure("doctor/gradients_lost", 0.4),
    "stale_gradients": with_figure("doctor/gradient_cosine", 0.5),
    "gradient_scale": with_figure("doctor/gradient_ratio", 4.0),
    "weights_not_updated": with_figure("doctor/weights_unchanged", 0.3),
    "frozen_weights": with_figure("doctor/frozen", 0.3, (1,)),
    "optimizer_state_lost": with_figure("doctor/optimizer_steps_behind", 30.0, (41,)),
    "logit_growth": lambda history: (
        [history.add(s, {"doctor/logit_deviation": s / 2}) for s in (36, 38, 40)]
        and history.add(50, {"doctor/logit_deviation": 40.0})
    ),
    "dead_units": with_figure("doctor/initial_dead_units", 0.999, (1,)),
    "attention_collapse": with_figure("doctor/initial_attention_entropy", 0.01, (1,)),
    "data_bound": with_figure("time/data_share", 0.7, range(1, 9)),
    "straggler": with_figure("time/slowest_rank_ratio", 2.0, range(1, 21)),
    "communication_bound": with_figure("time/communication_share", 0.6, range(1, 9)),
    "fragmentation": with_figure("memory/fragmentation", 0.6, range(1, 9)),
    "batch_too_small": with_figure("noise_scale/batch_ratio", 100.0, range(1, 9)),
    "dead_experts": with_figure("doctor/initial_experts_unused", 0.25, (1,)),
    "exploding_gradients": with_figure("doctor/initial_gain_most", 50.0, (1,)),
    "vanishing_gradients": with_figure("doctor/initial_gain_least", 1e-3, (1,)),
    "bad_initialisation": with_figure("doctor/blocks_unlike", 40.0, (1,)),
    "untied_embedding": with_figure("doctor/head_is_copy", 1.0, (1,)),
    "checkpoint_stall": with_figure("time/checkpoint_share", 0.6, (20, 41)),
    "low_precision_weights": with_figure("doctor/weights_coarse", 1.0),
    "ranks_differ": with_figure("doctor/ranks_apart", 1e-3),
    "data_restarted": lambda history: history.add(41, {"doctor/resumed_at": 41, "doctor/rows_of_start": 1.0}),
    "schedule_restarted": lambda history: history.add(41, {"doctor/resumed_at": 41, "train/lr": 6e-4}),
    "average_wrong": lambda history: [
        history.add(step, {"val/loss": 3.0, "val/ema_loss": 5.0}) for step in (30, 41)
    ],
    "spike_by_data": lambda history: jump(history, 0.1),
    "spike_by_optimizer": lambda history: jump(history, 1.9),
}


def causes(history, config=CONFIG):
    return [finding.cause for finding in diagnose(Case(history, config))]


def test_a_healthy_run_has_no_findings():
    assert causes(healthy()) == []
    assert causes(History()) == []


@pytest.mark.parametrize("cause", CASES)
def test_a_cause_is_found_by_its_figures(cause):
    history = healthy()
    CASES[cause](history)
    assert causes(history)[0] == cause


def figures(**values):
    """Figures of steps 1, 2, 4 and so on, as many as there are values."""

    def change(history):
        for name, given in values.items():
            for index, value in enumerate(given):
                history.add(2**index, {f"doctor/{name}": value})

    return change


PAIRS = {
    "ids of another tokenizer are so from the first rows on": ("tokenizer_mismatch", figures(round_trip=[0.6] * 6)),
    "text is damaged in a few batches": ("spike_by_data", figures(round_trip=[1, 1, 1, 0.6, 1, 1])),
    "another tokenizer after a resume": (
        "tokenizer_mismatch",
        lambda h: (figures(round_trip=[1, 1, 1, 0.6, 0.6, 0.6])(h), h.add(7, {"doctor/resumed": 1.0})),
    ),
    "other frequencies": ("tokenizer_mismatch", figures(like_source=[0.5])),
    "frequencies of repeated text": ("duplicates", figures(like_source=[0.5], repeated_rows=[0.7])),
    "weights are too small": ("bad_initialisation", figures(initial_logit_deviation=[1e-4], initial_gain_least=[0.99])),
    "a signal fades through depth": ("vanishing_gradients", figures(initial_logit_deviation=[1e-9], initial_gain_least=[1e-6])),
    "blocks that begin with nothing": (None, figures(block_adds=[0.0, 0.0, 0.1, 0.4])),
    "blocks that stay so": ("dead_block", figures(block_adds=[0.0] * 6, without_gradient=[0.7] * 6)),
    "a run that diverges": (
        "exploding_gradients", lambda h: [h.add(41 + i, {"train/grad_norm": 10.0**i}) for i in range(1, 9)] and h.add(50, {"train/grad_norm": np.inf})
    ),
    "a rate that makes it diverge": (
        "rate_too_high", lambda h: (
            [h.add(s, {"doctor/update_ratio": 3.0, "train/lr": 6.0}) for s in (2, 4)],
            figures(gradient_cosine=[1, 1, 1, 1, 0.3, 0.2])(h),
            h.add(50, {"train/loss": np.nan}),
        )
    ),
    "units without a gradient": (
        "dead_units", figures(
            initial_dead_units=[1.0], own_dead_units=[1.0] * 3, usual_dead_units=[0.0] * 3, part_kind=[3.0],
            forward_apart=[0.5, 0.4, 1e-3], backward_apart=[0, 0, 0.1], backward_lost=[0, 0, 0.5],
        )
    ),
    "weights that begin as torch's": ("bad_initialisation", figures(initial_size=[5.0], initial_gain_most=[15.0])),
    "what pages share": ("duplicates", figures(common_text=[0.2])),
    "experts are others": (None, figures(backward_apart=[0.1], backward_holes=[0.3], backward_single=[0.0], forward_apart=[1e-3])),
    "small gradients are lost": (
        "fp16_underflow", figures(backward_apart=[0.1], backward_holes=[0.3], backward_single=[0.3], backward_single_size=[0.05])
    ),
    "a rank waits": ("data_bound", lambda h: [h.add(s, {"time/rank_behind": 0.4, "time/rank_waits": 0.4}) for s in range(1, 12)]),
    "a rank works": ("straggler", lambda h: [h.add(s, {"time/rank_behind": 0.4, "time/rank_waits": 0.0}) for s in range(1, 12)]),
    "a slow run that is also wrong": (
        "no_warmup", lambda h: [h.add(s, {"time/data_share": 0.7, "doctor/update_ratio": 0.9, "train/lr": 0.1}) for s in range(1, 9)]
    ),
    "the same few rows": (
        "over_fitting", lambda h: (figures(rows_again=[0, 0, 1, 1, 1, 1])(h), [h.add(s, {"val/loss": 3.6}) for s in (20, 40)])
    ),
    "a term that validation has not": (
        None,
        lambda h: ([h.add(s, {"val/loss": 3.0 + s / 100}) for s in (20, 40)], [h.add(s, {"doctor/plain_loss": 3.2}) for s in (36, 40)]),
    ),
    "first loss of a sum": (None, lambda h: h.add(1, {"train/loss": 900.0, "doctor/plain_loss": 900.0, "doctor/initial_next_loss": 5.6})),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_causes_that_look_alike_are_told_apart(name):
    cause, change = PAIRS[name]
    history = healthy()
    change(history)
    config = changed("trainer.overfit_batches", 4) if cause == "over_fitting" else CONFIG
    assert ([*causes(history, config), None])[0] == cause


def changed(path, value):
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    *parents, last = path.split(".")
    inner = config
    for key in parents:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return config


@pytest.mark.parametrize(
    ("cause", "path", "value"),
    [
        ("weight_decay_too_large", "model.optimizer.init_args.weight_decay", 30.0),
        ("epsilon_too_large", "model.optimizer.init_args.eps", 1.0),
        ("clip_too_low", "trainer.gradient_clip_val", 1e-6),
        ("optimizer_state_lost", "model.optimizer.init_args.betas", [0.0, 0.0]),
        ("stale_gradients", "model.optimizer.init_args.betas", [0.9995, 0.999]),
        ("warmup_too_long", "model.lr_scheduler.init_args.warmup_steps", 0.9),
    ],
)
def test_a_setting_is_found_with_what_it_does(cause, path, value):
    config = changed(path, value)
    [finding] = diagnose(Case(healthy(), config))
    assert finding.cause == cause
    remedied: object = finding.remedy
    for key in path.split("."):
        remedied = remedied[key]
    assert remedied != value
    assert yaml.safe_load(remedy_text(finding)) == finding.remedy  # the finding is a comment


def test_another_rate_is_that_of_the_rule_of_thumb():
    history = healthy()
    for step in (1, 2, 4, 8):
        rate = 0.5 * min(step / 10, 1)
        history.add(step, {"train/lr": rate, "doctor/update_ratio": rate / 0.02})
    [finding] = diagnose(Case(history, changed("model.optimizer.init_args.lr", 0.5)))
    assert (finding.cause, finding.since) == ("rate_too_high", 1)
    assert finding.remedy["model"]["optimizer"]["init_args"]["lr"] == pytest.approx(3 / 10 * 0.02)


def test_a_part_of_another_package_is_taken_out_or_unwrapped():
    history = healthy()
    with_figure("doctor/gradient_ratio", 4.0)(history)
    foreign = {"class_path": "acme.Accumulate", "init_args": {}}
    [finding] = diagnose(Case(history, changed("trainer.callbacks", [foreign, {"class_path": "LossCurve"}])))
    assert finding.remedy == {"trainer": {"callbacks": {"acme.Accumulate": None}}}
    history = healthy()
    with_figure("doctor/repeated_rows", 0.5, (1,))(history)
    wrapped = {"class_path": "acme.Packing", "init_args": {"inner": {"class_path": "BestFit"}}}
    [finding] = diagnose(Case(history, changed("data.init_args.packing", wrapped)))
    assert finding.remedy["data"]["init_args"]["packing"] == {"class_path": "BestFit"}
    derived = {"class_path": "acme.OurAdamW", "init_args": {"lr": 1e-3, "factor": 2.0}}
    case = Case(healthy(), changed("model.optimizer", derived))
    own = {"class_path": "AdamW", "init_args": {"lr": 1e-3}}
    assert found(case, "rate_too_high", 1, "", 0.9).remedy == {"model": {"optimizer": own}}


@pytest.mark.parametrize(("gain", "expected"), [(140.0, []), (2000.0, ["exploding_gradients"])])
def test_trained_blocks_may_change_gradients_a_hundredfold(gain, expected):
    history = healthy(200)
    history.add(160, {"doctor/gain_most": gain, "doctor/gain_least": 0.9})
    assert causes(history, changed("trainer.max_steps", 400)) == expected


def test_a_package_that_is_not_installed_is_no_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    monkeypatch.delitem(sys.modules, "plugins.optimizers.lion", raising=False)
    config = changed("model.optimizer", {"class_path": "acme.OurLion", "init_args": {"lr": 1e-3}})
    remedy = found(Case(healthy(), config), "rate_too_high", 1, "", 0.9).remedy
    assert remedy == {"model": {"optimizer": {"class_path": "AdamW"}}}


def test_an_adapter_is_for_weights_that_were_read():
    history = healthy()
    with_figure("doctor/frozen", 0.9, (1,))(history)
    config = changed("trainer.callbacks", [{"class_path": "Freeze", "init_args": {"last_blocks": 1}}])
    [finding] = diagnose(Case(history, config))
    assert finding.cause == "frozen_weights"
    assert finding.remedy == {"trainer": {"callbacks": {"Freeze": None}}}
    config["model"]["weights"] = "runs/base"
    assert causes(history, config) == []
    config["model"] |= {"weights": None, "network": {"class_path": "acme.TheirPretrained"}}
    assert causes(history, config) == []


@pytest.mark.parametrize(
    ("at_first", "expected"),
    [(30e-3, ["no_warmup"]), (1e-3, ["warmup_too_long"]), (0.0, ["schedule_ends_early"])],
)
def test_rates_of_other_settings_are_not_judged(at_first, expected):
    """Of a run that was resumed with a lower rate, a higher one, or more steps than the schedule had."""
    history = healthy(70)
    for step in range(1, 71):
        history.add(step, {"train/lr": 6e-3 if step > 50 else at_first or 6e-3 * (step < 40)})
    assert causes(history) == expected
    history.add(51, {"doctor/settings_changed": 1.0})
    assert causes(history) == []


@pytest.mark.parametrize(("tokens", "expected"), [(0, []), (32, ["batch_too_small"]), (4096, [])])
def test_a_step_has_enough_tokens(tokens, expected):
    history = healthy()
    history.add(40, {"train/tokens": 40.0 * tokens})
    assert causes(history) == expected


def test_history_goes_back_and_is_bounded(tmp_path):
    history = History()
    for step in range(1, 20_000):
        history.add(step, {"a": step})
    series = history.series("a")
    assert len(series) < 4000
    assert (series.steps == series.values).all()
    assert series.steps[-1] == 19_999
    history.add(100, {"a": -1.0})  # a rollback
    assert history.series("a").steps[-1] == 100
    again = History()
    again.load_state_dict(history.state_dict())
    assert again.state_dict() == history.state_dict()
    path = tmp_path / "metrics.csv"
    path.write_text("step,train/loss\n1,2.5\n2,\n3,nan\n4,1.0")  # the last line is not finished
    found = read_history(path).series("train/loss")
    assert found.steps.tolist() == [1, 3]
    path.write_text("no,table\n1,2\n")
    with pytest.raises(ConfigError, match="not as MetricsCSV writes it"):
        read_history(path)
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not as `fit` writes it"):
        read_config(tmp_path)


def shares(counts):
    return {name.removeprefix("doctor/"): share for name, share in figures_of(counts).items()}


def batches(count=16, rows=4, length=24, seed=0):
    stream = torch.randint(0, 500, (count, rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": part[:, :-1], "labels": part[:, 1:].clone()} for part in stream]


def test_labels_rows_and_positions_are_counted():
    found = batches(4)
    found[0]["labels"][:, :12] = -100
    share = shares(label_counts(found))
    assert share["labels_next"] == 1.0
    assert share["labelled"] == 1 - 4 * 12 / (4 * 4 * 24)
    assert share["labels_elsewhere"] < 0.03
    ahead = [batch | {"labels": batch["labels"].roll(-2, 1)} for batch in found]
    assert shares(label_counts(ahead))["labels_offset"] == 3
    assert shares(repeated_rows([*found, found[1]]))["repeated_rows"] == 4 / 20
    moved = found[1]["input_ids"].roll(2, 1)  # the same text, cut elsewhere
    assert shares(repeated_rows([*found, {"input_ids": moved}]))["repeated_rows"] == 4 / 20
    ids = torch.tensor([[0, 0, 0, 1, 1, 2]])
    batch = {"document_ids": ids, "labels": torch.ones(1, 6, dtype=torch.int64)}
    right = shares(position_counts([batch | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])}]))
    assert right == {"documents_per_row": 3.0, "positions_wrong": 0.0, "documents_joined": 0.0}
    joined = shares(
        position_counts(
            [
                batch
                | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]]), "document_ids": torch.zeros_like(ids)}
            ]
        )
    )
    assert joined == {"documents_per_row": 3.0, "positions_wrong": 0.0, "documents_joined": 1.0}
    chunks = {
        "input_ids": torch.tensor([[5, 6, 7, 9, 5, 6]]),
        "position_ids": torch.tensor([[0, 1, 0, 1, 0, 1]]),
    }
    assert shares(position_counts([chunks], end=9))["begins_behind_end"] == 0.5
    wrong = shares(position_counts([batch | {"position_ids": torch.arange(6)[None]}]))
    assert wrong["positions_wrong"] == 0.5


def test_order_and_leaks_are_measured():
    found = batches(32)
    assert abs(shares(neighbours(found, 500))["neighbours_alike"]) < 4
    for index, batch in enumerate(found):
        batch["input_ids"] = batch["input_ids"] // 8 + 12 * index % 400  # topics, one after the other
    assert shares(neighbours(found, 500))["neighbours_alike"] > 5
    training, others = batches(40, seed=1), batches(8, seed=2)
    assert shares(seen_spans(others, training, 1.0))["validation_seen"] == 0.0
    half = [*others[:4], *training[:4]]
    assert shares(seen_spans(half, training, 1.0))["validation_seen"] == pytest.approx(0.5 / 0.75)
    assert shares(seen_spans(training[:8], training, 1.0))["validation_seen"] == pytest.approx(1 / 0.75)


def test_remedies_keep_what_the_run_has():
    """An objective is put within BalancedRouting, transforms stay, and options that a network has not are not set."""
    history = healthy()
    with_figure("doctor/initial_experts_unused", 0.5, (1,))(history)
    ahead = {
        "class_path": "plugins.objectives.multi_token_prediction.MultiTokenPrediction",
        "init_args": {"depth": 1},
    }
    [finding] = diagnose(Case(history, changed("model.objective", ahead)))
    assert finding.remedy["model"]["objective"]["init_args"]["objective"] == ahead
    history = healthy()
    with_figure("doctor/repeated_rows", 0.5, (1,))(history)
    [finding] = diagnose(Case(history, changed("data.init_args.transforms", [{"class_path": "Rebalance"}])))
    assert finding.remedy == {"data": {"init_args": {"transforms+": [{"class_path": "ExactDuplicates"}]}}}
    assert not diagnose(Case(history, changed("data.class_path", "MixtureDataModule")))[0].remedy
    history = healthy()
    history.add(1, {"doctor/common_text": 0.2})  # copies of whole documents are not all that is to go
    [finding] = diagnose(Case(history, CONFIG))
    assert finding.remedy == {"data": {"init_args": {"transforms+": [{"class_path": "RepeatedLines"}]}}}
    history = healthy()
    with_figure("doctor/initial_dead_units", 0.5, (1,))(history)
    assert (
        diagnose(Case(history, CONFIG))[0].remedy["model"]["network"]["init_args"]["activation"]
        == "gelu_tanh"
    )
    assert not diagnose(Case(history, changed("model.network.class_path", "Llama")))[0].remedy


@pytest.mark.filterwarnings("error")
def test_losses_of_nothing_have_no_gap():
    history = History()
    for step in range(1, 9):
        history.add(step, {"train/loss": 0.0, "doctor/plain_loss": 0.0})
    assert list(dropout_too_high(Case(history, CONFIG))) == []


def test_what_an_objective_adds_in_training_is_no_scale_of_the_loss():
    """Heads that look further ahead double the loss that is trained on; validation has none of it."""
    history, state = History(), healthy().state_dict()
    loss = state["train/loss"]
    state["train/task_loss"] = loss
    state["train/loss"] = {**loss, "values": [2 * value for value in loss["values"]]}
    state["doctor/plain_loss"] = {**loss, "values": [value - 0.01 for value in loss["values"]]}
    history.load_state_dict(state)
    assert diagnose(Case(history, CONFIG)) == []
    del state["train/task_loss"]
    history.load_state_dict(state)
    assert diagnose(Case(history, CONFIG))[0].cause == "gradient_scale"


@pytest.mark.parametrize(("steps", "causes"), [(100, ["rate_too_low"]), (4, [])])
def test_a_trial_of_few_steps_has_no_rate_that_is_too_low(steps, causes):
    history = healthy(4)
    for step in (1, 2, 4):
        history.add(step, {"train/lr": 1e-5, "doctor/update_ratio": 1e-5})
    config = changed("model.optimizer.init_args.lr", 1e-5)
    config["trainer"]["max_steps"] = steps
    assert [finding.cause for finding in diagnose(Case(history, config)) if "rate" in finding.cause] == causes


def test_buffers_are_put_back_and_one_that_has_grown_is_left():
    network = torch.nn.Module()
    network.register_buffer("mean", torch.zeros(2))
    network.register_buffer("table", torch.zeros(3))
    before = copied_buffers(network)
    network.mean += 1
    network.table = torch.ones(5)  # as tables of positions grow with the longest row
    with kept_buffers(network, before):
        assert network.mean.tolist() == [0, 0]
        network.table = torch.ones(7)
    assert (network.mean.tolist(), len(network.table)) == ([1, 1], 7)


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_passages_that_many_documents_share_are_counted(share):
    """Of 64 documents in rows of 40 tokens, a notice of 30 tokens fills the first part of some."""
    draw = np.random.default_rng(0)
    rows = draw.integers(1, 5000, (64, 40))
    rows[:, 38] = 0  # the end of a document
    rows[: int(64 * share), :30] = draw.integers(1, 5000, 30)
    batches = [{"input_ids": torch.from_numpy(part)} for part in np.split(rows, 8)]
    counts = common_text(batches, end=0)
    assert figures_of(counts) == {"doctor/common_text": int(64 * share) * 30 / rows.size}
    assert (
        common_text(batches[:5], end=0) == common_text(batches, end=None) == {}
    )  # documents are few, or not known
