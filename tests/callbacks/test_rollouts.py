"""Rollouts: the ratio is 1 at first, a run goes on bitwise within a rollout, two ranks are one process, mistakes are named."""

import json
import math

import pytest
import torch

from callbacks.rollouts import Rollouts
from conformance.runs import run
from core.errors import ConfigError
from datamodules.prompt_datamodule import PromptDataModule
from plugins.adapters.lora import LoRA
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.grpo import GRPO
from plugins.objectives.ppo import PPO
from tests.support.launched_ranks import column, forked, results
from tests.support.records import build
from tests.support.rewarded import VOCAB, LowTokens, Narrow, Ratios, on_policy, prompts
from tests.support.tiny_training import fit, module, trainer, uneven_batches
from tests.support.uneven import UnevenData
from toolkit.answers import Answer, Sampler
from toolkit.rewards import Reward
from toolkit.rollouts import CORRECTIONS, OLD, REWARDS, SAMPLED


def test_the_ratio_is_exactly_one_until_the_weights_change(tmp_path):
    objective = Ratios(kl=0.1)
    on_policy(tmp_path, objective, 12, rollouts={"mini_batches": 2, "epochs": 2}, limit_val_batches=0)
    first = objective.found[::4]
    assert first == [0.0] * 3
    assert all(apart > 0 for number, apart in enumerate(objective.found) if number % 4)
    rows = objective.rows
    assert rows[0] == rows[2]  # the second epoch has the mini-batches of the first
    assert rows[1] == rows[3]
    assert rows[0] != rows[1]
    assert rows[4] != rows[0]
    rewards = [LowTokens().below > label for label in rows[0]["labels"][0] if label >= 0]
    assert rows[0][REWARDS][0] == pytest.approx(sum(rewards) / len(rewards))


def test_with_accumulation_all_micro_batches_of_a_step_have_the_ratio_one(tmp_path):
    objective = Ratios(kl=0.1)
    options = dict(accumulate_grad_batches=2, rollouts={"mini_batches": 2, "epochs": 2}, limit_val_batches=0)
    on_policy(tmp_path, objective, 4, **options)
    assert [apart == 0 for apart in objective.found] == [True, True, False, False] * 2


@pytest.mark.parametrize("objective", [PPO, pytest.param(GRPO, marks=pytest.mark.ci)])
def test_a_step_on_all_parts_of_a_rollout_is_a_step_on_the_whole(objective, tmp_path):
    found = []
    for parts in (1, 2, 4):
        (tmp_path / str(parts)).mkdir()
        options = dict(accumulate_grad_batches=parts, rollouts={"mini_batches": parts}, limit_val_batches=0)
        _, trained, _ = on_policy(tmp_path / str(parts), objective(kl=0.1), 3, sgd=True, lr=1.0, **options)
        found.append(trained.network.state_dict())
    for name, value in found[0].items():
        for other in found[1:]:  # float32 sums in another order
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_run_goes_on_bitwise_within_a_rollout(at, tmp_path):
    options = dict(rollouts={"mini_batches": 2, "epochs": 2}, limit_val_batches=0)
    runs = {name: tmp_path / name for name in ("whole", "first", "second")}
    for folder in runs.values():
        folder.mkdir()
    _, whole, figures = on_policy(runs["whole"], PPO(kl=0.1, kl_target=0.01), 6, **options)
    runner, _, _ = on_policy(runs["first"], PPO(kl=0.1, kl_target=0.01), at, **options)
    path = tmp_path / "stopped.ckpt"
    runner.save_checkpoint(path)
    torch.load(path, weights_only=True)  # plain values and tensors
    _, rest, again = on_policy(
        runs["second"], PPO(kl=0.1, kl_target=0.01), 6, ckpt_path=path, seed=0, **options
    )
    for name, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name
    for now, then in zip(again, figures[at:], strict=True):
        assert now.items() <= then.items()  # figures of a rollout before the stop are no longer shown


class Records(Reward):
    """Looks at what a reward is given."""

    def __init__(self):
        self.seen = []

    def score(self, samples):
        self.seen += samples
        return [0.0] * len(samples)


def test_rewards_see_the_whole_record_and_validation_is_repeatable(tmp_path):
    reward = Records()
    options = dict(val_check_interval=1, check_val_every_n_epoch=None, limit_val_batches=1)
    _, _, figures = on_policy(tmp_path, GRPO(), 2, lr=0.0, rollouts={"reward": reward}, **options)
    assert {(one.prompt, one.record["answer"]) for one in reward.seen} <= {
        (record["prompt"], record["answer"]) for record in prompts()
    }
    validated = reward.seen[16:18], reward.seen[-2:]
    assert validated[0] == validated[1]  # 2 prompts, one answer each
    assert all(0 < len(one.answer_ids) <= 8 for one in reward.seen)
    assert figures[-1]["val/loss"] == 0


