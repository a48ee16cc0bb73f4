"""A small task with a reward that a random network gets half of, and runs on it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from callbacks.rollouts import Rollouts
from core.contracts import Network, TokenSum
from core.technique import technique
from datamodules.prompt_datamodule import PromptDataModule
from plugins.networks.gpt import GPT
from plugins.objectives.ppo import PPO
from tests.support.records import build
from tests.support.tiny_training import module, tiny_gpt, trainer
from toolkit.answers import Answer, Sampler, sample_answers
from toolkit.log_probabilities import log_probabilities
from toolkit.rewards import Reward, Sample
from toolkit.rollouts import OLD, REWARDS

VOCAB = 264


class LowTokens(Reward):
    """The share of an answer's tokens whose id is below a limit.

    Args:
        below: The limit; half of the vocabulary by default.
    """

    def __init__(self, below: int = VOCAB // 2) -> None:
        self.below = below

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns the shares; 0 for an answer without tokens."""
        ids = [sample.answer_ids for sample in samples]
        return [sum(id < self.below for id in one) / max(len(one), 1) for one in ids]


class Narrow(Sampler):
    """A copy of the network in bf16."""

    def sample(self, network: Network, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        """Returns the copy's answers."""
        return sample_answers(copy.deepcopy(network).bfloat16(), prompts, **options)


END = 0
"""The token that ends a text."""


class Brief(GPT):
    """Ends half of its answers at each token, so that ranks generate different numbers of them."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits with that of the end raised."""
        found = super().logits(hidden)
        raised = torch.zeros(found.shape[-1], device=found.device, dtype=found.dtype)
        raised[END] = 5.6  # the logarithm of the other tokens' number
        return found + raised


class Figures(Callback):
    """Keeps the figures of each logged step."""

    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes what was logged."""
        if pl_module.logging_step:
            self.figures.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def prompts(count=40):
    """Returns records of prompts of different lengths, with an answer that no network sees."""
    return [{"prompt": f"{'?' * (n % 5)}{n}: ", "answer": str(n)} for n in range(count)]


def network(**changes):
    """Returns a small GPT for the task."""
    return tiny_gpt(**({"vocab_size": VOCAB, "max_sequence_length": 32, "bias": False} | changes))


def on_policy(
    folder,
    objective,
    steps,
    *,
    lr=1e-2,
    ckpt_path=None,
    callbacks=(),
    batch_size=4,
    rollouts=None,
    seed=0,
    sgd=False,
    **options,
):
    """Trains on the task; returns the trainer, the module and the recorded figures."""
    given = {"reward": LowTokens(), "samples": 4, "max_new_tokens": 8} | (rollouts or {})
    data = build(
        PromptDataModule, folder, prompts(), template="plain", sequence_length=16, batch_size=batch_size
    )
    torch.manual_seed(seed)
    kind = torch.optim.SGD if sgd else torch.optim.Adam
    trained = module(network, objective=objective, optimizer=lambda groups: kind(groups, lr=lr))
    trained.seed = seed
    record = Figures()
    runner = trainer(folder, max_steps=steps, callbacks=[Rollouts(**given), record, *callbacks], **options)
    runner.fit(trained, datamodule=data, ckpt_path=ckpt_path)
    return runner, trained, record.figures


@technique(paper="a test", offers=("learns_from_rollouts",))
class Ratios(PPO):
    """Keeps the largest distance of the ratio from 1 in each step, logs its sum, and keeps the answers."""

    def __init__(self, kl: float = 0.1, kl_target: float | None = None) -> None:
        super().__init__(kl=kl, kl_target=kl_target)
        self.found: list[float] = []
        self.rows: list[dict[str, Any]] = []

    def policy_loss(
        self, network: Network, batch: Mapping[str, Tensor]
    ) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the loss of PPO."""
        with torch.no_grad():
            apart = (log_probabilities(network, batch) - batch[OLD]).exp() - 1
        self.found.append(float(apart.abs().max()))
        self.rows.append({name: batch[name].tolist() for name in ("input_ids", "labels", REWARDS)})
        loss, figures = super().policy_loss(network, batch)
        return loss, figures | {"apart": TokenSum(apart.abs().sum(), loss.tokens)}
