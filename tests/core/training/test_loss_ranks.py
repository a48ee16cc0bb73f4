"""A strategy is asked once a run what it offers, however many steps there are, and what it offers is used."""

from copy import deepcopy

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from core.language_module import LanguageModule
from core.training.loss_ranks import dp_group, dp_rank, dp_size, gradient_norm, scale_gradients
from core.training.shards import total_norm
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from tests.support.toy import ToyData


class Asked(SingleDeviceStrategy):
    """Counts how often it is asked for what it offers; its gradients look twice as long as they are."""

    def __init__(self):
        super().__init__("cpu")
        self.asked, self.factors = [], []

    @property
    def gradient_norm(self):
        self.asked.append("gradient_norm")
        return lambda optimizer: torch.tensor(2.0)

    @property
    def scale_gradients(self):
        self.asked.append("scale_gradients")
        return lambda optimizer, factor: self.factors.append(factor)


class Asking(Callback):
    """Asks in every step what callbacks may ask."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert float(pl_module.gradient_norm(optimizer)) == float(gradient_norm(trainer, optimizer)) == 2.0
        scale_gradients(trainer, optimizer, torch.tensor(0.5))
        assert (dp_group(trainer), dp_rank(trainer), dp_size(trainer)) == (None, 0, 1)


def fit(steps, tmp_path):
    strategy = Asked()
    module = LanguageModule(
        lambda: GPT(vocab_size=64, n_layer=1, n_head=1, n_embd=8, max_sequence_length=16),
        CausalLM(),
        lambda groups: torch.optim.SGD(groups, lr=0.1),
    )
    Trainer(
        accelerator="cpu", strategy=strategy, max_steps=steps, callbacks=[Asking()], logger=False, 
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, limit_val_batches=0,
        log_every_n_steps=1, default_root_dir=tmp_path, gradient_clip_val=1.0,
    ).fit(module, datamodule=ToyData())  # fmt: skip
    return strategy, module


def test_a_strategy_is_asked_once_a_run(tmp_path):
    (two, _), (six, module) = fit(2, tmp_path), fit(6, tmp_path)
    assert two.asked == six.asked
    assert set(two.asked) == {"gradient_norm", "scale_gradients"}
    assert len(six.factors) == 6
    assert module.loss_ranks.strategy is six
    assert deepcopy(module).loss_ranks is None  # as Lightning's WeightAveraging copies it


def test_what_is_asked_before_a_run_is_answered_too(tmp_path):
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    trainer.strategy.connect(LanguageModule(lambda: None, CausalLM(), torch.optim.SGD))
    assert (dp_group(trainer), dp_rank(trainer), dp_size(trainer)) == (None, 0, 1)


def test_the_norm_of_no_gradient_is_zero():
    """As of an optimizer whose parameters are not those of the model."""
    assert total_norm([]) == 0
    assert total_norm([torch.tensor([3.0]), torch.tensor([4.0])]) == 5
