"""What is compared with leyden's own parts during a run that has others, put together: rows, network, loss, update, state, waiting."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.collectives import WatchCollectives
from toolkit.diagnosis.case import Case
from toolkit.diagnosis.history import History
from toolkit.diagnosis.network_comparison import NetworkComparison
from toolkit.diagnosis.plain import PlainParts
from toolkit.diagnosis.row_comparison import RowComparison
from toolkit.diagnosis.step_comparison import StateBetween, UpdateComparison, state_of
from toolkit.initial_values import initial_values

__all__ = ["Comparisons"]


class Comparisons:
    """Compares; where a run has no part that is not leyden's, or one of leyden's changes what is compared, it does nothing.

    Args:
        config: The run's configuration.
        trainer: Its trainer.
        module: Its LanguageModule.
        whole: Whether every process has all weights.
    """

    def __init__(self, config: Mapping[str, Any], trainer: Any, module: Any, whole: bool) -> None:
        self.trainer, self.module = trainer, module
        self.plain = PlainParts(Case(History(), config), trainer, module)
        self.active = whole and self.plain.compares
        self.rows = RowComparison(self.plain) if self.active else None
        self._between = StateBetween()
        self._update: UpdateComparison | None = None
        self._network: NetworkComparison | None = None
        self._found: dict[str, float] = {}
        self._waits = _Waits()
        self._tokens = 0
        self._first = trainer.global_step
        self._calls = self._extra = 0
        self._handles: list[Any] = []

    def start(
        self, is_fresh: bool, cursor: Any, state: Sequence[float], validation: Sequence[Any], size: int
    ) -> dict[str, float]:
        """Returns figures of the initial weights and of validation rows.

        Args:
            is_fresh: Whether the weights are initial ones.
            cursor: Where the next batch begins, of a run that is resumed.
            state: What `state` returned when its checkpoint was written.
            validation: Its first validation batches.
            size: Their rows.
        """
        if not self.active or self.rows is None:
            return {}
        optimizer: Any = self.trainer.optimizers[0]
        if isinstance(optimizer, torch.optim.Optimizer):
            self._handles.append(optimizer.register_step_post_hook(self._stepped))
        found = dict[str, float]()
        network = self.plain.network()
        if network is not None:
            self._network = NetworkComparison(self.module, network, self.plain.objective())
            if is_fresh and not self.plain.case.option("model.weights"):
                found |= initial_figures(self.module.network, network)
        if self.trainer.datamodule.training_loader is not None:
            self.rows.start(cursor)
            if self.rows.batches is not None:
                found |= self.rows.of_validation(validation, size)
        self._restored = list(state)
        return found

    def _stepped(self, *_: Any) -> None:
        self._calls += 1

    def cursor(self) -> Any:
        """Returns where the next batch should begin."""
        return self.rows.position() if self.rows is not None else None

    def state(self) -> list[float]:
        """Returns numbers of what the optimizer keeps."""
        return state_of(self.trainer.optimizers[0]) if self.active else []

    def begin_batch(self, batch: Any) -> None:
        """Counts a batch."""
        if self.rows is not None:
            self.rows.count()
            self._waits.begin()
            self._tokens += batch["input_ids"].numel() if "input_ids" in batch else 0

    def before_step(self, batch: Any) -> dict[str, float]:
        """Returns what has changed since the last step, if that was a logged one, and since a checkpoint.

        Args:
            batch: A few rows of the step, where it is examined; else None.
        """
        if not self.active:
            return {}
        optimizer, step = self.trainer.optimizers[0], self.trainer.global_step
        found = self._between.compare(step, self.module, optimizer)
        if restored := self.__dict__.pop("_restored", None):
            now = state_of(optimizer)
            same = len(now) == len(restored) and all(
                abs(a - b) <= 1e-3 * max(a, b) for a, b in zip(now, restored, strict=True)
            )
            found |= {"doctor/state_not_restored": 1.0 - same, "doctor/resumed": 1.0}
        if batch is not None:
            rates = self.plain.rates(step, self._tokens * max(self.trainer.world_size, 1))
            self._update = UpdateComparison(self.plain, rates)
            self._found = self._network.figures(batch) if self._network is not None else {}
        return found

    def after_step(self, batch: Any, is_logged: bool) -> dict[str, float]:
        """Returns the figures of a step; called after each."""
        if not self.active or self.rows is None:
            return {}
        tokens, self._tokens = self._tokens, 0
        found, self._found = self._found, {}
        update, self._update = self._update, None
        if update is not None:
            found |= update.figures()
        if is_logged:
            step = self.trainer.global_step
            found |= self.rows.figures(batch)
            rates = self.plain.rates(step - 1, tokens * max(self.trainer.world_size, 1))
            if rates is not None:
                found["doctor/plain_rate"] = rates[0]
            extra = self._calls - (step - self._first)
            found["doctor/steps_more"] = float(extra - self._extra)
            self._extra = extra
            self._between.keep(step, self.module, self.trainer.optimizers[0])
            found |= self._waits.figures(self.module)
        self._waits.end(is_logged and self.trainer.world_size > 1)
        return found

    def pause(self) -> None:
        """Leaves the time until the next batch out."""
        self._waits.pause()

    def close(self) -> None:
        """Takes its hooks away."""
        self._waits.pause()
        for handle in self._handles:
            handle.remove()


class _Waits:
    """How long this rank waits from the end of a batch to the beginning of the next one, and for collectives in that time."""

    def __init__(self) -> None:
        self._ended = self._began = 0.0
        self._waited = self._collective = 0.0
        self._watch: WatchCollectives | None = None

    def begin(self) -> None:
        now = time.monotonic()
        if self._ended:
            self._waited += now - self._ended
        self._began, self._ended = self._began or now, 0.0
        self._stop()

    def end(self, watch: bool) -> None:
        self._ended = time.monotonic()
        if watch:
            self._watch = WatchCollectives.start(time.monotonic)

    def pause(self) -> None:
        self._ended = 0.0
        self._stop()

    def _stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            now = time.monotonic()
            self._collective += sum((one.end or now) - one.begin for one in watch.collectives)
            watch.stop()

    def figures(self, module: Any) -> dict[str, float]:
        """Returns shares of the time since the last logged step: of waiting by rank, and for collectives."""
        now = time.monotonic()
        whole = now - self._began if self._began else 0.0
        own = torch.tensor([self._waited, self._collective, whole], dtype=torch.float64)
        self._waited = self._collective = 0.0
        self._began = now
        if module.trainer.world_size == 1 or whole <= 0:
            return {}
        every = module.all_gather(own.to(module.device)).view(-1, 3).cpu()
        length = float(every[:, 2].median())
        return {
            "time/wait_apart": float(every[:, 0].max() - every[:, 0].min()) / max(length, 1e-9),
            "time/between_collectives": float(every[:, 1].mean()) / max(length, 1e-9),
        }


@torch.no_grad()
def initial_figures(live: nn.Module, own: nn.Module) -> dict[str, float]:
    """Returns how initial weights differ from those of the configuration, of the parameter that differs most.

    `doctor/initial_size`: how many times as large or small; `doctor/initial_center`: their mean, in standard deviations;
    `doctor/initial_form`: the largest difference of their distribution functions, both at the same deviation.
    """
    size, center, form = 1.0, 0.0, 0.0
    starts = initial_values(own) or {}
    for (name, given), (_, drawn) in zip(live.named_parameters(), own.named_parameters(), strict=True):
        if not given.is_floating_point() or given.numel() < 16:
            continue
        a, b = given.detach().float().flatten(), drawn.detach().float().flatten()
        rms, usual = float(a.square().mean().sqrt()), float(b.square().mean().sqrt())
        if usual == 0 or not callable(starts.get(name, 0.0)):
            if not torch.equal(a, b):
                size = max(size, 1 + float((a - b).square().mean().sqrt()) / max(usual, 0.1))
            continue
        if a.numel() < 256:
            continue
        size = max(size, rms / usual, usual / max(rms, 1e-30))
        center = max(center, abs(float(a.mean() - b.mean())) / float(b.std()))
        form = max(form, _form(a / max(rms, 1e-30), b / usual))
    return {"doctor/initial_size": size, "doctor/initial_center": center, "doctor/initial_form": form}


def _form(one: Tensor, other: Tensor) -> float:
    one, other = one[:65_536].sort().values, other[:65_536].sort().values
    at = torch.linspace(-3, 3, 61, device=one.device)
    shares = [torch.searchsorted(each, at).double() / len(each) for each in (one, other)]
    return float((shares[0] - shares[1]).abs().max())