def test_validation_is_the_mean_over_prompts(tmp_path):
    options = dict(val_check_interval=2, check_val_every_n_epoch=None, batch_size=3)
    runner, _, _ = on_policy(tmp_path, GRPO(kl=0.1), 2, **options)
    found = runner.callback_metrics
    assert float(found["val/loss"]) == -float(found["val/reward"])
    assert 0 < float(found["val/reward"]) < 1


def test_figures_are_means_over_all_answers(tmp_path):
    _, _, figures = on_policy(tmp_path, GRPO(kl=0.1), 6, log_every_n_steps=3, limit_val_batches=0)
    [first, second] = figures
    assert first["rollout/reward"] <= first["rollout/best"] <= 1
    assert 0 < first["rollout/ended"] < 1 or first["rollout/length"] == 8
    assert first["rollout/entropy"] == pytest.approx(math.log(VOCAB), rel=0.02)
    assert first["rollout/gap"] < 1e-5  # the decoder's cache against whole rows, in float32
    assert first["rollout/kl"] < second["rollout/kl"]


CONFIG = {
    "model": {"network": {"init_args": {"vocab_size": VOCAB, "max_sequence_length": 32, "bias": False}}},
    "trainer": {"gradient_clip_val": None},
}


def apart(folder, ranks, objective, rollouts, *words, tensor=1, more=None):
    """Returns figures and weights of a run on some ranks, of the command line."""
    folder.mkdir()
    data = build(PromptDataModule, folder, prompts(), template="plain")
    tokenizer = {"class_path": "PretrainedTokenizer", "init_args": {"path": data.tokenizer.path}}
    options = {"source": str(folder / "records.jsonl"), "tokenizer": tokenizer, "template": "plain", "sequence_length": 16,
               "batch_size": 4 * tensor // ranks, "cache_dir": str(folder / "cache")}  # fmt: skip
    rollout = {
        "reward": {"class_path": "tests.support.rewarded.LowTokens"},
        "samples": 4,
        "max_new_tokens": 8,
    }
    overlay = CONFIG | {
        "model": CONFIG["model"] | {"objective": objective},
        "data": {"class_path": "PromptDataModule", "init_args": options},
        "trainer": CONFIG["trainer"] | {"callbacks+": [{"class_path": "Rollouts", "init_args": rollout | rollouts}]},
    }  # fmt: skip
    overlays = []
    for number, values in enumerate([overlay, more or {}]):
        overlays.append(folder / f"{number}.yaml")
        overlays[-1].write_text(json.dumps(values), encoding="utf-8")
    done = forked(ranks, folder, *(f"--config={path}" for path in overlays), *words)
    assert done.code == 0, done.error_text
    return results(folder)


def same_run(one, two):
    """Holds a run on two ranks against that of one process."""
    for name in ("train/tokens", "rollout/reward", "rollout/length", "val/reward"):
        assert column(two[0], name) == pytest.approx(column(one[0], name), rel=1e-6), name
    for name in ("train/loss", "train/grad_norm", "rollout/kl"):
        # sums whose terms cancel each other
        assert column(two[0], name) == pytest.approx(column(one[0], name), rel=1e-4, abs=1e-6), name
    for name, weight in one[1]["state_dict"].items():
        torch.testing.assert_close(two[1]["state_dict"][name], weight, rtol=1e-4, atol=1e-6)


PARTS = {"mini_batches": 2, "epochs": 2}
RATIOS = {"class_path": "tests.support.rewarded.Ratios", "init_args": {"kl": 0.1, "kl_target": 0.01}}
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16} | CONFIG["model"]["network"]["init_args"]
BRIEF = {
    "model": {
        "network": {"class_path": "tests.support.rewarded.Brief", "init_args": SIZES},
        "optimizer": {"class_path": "AdamW", "init_args": {"eps": 1e-4}},
    }
}
"""A network whose ranks generate different numbers of tokens; an epsilon above the rounding of gradients that are near 0."""


def ratio_is_one_at_first(figures):
    """Holds that the ratio is 1 to the last bit in the first step on each rollout, and not in the second."""
    assert [value == 0 for value in column(figures, "train/apart")] == [True, False] * 3


