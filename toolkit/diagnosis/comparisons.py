"""What is compared with leyden's own parts during a run that has others, put together: rows, network, loss, update, state, waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.data.token_datamodule import TokenDataModule
from toolkit.collectives import WatchCollectives
from toolkit.diagnosis.case import Case
from toolkit.diagnosis.gradient_probes import OptimizerState
from toolkit.diagnosis.history import History
from toolkit.diagnosis.network_comparison import NetworkComparison
from toolkit.diagnosis.plain import PlainParts
from toolkit.diagnosis.row_comparison import RowComparison, read_ms
from toolkit.diagnosis.step_comparison import StateBetween, StepSize, UpdateComparison, state_of
from toolkit.initial_values import initial_values, is_random
from toolkit.intervals import length, union

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
        self._moments = OptimizerState()
        self._update: UpdateComparison | None = None
        self._network: NetworkComparison | None = None
        self._found: dict[str, float] = {}
        self._sizes: dict[str, float] = {}
        self._times = _RankTimes()
        self._tokens = 0
        self._first = trainer.global_step
        self._calls = self._extra = self._depth = 0
        self._size = StepSize(module)
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
            self._handles.append(optimizer.register_step_pre_hook(self._steps))
            self._handles.append(optimizer.register_step_post_hook(self._stepped))
        found = dict[str, float]()
        network = self.plain.network()
        self._network = NetworkComparison(self.module, network, *self.plain.objective())
        if network is not None and is_fresh and not self.plain.case.option("model.weights"):
            found |= initial_figures(self.module.network, network)
        data = self.trainer.datamodule
        if isinstance(data, TokenDataModule) and data.training_loader is not None:
            self.rows.start(cursor)
            if self.rows.batches is not None:
                found |= self.rows.of_validation(validation, size)
                found |= self._read_times()
        self._restored = list(state)
        return found

    def _read_times(self) -> dict[str, float]:
        """Returns how long a batch takes to read, in the run, on the rank that reads slowest, and with leyden's packing."""
        assert self.rows is not None
        data: Any = self.trainer.datamodule
        own = torch.tensor(read_ms(data.packed("train", **self.rows.order)), dtype=torch.float64)
        slowest = float(self.module.all_gather(own.to(self.module.device)).max())
        return {"time/read_ms": slowest, "time/plain_read_ms": self.rows.read_ms()}

    def _steps(self, *_: Any) -> None:
        if not self._depth:
            self._sizes |= (
                self._size.taken_back()
            )  # the closure of a step, with its hooks, is called within it
            if not (self.trainer.global_step + 1) % self.trainer.log_every_n_steps:
                self._size.begin()
        self._depth += 1

    def _stepped(self, *_: Any) -> None:
        self._depth -= 1  # `step` of a class may call that of its base, and each calls the hooks
        self._calls += not self._depth
        if not self._depth:
            self._sizes |= self._size.figures()

    def cursor(self) -> Any:
        """Returns where the next batch should begin."""
        return self.rows.position() if self.rows is not None else None

    def state(self) -> list[float]:
        """Returns numbers of what the optimizer keeps."""
        return state_of(self.trainer.optimizers[0]) if self.active else []

    def begin_batch(self, batch: Any) -> None:
        """Counts a batch, and ends the wait for it."""
        self._times.wait_ends()
        if self.rows is not None:
            self.rows.count()
            self._tokens += batch["input_ids"].numel() if "input_ids" in batch else 0

    def in_validation(self, batch: Any) -> dict[str, float]:
        """Returns figures of the first batch of a validation."""
        return self.rows.in_validation(batch) if self.rows is not None else {}

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
            update = UpdateComparison(self.plain, rates)
            self._update = update if update.is_complete() else None
            self._found = self._network.figures(batch) if self._network is not None else {}
        return found

    def after_step(self, batch: Any, is_logged: bool) -> dict[str, float]:
        """Returns the figures of a step; called after each."""
        ranks = self._of_ranks() if is_logged and self.trainer.world_size > 1 else {}
        if not self.active or self.rows is None:
            return ranks
        tokens, self._tokens = self._tokens, 0
        found, self._found, self._sizes = self._found | self._sizes, {}, {}
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
            moments = self._moments.figures(self.trainer.optimizers[0], step)
            found["doctor/moments_lost"] = moments["doctor/state_lost"]
        return found | ranks

    def _of_ranks(self) -> dict[str, float]:
        found = self._times.figures(self.module)
        self._times.begin()
        return found

    def pause(self) -> None:
        """Leaves the time until the next batch out."""
        self._times.stop()

    def close(self) -> None:
        """Takes its hooks away."""
        self._times.stop()
        for handle in self._handles:
            handle.remove()


