"""Entropy of attention, and growth of logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from core.errors import ConfigError
from core.technique import technique
from core.training.figures import log_figures
from core.training.shards import local_tensors
from toolkit.attention_scores import AttendsThroughFunction, add_statistics, listen_to, spaced
from toolkit.network_parts import block_modules
from toolkit.sampled_steps import Handle, SampledSteps, in_training_forward
from toolkit.shards import SplitsTokens

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="attention entropy: arXiv:2303.06296, section 3; growth of logits: arXiv:2302.05442, section 3, arXiv:2309.14322, 3.1",
    observer=True,
)
class AttentionMonitor(SampledSteps):
    """Logs the entropy of attention and the largest logit in each block, and the largest output logit.

    In every `every_n_steps`th optimizer step, over all its rows, micro-batches and ranks: `attention/block.<i>/entropy`, of
    the weights of a query in nats, mean over queries and heads; `attention/block.<i>/max_logit`, what the softmax is
    given (scaled, with soft cap and bias) of the keys that a query sees; and `logits/max`, the largest magnitude of an
    output logit. A falling entropy with rising logits is the collapse of attention that ends in a divergence.

    They are computed from the queries and keys of the step, as the kernels return neither, in float32, for `queries` evenly
    spaced positions of each row. Grouped heads, soft caps, windows, masks of documents and biases count as in the network.
    A block without softmax attention has no figures. There are hooks in the monitored step alone: all others cost nothing. Under
    context parallelism each rank of a group gathers the keys of all tokens of its rows in it, one block at a time.

    Args:
        every_n_steps: Optimizer steps between two that are monitored.
        queries: About how many positions of each row are looked at.

    Raises:
        ConfigError: If a number is below 1, or the network has no block whose attention can be listened to.

    Example:
        trainer:
          callbacks+:
            - class_path: AttentionMonitor
              init_args: {every_n_steps: 50}
    """

    def __init__(self, every_n_steps: int = 50, queries: int = 32) -> None:
        super().__init__(every_n_steps)
        if queries < 1:
            raise ConfigError(f"AttentionMonitor takes queries >= 1, not {queries}.")
        self.queries = queries
        self._sums = self._largest = torch.zeros(0)
        self._splits: SplitsTokens | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields where it could hear no call."""
        for item in run.selected:
            if item.name == "ActivationCheckpointing" and item.arguments.get("memory_budget") is not None:
                yield (
                    "nothing can be heard in blocks that ActivationCheckpointing compiles: leave its memory_budget out, or "
                    "AttentionMonitor"
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that the network has attention that can be listened to."""
        network: Any = pl_module.network
        there = [module for _, module in _attentions(network) if isinstance(module, AttendsThroughFunction)]
        number = torch.tensor(float(len(there)), device=pl_module.device)
        if trainer.world_size > 1:  # a stage of a pipeline may have none
            number = trainer.strategy.reduce(number, reduce_op="sum")  # type: ignore[assignment]
        if not number:
            raise ConfigError(
                f"AttentionMonitor: {type(network).__name__} does not say where it attends; GPT and the networks beside it do."
                "\nA network of your own offers toolkit.network_parts.NamesParts and "
                "toolkit.attention_scores.AttendsThroughFunction."
            )

    def listen(self, trainer: Trainer, pl_module: LightningModule) -> Sequence[Handle]:
        """Listens to the attention of each block and to what the network returns."""
        network: Any = pl_module.network
        self._splits = trainer.strategy if isinstance(trainer.strategy, SplitsTokens) else None
        blocks, device = len(network.blocks), pl_module.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(blocks, 2, dtype=wide, device=device)
        self._largest = torch.full((blocks + 1,), -torch.inf, device=device)
        handles = [
            listen_to(module, partial(self._attended, index, module))
            for index, module in _attentions(network)
            if isinstance(module, AttendsThroughFunction)
        ]
        return [*handles, network.register_forward_hook(self._returned)]

    def report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the figures over all ranks."""
        sums, largest = self._sums, self._largest
        if trainer.world_size > 1:  # what several ranks have counts several times, in sums and numbers alike
            sums = trainer.strategy.reduce(sums, reduce_op="sum")  # type: ignore[assignment]
            largest = trainer.strategy.reduce(largest, reduce_op="max")  # type: ignore[assignment]
        found: dict[str, float] = {}
        *maxima, output = largest.tolist()
        for index, ((entropy, number), logit) in enumerate(zip(sums.tolist(), maxima, strict=True)):
            if number:
                found[f"attention/block.{index}/entropy"] = entropy / number
                found[f"attention/block.{index}/max_logit"] = logit
        if output >= 0:
            found["logits/max"] = output
        log_figures(trainer, found)

    def _attended(
        self, index: int, module: Any, q: Tensor, k: Tensor, mask: Any, is_causal: bool, scale: float
    ) -> None:
        if in_training_forward(module) and not q.is_meta:  # a pipeline asks for shapes on the meta device
            sums, largest = self._sums[index], self._largest[index]
            if self._splits is not None:
                q, k = (self._splits.all_tokens(x, dim=2) for x in local_tensors((q, k)))
                mask = mask if (ids := self._splits.row_documents) is None else _OfDocuments(ids)
            add_statistics(sums, largest, q, k, mask, is_causal, scale, module.soft_cap, queries=self.queries)

    def _returned(self, network: Any, inputs: Any, hidden: Tensor) -> None:
        if not in_training_forward(network):
            return
        with torch.no_grad():
            if self._splits is not None:
                hidden = self._splits.all_tokens(hidden)
            logits = network.logits(hidden[:, spaced(hidden.shape[1], self.queries)])
            for own in local_tensors([logits]):
                self._largest[-1] = torch.maximum(self._largest[-1], own.abs().max().float())


class _OfDocuments:
    """A mask, as FlexAttention's are asked, by which tokens see those of their document (B, T)."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def mask_mod(self, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Returns which keys some queries see."""
        return self.ids[row, query] == self.ids[row, key]


def _attentions(network: Any) -> Iterator[tuple[int, nn.Module]]:
    return block_modules(network, "attention")