@pytest.mark.ci  # the kit compares shorter runs by default
@pytest.mark.parametrize(
    ("objective", "rollouts"),
    [(RATIOS, PARTS), ({"class_path": "GRPO", "init_args": {"kl": 0.1}}, {})],
    ids=["PPO", "GRPO"],
)
def test_two_ranks_are_one_process(objective, rollouts, tmp_path):
    one, two = (apart(tmp_path / str(ranks), ranks, objective, rollouts) for ranks in (1, 2))
    same_run(one, two)
    if objective is RATIOS:
        ratio_is_one_at_first(two[0])


SHARDED = {
    "stage 3": ("FSDP", {}),
    "stage 2": ("FSDP", {"stage": 2}),
    "hybrid": ("HybridParallel", {"data_shard": 2}),
    "ZeRO-2": ("DeepSpeedZero", {"stage": 2}),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "stage 2" else ()) for name in SHARDED]
)
def test_sharded_ranks_are_one_process(name, tmp_path):
    one = apart(tmp_path / "1", 1, RATIOS, PARTS, more=BRIEF)
    strategy = json.dumps(dict(zip(("class_path", "init_args"), SHARDED[name], strict=True)))
    note = {"class_path": "tests.support.held_network.HeldNetwork", "init_args": {"folder": str(tmp_path)}}
    more = BRIEF | {"trainer": {"callbacks+": [note]}}
    two = apart(tmp_path / "2", 2, RATIOS, PARTS, f"--trainer.strategy={strategy}", more=more)
    same_run(one, two)
    for rank in (0, 1) if name in ("stage 3", "hybrid") else ():
        held = json.loads((tmp_path / f"held.{rank}.json").read_text())
        assert held["before"] == held["whole"] - held["blocks"] / 2  # of a step gathered: what is in no block
    ratio_is_one_at_first(two[0])
    assert max(column(one[0], "rollout/length")) < 4  # of 8


@pytest.mark.ci
def test_tensor_parallel_ranks_are_one_process(tmp_path):
    strategy = json.dumps(
        {"class_path": "HybridParallel", "init_args": {"tensor": 2, "loss_parallel": False}}
    )
    one = apart(tmp_path / "1", 1, RATIOS, PARTS)
    two = apart(tmp_path / "2", 2, RATIOS, PARTS, f"--trainer.strategy={strategy}", tensor=2)
    same_run(one, two)
    ratio_is_one_at_first(two[0])


