"""Bytes and bandwidth of the collectives of a step."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import technique
from core.training.figures import log_figures
from toolkit.collectives import COLLECTIVES, Collective, WatchCollectives
from toolkit.intervals import length, union
from toolkit.phase_clock import PhaseClock, seconds_between


@technique(
    paper="what each strategy communicates: ZeRO, arXiv:1910.02054, section 7; bandwidth as in nccl-tests (algorithm "
    "bandwidth)",
    observer=True,
)
class CollectiveMonitor(Callback):
    """Calls, bytes and bandwidth of each kind of collective in a step, under any strategy.

    Of every `every_n_steps`-th optimizer step, for `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`,
    `send` and `recv`, where there are some:

    - `collectives/<kind>_calls` and `collectives/<kind>_bytes`: of the mean rank. Bytes are those of the tensor that is reduced or
      sent, and of the whole tensor where it is gathered or scattered. `DDP` reduces the bytes of all gradients once; `FSDP` gathers
      the weights once or twice and scatters the gradients, once for each micro-batch.
    - `collectives/<kind>_gb_per_second`: these bytes over the time in which at least one was under way, on the rank that
      waited least for the others; 10**9 bytes. For send and recv, and where torch does not say when they end, it is left out.

    The step takes longer, as each operator is seen; all others cost nothing. With one process nothing is logged. Collectives
    inside of a compiled graph, and those of DeepSpeed that go past torch, are not seen.

    Args:
        every_n_steps: Optimizer steps between two that are monitored.

    Raises:
        ConfigError: If `every_n_steps` is below 1.

    Example:
        trainer:
          callbacks+:
            - class_path: CollectiveMonitor
              init_args: {every_n_steps: 100}
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"CollectiveMonitor takes every_n_steps >= 1, not {every_n_steps}.")
        self.every_n_steps = every_n_steps
        self._watch: WatchCollectives | None = None
        self._began, self._tried = 0, -1

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins with the first micro-batch of a step that is due."""
        due = not (trainer.global_step + 1) % self.every_n_steps and trainer.global_step != self._tried
        if due and trainer.world_size > 1:
            self._tried = trainer.global_step
            self._watch = WatchCollectives.start(PhaseClock(pl_module.device).now)
            self._began = len(self._watch.collectives) if self._watch else 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the step with its last micro-batch."""
        if self._watch is None or is_accumulating(trainer):
            return
        watch, self._watch = self._watch, None
        found = watch.collectives[self._began :]
        watch.stop()
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        sums = [of_kind(found, kind) for kind in COLLECTIVES]
        own = torch.tensor(sums, dtype=torch.float64, device=pl_module.device)
        ranks = torch.as_tensor(pl_module.all_gather(own)).view(trainer.world_size, len(COLLECTIVES), 3)
        log_figures(trainer, figures(ranks.double().cpu()))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops watching where a step breaks off."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


def of_kind(collectives: list[Collective], kind: str) -> tuple[float, float, float]:
    """Returns calls, bytes, and seconds in which one was under way; 0 seconds: not known."""
    found = [each for each in collectives if each.name == kind]
    seconds = 0.0
    if found and all(each.end is not None for each in found):
        first = found[0].begin
        seconds = length(
            union([(seconds_between(first, each.begin), seconds_between(first, each.end)) for each in found])
        )
    return float(len(found)), float(sum(each.bytes for each in found)), seconds


def figures(ranks: torch.Tensor) -> dict[str, float]:
    """Returns what is logged.

    Args:
        ranks: Calls, bytes and seconds of each kind on each rank, (ranks, kinds, 3).
    """
    found: dict[str, float] = {}
    for kind, (calls, size, _), seconds in zip(
        COLLECTIVES, ranks.mean(0).tolist(), ranks[..., 2].T.tolist(), strict=True
    ):
        if calls:
            found |= {f"collectives/{kind}_calls": calls, f"collectives/{kind}_bytes": size}
            if least := min((each for each in seconds if each), default=0.0):
                found[f"collectives/{kind}_gb_per_second"] = size / least / 1e9
    return found
