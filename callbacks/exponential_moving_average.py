"""An exponential moving average of the weights, evaluated beside them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from core.contracts import RunsAsForward, SavesParts, TokenSum
from core.errors import ConfigError
from core.technique import technique
from core.training.shards import full_tensor, local_tensors, reshard
from core.training.token_sums import TokenSums
from toolkit.shards import ReadsItself, copy_to_shard


@technique(
    paper="Polyak averaging; decay and its warm-up as in Inception, arXiv:1512.00567, section 8, and TensorFlow"
)
class ExponentialMovingAverage(Callback):
    """Keeps an exponential moving average of the weights and logs its validation loss, `val/ema_loss`.

    After optimizer step n the average is d * average + (1 - d) * weights, where d is the smaller of `decay` and
    n / (n + 9): early in the run it forgets the initial weights quickly. It needs as much memory as the weights, and a
    second forward pass in validation. Each rank averages its shard of the weights.

    Args:
        decay: The largest d; 0 to below 1.
        every_n_steps: Optimizer steps from one update to the next.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: ExponentialMovingAverage
              init_args: {decay: 0.999}
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1) -> None:
        if not 0 <= decay < 1 or every_n_steps < 1:
            raise ConfigError(
                "ExponentialMovingAverage takes decay from 0 to below 1 and every_n_steps from 1 upwards, "
                f"not {decay} and {every_n_steps}."
            )
        self.decay, self.every_n_steps = decay, every_n_steps
        self._averages: dict[str, Tensor] = {}
        self._restored: dict[str, Tensor | ReadsItself] = {}
        self._updates = self._step = 0
        self._holders, self._all_sharded = [0], False
        self._sums = TokenSums()

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the averages on the host; of sharded ones this rank's shards."""
        averages = {name: value.to("cpu", copy=True) for name, value in self._averages.items()}
        return {"averages": averages or self._restored, "updates": self._updates, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them when training starts, or at once if it has started."""
        self._restored, self._updates = dict(state_dict["averages"]), state_dict["updates"]
        self._step = state_dict.get("step", 0)
        self._take_restored()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Gathers averages on rank 0, one by one, unless each rank writes its shard of them; called on every rank."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if not (state and self._averages):
            return
        writes_shards = isinstance(trainer.strategy.checkpoint_io, SavesParts)
        shards, whole = {}, {}
        for name, average in self._averages.items():
            if writes_shards and hasattr(average, "to_local"):
                shards[name] = state["averages"][name]
                continue
            full = full_tensor(average)
            if trainer.global_rank in self._holders:
                whole[name] = full.to("cpu", copy=True)
        apart = len(self._holders) > 1 and not (writes_shards and self._all_sharded)
        state["averages"] = shards | (_joined(whole) if apart else whole)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Begins with the weights as they are, or with what was restored."""
        self._step = trainer.global_step
        reshard(pl_module)  # after a sanity check the weights are still gathered
        named = pl_module.network.named_parameters()
        parameters = {name: p for name, p in named if p.requires_grad}  # the others stay as they are
        self._averages = {name: p.detach().clone() for name, p in parameters.items()}
        self._holders, self._all_sharded = _holders(self._averages)
        self._take_restored()
        self._pairs = (
            local_tensors(self._averages.values()),
            local_tensors(p.detach() for p in parameters.values()),
        )

    def _take_restored(self) -> None:
        for name, average in self._averages.items():
            if name in self._restored:
                copy_to_shard(average, self._restored[name])
        if self._averages:
            self._restored = {}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the averages after every `every_n_steps`-th optimizer step."""
        step = trainer.global_step
        if step == self._step or step % self.every_n_steps:
            return
        self._step, self._updates = step, self._updates + 1
        weight = 1 - min(self.decay, self._updates / (self._updates + 9))
        torch._foreach_lerp_(*self._pairs, weight)

    @contextmanager
    def averaged(self, module: LightningModule) -> Iterator[None]:
        """Puts the averages into the network of a module for a while."""
        averages, weights = self._pairs
        with torch.no_grad():
            own = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, averages)
        reshard(module)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, own)
            reshard(module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        loader: int = 0,
    ) -> None:
        """Evaluates the averages on the batch that the weights have just been evaluated on."""
        if self._averages and not trainer.sanity_checking:
            with self.averaged(pl_module), trainer.precision_plugin.val_step_context():
                loss = _loss_of(trainer, pl_module, batch)
            self._sums.add({"loss": loss})

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Logs the averages' loss."""
        if not self._averages or trainer.sanity_checking:
            return
        means, _ = self._sums.means(pl_module.sum_over_ranks)
        for logger in trainer.loggers:
            logger.log_metrics({"val/ema_loss": means["loss"]}, step=trainer.global_step)
        trainer.callback_metrics["val/ema_loss"] = torch.tensor(means["loss"], dtype=torch.float64)


def _holders(averages: dict[str, Tensor]) -> tuple[list[int], bool]:
    """Returns the first rank of each stage of a pipeline, which have averages of different names, otherwise the first rank;
    and whether all averages of all ranks are sharded. Called on every rank.
    """
    if not dist.is_initialized():
        return [0], False
    found: list[Any] = [None] * dist.get_world_size()
    all_sharded = all(hasattr(average, "to_local") for average in averages.values())
    dist.all_gather_object(found, (zlib.crc32("\n".join(averages).encode()), all_sharded))
    names = [name for name, _ in found]
    return [names.index(one) for one in dict.fromkeys(names)], all(sharded for _, sharded in found)


def _joined(averages: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the averages of all ranks on the first one, nothing on others; called on every rank."""
    found: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    main = dist.get_rank() == 0
    dist.gather_object(averages, found if main else None)
    return {name: average for part in found for name, average in part.items()} if main else {}


def _loss_of(trainer: Trainer, module: Any, batch: Any) -> TokenSum:
    """Returns the loss of a batch; outside of Lightning's steps, FSDP gathers weights only as this asks it to."""
    strategy: Any = trainer.strategy
    if isinstance(strategy, RunsAsForward):
        loss: TokenSum = strategy.run_as_forward("compute_loss", batch)[0]
    else:
        loss = module.compute_loss(batch)[0]
    return loss
