"""The reward model: trl's loss and figures, pairs that weigh the same on ranks, and a stored one that scores texts."""

import csv
import math
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers import Tokenizer

from conformance.runs import run
from core.errors import ConfigError
from datamodules.preference_datamodule import PreferenceDataModule
from plugins.checkpoints.stored_objective import load_objective
from plugins.networks.bert import BERT
from plugins.networks.gemma3 import Gemma3
from plugins.networks.llama import Llama
from plugins.objectives.reward_model import RewardModel
from tests.support.records import build, tokenizer, write_lines
from tests.support.reference_models import both, lively
from tests.support.same_run import TOLERANCE, differences, fit, one_process
from tests.support.small_networks import DENSE

SIZES = {**DENSE, "vocab_size": 320}


def pairs(count, margin=False):
    """Returns pairs whose answers differ in length."""
    return [
        {"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": "9" * (1 + n % 5) + "?"}
        | ({"margin": n % 3 / 4} if margin else {})
        for n in range(count)
    ]


def first_batch(tmp_path, **options):
    records = pairs(12, options.pop("margin", False))
    data = build(PreferenceDataModule, tmp_path, records, template="plain", **options)
    return next(iter(data.packed("train", sequence_length=64, batch_size=4)))[1]


def reward_model(network, centre=0.0):
    objective = RewardModel(centre)
    objective.change_network(network)
    lively(objective, seed=1)
    return objective


@pytest.mark.slow  # for where trl is installed; a closed form is below
@pytest.mark.parametrize(("centre", "margin"), [(0.0, False), (0.3, True)])
def test_loss_and_figures_are_trls(centre, margin, tmp_path):
    pytest.importorskip("trl")
    from transformers import LlamaForSequenceClassification
    from trl.trainer.reward_trainer import RewardTrainer

    network, reference = both(Llama, SIZES)
    objective = reward_model(network, centre)
    batch = first_batch(tmp_path, margin=margin)
    reference.config.num_labels, reference.config.pad_token_id = 1, 319
    theirs = LlamaForSequenceClassification(reference.config).eval()
    theirs.model.load_state_dict(reference.model.state_dict())
    theirs.score.weight = objective.head.output.weight
    inside = batch["document_ids"] >= 0
    order = [*range(0, len(inside), 2), *range(1, len(inside), 2)]  # all chosen ones, then all rejected ones
    inputs = {
        "input_ids": batch["input_ids"].masked_fill(~inside, 319)[order],
        "attention_mask": inside.long()[order],
    }
    margins = None
    if margin:
        margins = torch.stack([batch["margin"][row][inside[row]][0] for row in range(0, len(inside), 2)])
        assert margins.unique().numel() > 1

        class WithMargin(torch.nn.Module):
            def forward(self, margin, **given):
                return theirs(**given)

        inputs["margin"] = margins
    one = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=centre or None),
        accelerator=one,
        _metrics={"eval": {name: [] for name in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")}},
        _total_train_tokens=0,
    )  # fmt: skip
    model = WithMargin() if margin else theirs
    expected = RewardTrainer.compute_loss(trainer, model, inputs)
    loss, figures = objective.loss(network, batch)
    assert loss.mean.item() == pytest.approx(expected.item(), rel=1e-6)
    for name in ("accuracy", "margin"):
        assert figures[name].mean.item() == pytest.approx(trainer._metrics["eval"][name][0], rel=1e-5)
    ours = torch.autograd.grad(loss.mean, objective.head.output.weight)[0]
    [wanted] = torch.autograd.grad(expected, theirs.score.weight)
    assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-6 * wanted.abs().max())


