"""ScheduleFreeAdamW in a run: what is evaluated and saved is the average, what goes on is not."""

import pytest
import torch
from lightning.pytorch import Callback
from schedulefree import AdamWScheduleFree

from core.language_module import LanguageModule
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from plugins.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from tests.support.tiny_training import trainer
from tests.support.toy import ToyData


def run(tmp_path, steps=12, ckpt_path=None, optimizer=None, **options):
    trained = LanguageModule(
        lambda: GPT(vocab_size=64, n_layer=1, n_head=2, n_embd=16, max_sequence_length=16), CausalLM(),
        lambda groups: (optimizer or ScheduleFreeAdamW)(groups, lr=0.05, warmup_steps=3),
    )  # fmt: skip
    torch.manual_seed(0)
    options = {"val_check_interval": 4, "check_val_every_n_epoch": None, "limit_val_batches": 2} | options
    runner = trainer(tmp_path, max_steps=steps, **options)
    runner.fit(trained, datamodule=ToyData(), ckpt_path=ckpt_path)
    return runner, trained


def test_checkpoints_hold_the_average_and_validation_evaluates_it(tmp_path):
    runner, trained = run(tmp_path)
    runner.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    in_training = {name: value.clone() for name, value in trained.state_dict().items()}
    runner.optimizers[0].eval()
    average = trained.state_dict()
    assert all(torch.equal(saved["state_dict"][name], average[name]) for name in average)
    assert all(torch.equal(saved["weights_in_training"][name], in_training[name]) for name in average)
    assert not torch.equal(
        saved["state_dict"]["network.norm.weight"], saved["weights_in_training"]["network.norm.weight"]
    )
    [again] = trainer(tmp_path, limit_val_batches=2).validate(trained, datamodule=ToyData(), verbose=False)
    assert float(runner.callback_metrics["val/loss"]) == again["val/loss"]


def test_looking_changes_nothing(tmp_path):
    _, looked = run(tmp_path)
    _, blind = run(tmp_path, limit_val_batches=0)
    assert all(torch.equal(a, b) for a, b in zip(looked.parameters(), blind.parameters(), strict=True))


def test_a_resumed_run_goes_on_bitwise_from_the_weights_in_training(tmp_path):
    runner, whole = run(tmp_path)
    first, _ = run(tmp_path, steps=5)
    first.save_checkpoint(tmp_path / "five.ckpt")
    second, resumed = run(tmp_path, ckpt_path=tmp_path / "five.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    one, other = (r.optimizers[0].param_groups[0] for r in (runner, second))
    assert {k: one[k] for k in ScheduleFreeAdamW.group_state} == {
        k: other[k] for k in ScheduleFreeAdamW.group_state
    }


class SavesInValidation(Callback):
    """Saves while the average is shown, as ModelCheckpoint does."""

    def __init__(self, path):
        self.path = path

    def on_validation_end(self, trainer, pl_module):
        if trainer.global_step == 8:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("optimizer", [None, AdamWScheduleFree], ids=["ours", "the package's own"])
def test_a_checkpoint_of_the_middle_of_a_validation_is_gone_on_from_bitwise(optimizer, tmp_path):
    path = tmp_path / "eight.ckpt"
    _, whole = run(tmp_path, callbacks=[SavesInValidation(path)], optimizer=optimizer)
    _, blind = run(tmp_path, limit_val_batches=0, optimizer=optimizer)
    _, resumed = run(tmp_path, ckpt_path=path, optimizer=optimizer)
    for other in (blind, resumed):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), whole.parameters(), strict=True))