class _RankTimes:
    """How long each rank works by itself, how long it waits for data in that, and how long it is in collectives, in the steps behind logged ones: from end to end."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._delayed = self._waited = 0.0
        self._waits: deque[Tensor] = deque(maxlen=STEPS)
        self._watch: WatchCollectives | None = None
        self._own: deque[Tensor] = deque(maxlen=STEPS)
        self._whole: deque[float] = deque(maxlen=STEPS)
        self._shared: deque[float] = deque(
            maxlen=STEPS
        )  # seconds in collectives of the rank that waits least

    def begin(self) -> None:
        """Begins to watch a step."""
        self._began, self._delayed, self._waited = time.monotonic(), _queued(), 0.0
        self._watch = WatchCollectives.start(time.monotonic)

    def wait_ends(self) -> None:
        """Ends the wait for the step's first batch."""
        if self._began is not None and not self._waited:
            self._waited = time.monotonic() - self._began

    def stop(self) -> tuple[float, float, float] | None:
        """Ends it; returns seconds of the step, of collectives, and those in which other programs had the core; None: it was not watched, or was interrupted."""
        began, watch, now = self._began, self._watch, time.monotonic()
        self._began = self._watch = None
        if began is None or watch is None:
            return None
        spans = union([(one.begin, one.end or now) for one in watch.collectives])
        watch.stop()
        return now - began, length(spans), _queued() - self._delayed

    def figures(self, module: Any) -> dict[str, float]:
        """Ends a step, and returns, of the last ones, how far the slowest rank is behind and the least share of collectives.

        Over the time of these steps: what the slowest rank works longer than the median one; and what a rank is in
        collectives, of the rank that has to wait least. `time/rank_waits` is what a rank waits longer for data than the median one.
        """
        found = self.stop()
        times = (0.0, 0.0, 0.0) if found is None else found
        own = torch.tensor((*times, self._waited), dtype=torch.float64)
        every = module.all_gather(own.to(module.device)).view(-1, 4).cpu()
        if not bool(every[:, 0].all()):
            return {}
        self._own.append((every[:, 0] - every[:, 1] - every[:, 2]).clamp(min=0))
        self._waits.append(every[:, 3])
        self._shared.append(float(every[:, 1].min()))
        self._whole.append(float(every[:, 0].median()))
        if len(self._own) < STEPS:
            return {}
        works, whole = torch.stack([*self._own]), sum(self._whole) - max(self._whole)
        works = works.sum(0) - works.amax(0)
        waits = torch.stack([*self._waits])
        waits = waits.sum(0) - waits.amax(0)
        return {
            "time/rank_behind": float(works.max() - works.median()) / whole,
            "time/rank_waits": float(waits.max() - waits.median()) / whole,
            "time/collectives_least": sum(self._shared) / sum(self._whole),
        }


def _queued() -> float:
    """Returns the seconds that this thread has waited for a core so far; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


STEPS = 12
"""Watched steps that are judged together; the longest of each rank is left out."""


@torch.no_grad()
def initial_figures(live: nn.Module, own: nn.Module) -> dict[str, float]:
    """Returns how initial weights differ from those of the configuration, of the parameter that differs most.

    `doctor/initial_size`: how many times as large or small; `doctor/initial_center`: their mean, in standard deviations;
    `doctor/initial_form`: the largest difference of their distribution functions, both at the same deviation;
    `doctor/initial_alike`: random parameters that are copies of others.
    """
    size, center, form, alike = 1.0, 0.0, 0.0, 0
    sums = dict[tuple[Any, ...], int]()
    starts = initial_values(own) or {}
    named = dict(live.named_parameters())
    for name, drawn in own.named_parameters():
        given = named[name]
        if not given.is_floating_point() or given.numel() < 16:
            continue
        a, b = given.detach().float().flatten(), drawn.detach().float().flatten()
        rms, usual = float(a.square().mean().sqrt()), float(b.square().mean().sqrt())
        if usual == 0 or not is_random(starts.get(name, 0.0)):
            if not torch.equal(a, b):
                size = max(size, 1 + float((a - b).square().mean().sqrt()) / max(usual, 0.1))
            continue
        if a.numel() < 256:
            continue
        key = (given.shape, float(a.double().sum()), float(a.double().abs().sum()))
        alike += sums.setdefault(key, 0)
        sums[key] = 1
        size = max(size, rms / usual, usual / max(rms, 1e-30))
        if given.ndim == 2 and rms > 0:
            loud, expected = (_largest_gain(one.detach().float()) for one in (given, drawn))
            size = max(size, loud / rms / (expected / usual) / 1.3)
        center = max(center, abs(float(a.mean() - b.mean())) / float(b.std()))
        form = max(form, _form(a / max(rms, 1e-30), b / usual))
    found = {"doctor/initial_size": size, "doctor/initial_center": center, "doctor/initial_form": form}
    return found | {"doctor/initial_alike": float(alike)}


def _largest_gain(matrix: Tensor) -> float:
    """Returns an estimate of the largest singular value: higher than usual where rows or columns are alike."""
    vector = torch.ones(matrix.shape[1], device=matrix.device)
    vector[::2] = -1.0
    for _ in range(12):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / vector.norm().clamp(min=1e-30)
    return float((matrix @ vector).norm())


def _form(one: Tensor, other: Tensor) -> float:
    one, other = one[:65_536].sort().values, other[:65_536].sort().values
    at = torch.linspace(-3, 3, 61, device=one.device)
    shares = [torch.searchsorted(each, at).double() / len(each) for each in (one, other)]
    return float((shares[0] - shares[1]).abs().max())