def test_the_reward_is_read_at_the_token_that_ends_the_answer(tmp_path):
    network = lively(Llama(**SIZES))
    objective = reward_model(network, centre=0.1)
    batch = first_batch(tmp_path, margin=True)
    found = []
    for row in range(len(batch["input_ids"])):  # each text alone, without padding
        ids = batch["input_ids"][row][batch["document_ids"][row] >= 0]
        hidden = network({"input_ids": ids[None]})
        found.append((hidden[0, -1].double() * objective.head.output.weight[0].double()).sum().item())
    losses = [
        math.log1p(math.exp(-(good - bad - batch["margin"][2 * n].max().item()))) + 0.1 * (good + bad) ** 2
        for n, (good, bad) in enumerate(zip(found[::2], found[1::2], strict=True))
    ]
    loss, figures = objective.loss(network, batch)
    assert loss.total.item() == pytest.approx(sum(losses), rel=1e-5)
    assert (loss.weight.item(), loss.tokens.item()) == (4, (batch["labels"] >= 0).sum().item())
    right = [good > bad for good, bad in zip(found[::2], found[1::2], strict=True)]
    assert figures["accuracy"].mean.item() == pytest.approx(sum(right) / 4)
    rows = [ids[there >= 0].tolist() for ids, there in zip(batch["input_ids"], batch["document_ids"], strict=True)]  # fmt: skip
    assert objective.score(network, rows).tolist() == pytest.approx(found, rel=1e-4, abs=1e-5)
    assert objective.score(network, rows[:1]).tolist() == pytest.approx(found[:1], rel=1e-4)


def test_what_cannot_be_a_pair_is_refused_or_not_counted(tmp_path):
    network = lively(Llama(**SIZES))
    objective, batch = reward_model(network), first_batch(tmp_path)
    with pytest.raises(ConfigError, match="a batch has 7 rows, but pairs have two"):
        objective.loss(network, {name: value[:7] for name, value in batch.items()})
    without = {**batch, "labels": batch["labels"].clone()}
    without["labels"][3] = -100
    kept = {name: value[[0, 1, 4, 5, 6, 7]] for name, value in batch.items()}
    loss, expected = objective.loss(network, without)[0], objective.loss(network, kept)[0]
    assert loss.weight == expected.weight == 3
    assert loss.total.item() == pytest.approx(expected.total.item(), rel=1e-6)
    with pytest.raises(ConfigError, match="at least one token"):
        objective.score(network, [])
    with pytest.raises(ConfigError, match="no head"):
        RewardModel().loss(network, batch)
    with pytest.raises(ConfigError, match="centre from 0 upwards, not -1"):
        RewardModel(-1)
    with pytest.raises(ConfigError, match="Gemma3 returns logits"):
        RewardModel().change_network(
            Gemma3(**DENSE, head_dim=8, sliding_window=4, global_every=2, final_soft_cap=30.0)
        )