class Weights(GRPO):
    """Keeps the parts of rollouts."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def prepare(self, network, rollout):
        super().prepare(network, rollout)
        self.parts += rollout.parts


def test_another_sampler_is_corrected_for(tmp_path):
    objective = Weights()
    _, _, figures = on_policy(tmp_path, objective, 3, rollouts={"sampler": Narrow()}, limit_val_batches=0)
    for part, figure in zip(objective.parts, figures, strict=True):
        ratios = (part[OLD].double() - part[SAMPLED].double()).exp()
        torch.testing.assert_close(part[CORRECTIONS].double(), ratios, rtol=1e-5, atol=0)  # far below the cap
        apart = (part[OLD] - part[SAMPLED]).abs()[part["labels"] >= 0]
        assert figure["rollout/gap"] == pytest.approx(float(apart.mean()), rel=1e-5)
        assert 1e-4 < figure["rollout/gap"] < 0.05  # bf16 has 8 bits


@pytest.mark.ci
def test_a_configuration_names_a_sampler(tmp_path):
    sampler = {"class_path": "tests.support.rewarded.Narrow"}
    found = apart(tmp_path / "1", 1, {"class_path": "GRPO"}, {"sampler": sampler})
    assert min(column(found[0], "rollout/gap")) > 1e-4


class Short(Sampler):
    """Returns fixed answers."""

    def __init__(self, answers):
        self.answers = answers

    def sample(self, network, prompts, **options):
        return self.answers


GOOD = Answer([5, 6], [-1.0, -2.0], False)
SAMPLERS = {
    "gave 15 answers of 16": [GOOD] * 15,
    "gave answer 1 of 16 with 0 tokens; it has 1 to 8": [Answer([], [], False)] * 16,
    "gave answer 1 of 16 with 9 tokens": [Answer([5] * 9, [-1.0] * 9, False)] * 16,
    "gave answer 16 of 16 with log-probabilities": [*[GOOD] * 15, GOOD._replace(log_probabilities=[-1.0])],
    "gave answer 2 of 16 with log-probabilities": [
        GOOD,
        GOOD._replace(log_probabilities=[-1.0, math.nan]),
        *[GOOD] * 14,
    ],
}


@pytest.mark.parametrize("said", SAMPLERS)
def test_what_a_sampler_returns_is_checked(said, tmp_path):
    with pytest.raises(ConfigError, match=f"The sampler Short {said}"):
        on_policy(tmp_path, GRPO(), 1, rollouts={"sampler": Short(SAMPLERS[said])})


class Broken(Reward):
    """Gives a number that is none to one answer."""

    def score(self, samples):
        return [math.nan if number == 3 else 1.0 for number, _ in enumerate(samples)]


def test_a_reward_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(ConfigError) as error:
        on_policy(tmp_path, GRPO(), 1, rollouts={"reward": Broken()})
    assert "Broken gave nan for sample 4 of 16" in str(error.value)


def test_there_must_be_room_for_answers(tmp_path):
    with pytest.raises(
        ConfigError, match="answers of 17 do not fit into the network's max_sequence_length=32"
    ):
        on_policy(tmp_path, GRPO(), 1, rollouts={"max_new_tokens": 17})


def test_mini_batches_divide_the_batch(tmp_path):
    with pytest.raises(ConfigError, match="mini_batches=3 do not divide data\\.batch_size=4"):
        on_policy(tmp_path, GRPO(), 1, rollouts={"mini_batches": 3})


@pytest.mark.parametrize("option", ["samples", "max_new_tokens", "mini_batches", "epochs"])
def test_numbers_are_at_least_1(option):
    with pytest.raises(ConfigError, match=f"Rollouts: {option}=0 must be at least 1"):
        Rollouts(LowTokens(), **{option: 0})


def test_rollouts_and_objective_need_each_other(tmp_path):
    with pytest.raises(ConfigError, match="CausalLM does not learn from rewards"):
        on_policy(tmp_path, CausalLM(), 1)
    with pytest.raises(ConfigError, match="Add the callback Rollouts"):
        fit(tmp_path, module(objective=GRPO()), uneven_batches(2), max_steps=1)
    runner = trainer(tmp_path, callbacks=[Rollouts(LowTokens())], max_steps=1)
    with pytest.raises(ConfigError, match="UnevenData gives none"):
        runner.fit(module(objective=GRPO()), datamodule=UnevenData())


MISTAKES = {
    "max_new_tokens": (["--trainer.callbacks.Rollouts.max_new_tokens=300"], "do not fit into the network's"),
    "mini_batches": (["--trainer.callbacks.Rollouts.mini_batches=3"], "3 do not divide data.batch_size=8"),
    "epochs": (
        ["--trainer.callbacks.Rollouts.epochs=2", "--trainer.accumulate_grad_batches=2"],
        "a step would hold rows twice",
    ),
    "DeepSpeedZero": (
        ["--trainer.strategy=DeepSpeedZero", "--trainer.strategy.stage=3"],
        "DeepSpeedZero shards the network",
    ),
    "GRPO": (["--trainer.callbacks.Rollouts.samples=1"], "Rollouts samples 1 of each"),
    "RejectionSampling": (
        ["--model.objective=RejectionSampling", "--trainer.callbacks.Rollouts.samples=1"],
        "Rollouts samples 1 to each prompt",
    ),
    "CausalLM": (["--model.objective=CausalLM"], "nothing in this run offers learns_from_rollouts"),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found_before_anything_is_started(name, tmp_path):
    words, said = MISTAKES[name]
    done = run(["check", "--config=quickstart", "--config=techniques/grpo", *words], tmp_path)
    assert done.code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 10


def test_the_reference_of_an_adapter_is_the_network_without_it(tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    lora = dict(rank=4, alpha=8)
    objective = GRPO(kl=0.1)
    runner, trained, figures = on_policy(
        folders[0], objective, 3, callbacks=[LoRA(**lora)], limit_val_batches=0
    )
    assert figures[0]["rollout/kl"] == 0
    assert figures[-1]["rollout/kl"] != 0
    network = dict(trained.network.named_parameters())
    shared = [parameter.data_ptr() == network[name].data_ptr() for name, parameter in objective.reference.named_parameters()]  # fmt: skip
    assert all(shared)
    path = tmp_path / "stopped.ckpt"
    runner.save_checkpoint(path)
    options = dict(callbacks=[LoRA(**lora)], ckpt_path=path, limit_val_batches=0)
    _, _, again = on_policy(folders[1], GRPO(kl=0.1), 4, **options)
    assert again[0]["rollout/kl"] != 0
