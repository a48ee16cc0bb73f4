"""What a checkpoint keeps of an optimizer, and which of a group's values a resumed run takes from its configuration."""

from functools import partial

import pytest
import torch
from pytorch_optimizer import Prodigy
from schedulefree import AdamWScheduleFree

from core.language_module import LanguageModule
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from plugins.schedules.warmup_cosine import WarmupCosine
from tests.support.tiny_training import trainer
from tests.support.toy import ToyData

FIVE = "five.ckpt"


def run(tmp_path, optimizer, steps=10, ckpt_path=None, schedule=None):
    trained = LanguageModule(
        lambda: GPT(vocab_size=64, n_layer=1, n_head=2, n_embd=16, max_sequence_length=16),
        CausalLM(),
        optimizer,
        schedule,
    )
    torch.manual_seed(0)
    runner = trainer(tmp_path, max_steps=steps, limit_val_batches=0)
    runner.fit(trained, datamodule=ToyData(), ckpt_path=ckpt_path)
    return trained, runner.optimizers[0]


def five_steps(tmp_path, optimizer):
    trained, _ = run(tmp_path, optimizer, steps=5)
    trained.trainer.save_checkpoint(tmp_path / FIVE)
    return tmp_path / FIVE


def settings(optimizer):
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as a tensor that is there from the start and changes in place."""

    def __init__(self, params, lr, decay):
        super().__init__(params, lr)
        for group in self.param_groups:
            group |= {"decays": [decay], "made": torch.zeros(2)}

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["made"] += 1
            group["lr"] *= group["decays"][0]
        return loss


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(Prodigy, d0=1e-4, d_coef=1000.0, weight_decay=0.1, bias_correction=True),
        partial(AdamWScheduleFree, lr=0.05, warmup_steps=3),
        partial(Counting, lr=0.5, decay=0.9),
    ],
    ids=["Prodigy", "schedule-free", "counting"],
)
def test_what_a_third_partys_optimizer_keeps_in_its_groups_goes_on(optimizer, tmp_path):
    whole, expected = run(tmp_path, optimizer)
    resumed, found = run(tmp_path, optimizer, ckpt_path=five_steps(tmp_path, optimizer))
    assert str(settings(found)) == str(settings(expected))
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "an older checkpoint"])
def test_only_arguments_are_taken_as_written(stored, tmp_path):
    path = five_steps(tmp_path, partial(Prodigy, d0=1e-4, d_coef=1000.0, weight_decay=0.1))
    checkpoint = read_checkpoint(path)
    if not stored:
        del checkpoint["language_module"]["groups"]
        path = tmp_path / "older.ckpt"
        torch.save(checkpoint, path)
    saved = checkpoint["optimizer_states"][0]["param_groups"][0]
    assert saved["d"] > saved["d0"] == 1e-4
    _, found = run(
        tmp_path, partial(Prodigy, d0=1e-2, d_coef=1000.0, weight_decay=0.3), steps=6, ckpt_path=path
    )
    for group, decay in zip(settings(found), (0.3, 0.0), strict=True):
        assert group["weight_decay"] == decay
        assert group["step"] == saved["step"] + 1
        assert group["d0"] == 1e-2 > group["d"] >= saved["d"]


def test_a_rate_that_training_lowered_without_a_schedule_stays_unless_another_is_written(tmp_path):
    path = five_steps(tmp_path, partial(Counting, lr=0.5, decay=0.9))
    for written, expected in {0.5: 0.5 * 0.9**5, 0.4: 0.4}.items():
        _, found = run(tmp_path, partial(Counting, lr=written, decay=0.8), steps=6, ckpt_path=path)
        for group in settings(found):
            assert group["lr"] == pytest.approx(expected * 0.8)
            assert group["decays"] == [0.8]
            assert group["made"].tolist() == [6, 6]


def test_a_rate_under_a_schedule_is_computed_from_what_is_written(tmp_path):
    schedule = partial(WarmupCosine, warmup_steps=0)
    trained, _ = run(tmp_path, partial(torch.optim.SGD, lr=0.5), steps=5, schedule=schedule)
    trained.trainer.save_checkpoint(tmp_path / FIVE)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    _, found = run(tmp_path, optimizer, steps=6, ckpt_path=tmp_path / FIVE, schedule=schedule)
    _, expected = run(tmp_path, optimizer, steps=6, schedule=schedule)
    assert [group["lr"] for group in found.param_groups] == [group["lr"] for group in expected.param_groups]