@pytest.mark.parametrize(
    ("network", "frozen"),
    [
        (lambda: Llama(**DENSE), []),
        (lambda: Llama(**DENSE, tie_embeddings=False), ["lm_head.weight"]),
        (lambda: BERT(61, 1, 4, 32, 64, 48), ["head.bias"]),
        (lambda: BERT(61, 1, 4, 32, 64, 48, head=False), []),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_nothing_is_computed_with_is_frozen(network, frozen, device):
    with torch.device(device):
        made = network()
    objective = RewardModel()
    objective.change_network(made)
    assert [name for name, weight in made.named_parameters() if not weight.requires_grad] == frozen
    assert objective.head.output.weight.device.type == device
    if device == "cpu":
        torch.manual_seed(0)
        RewardModel().change_network(made)
        torch.manual_seed(0)
        again = RewardModel()
        again.change_network(made)
        assert 0.01 < again.head.output.weight.std() < 0.03


def test_a_margin_that_is_no_number_is_named(tmp_path):
    records = [*pairs(4), pairs(1)[0] | {"margin": "large"}]
    with pytest.raises(ConfigError, match='"margin" is no number'):
        build(PreferenceDataModule, tmp_path, records, template="plain")


def config(tmp_path, records, **trainer):
    """Writes the configuration of a small run."""
    values = {
        "seed_everything": 0,
        "trainer": {"accelerator": "cpu", "devices": 1, "default_root_dir": str(tmp_path / "run"), "logger": ["MetricsCSV"],
                    "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
                    "use_distributed_sampler": False, "check_val_every_n_epoch": None, "plugins": ["AtomicCheckpoint"],
                    "gradient_clip_val": 1.0, "log_every_n_steps": 10,
                    "callbacks": [{"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": trainer["max_steps"]}}]} | trainer,
        "model": {"network": {"class_path": "Llama", "init_args": {**SIZES, "tie_embeddings": False}},
                  "objective": {"class_path": "RewardModel", "init_args": {"centre": 0.01}},
                  "optimizer": {"class_path": "AdamW", "init_args": {"lr": 5e-3}}},
        "data": {"class_path": "PreferenceDataModule",
                 "init_args": {"source": write_lines(tmp_path / "pairs.jsonl", records), "cache_dir": str(tmp_path / "cache"),
                               "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"path": tokenizer(tmp_path).path}},
                               "template": "plain", "sequence_length": 64, "batch_size": 16}},
    }  # fmt: skip
    values["trainer"]["logger"] = [
        {"class_path": "MetricsCSV", "init_args": {"save_dir": str(tmp_path / "run")}}
    ]
    path = tmp_path / "reward.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


@pytest.mark.ci
def test_a_toy_preference_is_learnt_to_95_percent_and_a_stored_model_scores_by_it(tmp_path):
    random = Random(
        0
    )  # of two numbers of three digits, the one whose digits have the larger sum is preferred
    numbers = [(f"{n:03}", sum(map(int, f"{n:03}"))) for n in range(1000)]
    records = []
    while len(records) < 1000:
        (good, more), (bad, less) = random.choices(numbers, k=2)
        if more > less + 3:
            records.append({"prompt": f"{len(records) % 10}: ", "chosen": good, "rejected": bad})
    path = config(tmp_path, records, max_steps=200, val_check_interval=200)
    done = run(["fit", f"--config={path}"], tmp_path)
    assert done.code == 0, done.error_text
    with open(tmp_path / "run" / "metrics.csv", encoding="utf-8", newline="") as file:
        accuracy = [float(row["val/accuracy"]) for row in csv.DictReader(file) if row["val/accuracy"]]
    assert accuracy[-1] >= 0.95
    stored = load_objective(tmp_path / "run" / "checkpoints" / "step-00000200.ckpt")
    encode = Tokenizer.from_str(stored.tokenizer_json).encode
    rows = [[*encode(f"3: {number}").ids, stored.end_of_text_id] for number in ("111", "414", "858", "999")]
    rewards = stored.objective.score(stored.network, rows).tolist()
    assert rewards == sorted(rewards)


def test_predict_is_refused_with_what_to_do(tmp_path):
    path = config(tmp_path, pairs(40), max_steps=1, val_check_interval=1)
    done = run(["predict", f"--config={path}"], tmp_path)
    assert done.code == 2
    assert "RewardModel does not learn" in done.error_text
    text = Path(path).read_text(encoding="utf-8").replace("PreferenceDataModule", "InstructionDataModule")
    Path(path).write_text(text, encoding="utf-8")
    done = run(["check", f"--config={path}"], tmp_path)
    assert done.code == 2
    assert "select PreferenceDataModule" in done.error_text
    assert len(done.error_text.splitlines()) <= 10


@pytest.mark.ci
def test_it_trains_on_ranks_as_in_one_process():
    data = {"class_path": "tests.support.uneven.UnevenAnswers"}
    objective = {"class_path": "RewardModel", "init_args": {"centre": 0.1}}
    overlay = {"data": data, "model": {"objective": objective}}
    expected = one_process(overlay)
    apart = differences(fit({**overlay, "trainer": {"strategy": {"class_path": "FSDP"}}}, 2), expected)
    assert max(apart.values()) < TOLERANCE, apart
