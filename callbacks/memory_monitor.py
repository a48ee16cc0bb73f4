"""Which tensors take memory during a step: figures by class, and a picture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from core.contracts import PausesClock
from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import technique
from core.training.figures import log_figures
from toolkit import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = {
    "parameters": ("Parameter", "Buffer"),
    "optimizer_state": ("Optstate",),
    "gradients": ("Gradient",),
    "activations": ("Activation",),
    "other": ("Temp", "Other"),
}
"""Our classes, in the order in which they are stacked -> those of MemTracker."""

COLOURS = ("tab:blue", "tab:purple", "tab:green", "tab:orange", "0.7")
ALLOCATOR = ("reserved", "allocated", "inactive_split")
MIB = 2**20
MAX_POINTS = 4000


class Timeline(MemTracker):
    """Notes after each operator how many bytes the tensors of each class take on one device.

    Attributes:
        points: One (bytes of each of `CLASSES`, whether it is in backward) for each operator.
        backward_seen: Whether backward began since this was last set to False, as it is for each micro-batch.
    """

    def __init__(self, module: LightningModule) -> None:
        self.backward_seen = self._stepping = False
        super().__init__()
        self.device, self.points = module.device, list[tuple[list[int], bool]]()
        for parameter in module.parameters():
            if not parameter.requires_grad:  # MemTracker would wait for a gradient, and be refused
                handles = RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict())  # of no hook
                self._param_to_grad_hook_handles[parameter] = handles

    @property
    def _in_opt(self) -> bool:
        # For MemTracker all that happens in `optimizer.step` is the optimizer's; Lightning calls forward and
        # backward in there.
        return self._stepping and self.backward_seen and not _in_backward()

    @_in_opt.setter
    def _in_opt(self, value: bool) -> None:
        self._stepping = value

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if not _in_backward():  # each micro-batch calls the network again, which MemTracker refuses
            self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)

    def __torch_dispatch__(self, *given: Any, **named: Any) -> Any:
        self.backward_seen |= _in_backward()
        result = super().__torch_dispatch__(*given, **named)
        sizes: dict[str, int] = {}
        for device, found in self.get_tracker_snapshot().items():
            if device.type == self.device.type:
                sizes |= {getattr(kind, "value", kind): size for kind, size in found.items()}
        row = [sum(sizes.get(name, 0) for name in names) for names in CLASSES.values()]
        self.points.append((row, _in_backward()))
        return result


@technique(
    paper="ZeRO, arXiv:1910.02054, section 3 (what the classes are); torch.distributed._tools.mem_tracker",
    after=("Throughput",),
    observer=True,
)
class MemoryMonitor(Callback):
    """Memory profile of one step: bytes of parameters, gradients, optimizer state, activations and the rest.

    Logs the most bytes that each class took, as `memory/peak_parameters_mib` and so on, and the most that
    all took together as `memory/peak_total_mib` (MiB, 2**20 bytes; the peaks occur at different moments,
    so that they add up to more). Draws `memory_step_N.png` in the run folder: the classes over the operators
    of the step on rank 0. Counted are the tensors of each rank's device, also on a CPU; what an allocator holds beyond
    them, `throughput/peak_memory_gib` of `Throughput` shows. What torch.compile fuses is not seen.

    Where figures are logged, on CUDA, the allocator of the device is shown as it is then: `memory/allocated_mib` of tensors,
    `memory/reserved_mib` of the device, and `memory/fragmentation`, the share of the reserved memory that is free within blocks
    which are partly in use, so that it can be neither given back nor used for a large tensor. A run lets
    these blocks grow (expandable_segments), unless PYTORCH_ALLOC_CONF is set in the environment.

    With several ranks each figure is that of the rank where it is largest, and a second one, such as `memory/peak_total_mean_mib`, the
    mean over ranks.

    A monitored step takes several times as long. All others cost nothing.

    Args:
        at_step: The first optimizer step to monitor; from the second on there is optimizer state. 0: none, only the allocator is
            shown, also of a pipeline.
        every_n_steps: Steps until the next one that is monitored; 0: only one.

    Raises:
        ConfigError: If `at_step` or `every_n_steps` is below 0, or `at_step` is 0 and `every_n_steps` is not.

    Example:
        trainer:
          callbacks+:
            - class_path: MemoryMonitor
              init_args: {at_step: 3}
    """

    def __init__(self, at_step: int = 3, every_n_steps: int = 0) -> None:
        if at_step < 0 or every_n_steps < 0 or (every_n_steps and not at_step):
            raise ConfigError(
                "MemoryMonitor takes at_step >= 1 and every_n_steps >= 0, or 0 for both, not "
                f"{at_step} and {every_n_steps}."
            )
        self.at_step, self.every_n_steps = at_step, every_n_steps
        self._timeline: Timeline | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to count with the first micro-batch of a monitored step."""
        late = trainer.global_step + 1 - self.at_step
        due = late == 0 or (late > 0 and self.every_n_steps and late % self.every_n_steps == 0)
        if due and self._timeline is None:
            self._timeline = Timeline(pl_module)
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            self._timeline.track_external(pl_module, *trainer.optimizers, *tensors)
            self._timeline.__enter__()
        if self._timeline is not None:
            self._timeline.backward_seen = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the counting with the optimizer's step, logs and draws; logs the state of the allocator."""
        counted = self._timeline is not None and not is_accumulating(trainer)
        points = self._stop() if counted else []  # before ranks exchange anything, which would be counted
        if pl_module.logging_step and pl_module.device.type == "cuda":
            self._log(trainer, pl_module, allocator_figures(torch.cuda.memory_stats(pl_module.device)))
        if not counted:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PausesClock):
                callback.pause_clock()
        sizes = np.array([row for row, _ in points]) / MIB
        backward = np.array([inside for _, inside in points])
        figures = {
            f"memory/peak_{name}_mib": float(peak) for name, peak in zip(CLASSES, sizes.max(0), strict=True)
        }
        figures["memory/peak_total_mib"] = float(sizes.sum(1).max())
        self._log(trainer, pl_module, figures)
        if not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / f"memory_step_{trainer.global_step}.png"
        figure = draw(sizes, backward, f"{path.parent.name}: memory during step {trainer.global_step}")
        pictures.save(figure, path)

    @staticmethod
    def _log(trainer: Trainer, pl_module: LightningModule, own: dict[str, float]) -> None:
        """Logs figures of all ranks; every rank calls it."""
        if trainer.world_size > 1:
            row = torch.tensor(list(own.values()), dtype=torch.float32, device=pl_module.device)
            ranks: Any = pl_module.all_gather(row)
            own = over_ranks(list(own), ranks.view(-1, len(own)).cpu())
        log_figures(trainer, own)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops counting where a step breaks off."""
        if self._timeline is not None:
            self._stop()

    def _stop(self) -> list[tuple[list[int], bool]]:
        assert self._timeline is not None
        self._timeline.__exit__(None, None, None)
        points, self._timeline = self._timeline.points, None
        return points


def allocator_figures(stats: Mapping[str, int]) -> dict[str, float]:
    """Returns what is logged of `torch.cuda.memory_stats`."""
    reserved, allocated, split = (stats[f"{name}_bytes.all.current"] for name in ALLOCATOR)
    return {
        "memory/allocated_mib": allocated / MIB,
        "memory/reserved_mib": reserved / MIB,
        "memory/fragmentation": split / reserved if reserved else 0.0,
    }


def over_ranks(names: Sequence[str], ranks: torch.Tensor) -> dict[str, float]:
    """Returns the largest value of each figure, and the mean under a name of its own.

    Args:
        names: Of the figures.
        ranks: Their values, (ranks, figures).
    """
    found = dict(zip(names, ranks.amax(0).tolist(), strict=True))
    for name, mean in zip(names, ranks.double().mean(0).tolist(), strict=True):
        base = name.removesuffix("_mib")
        found[f"{base}_mean" if base == name else f"{base}_mean_mib"] = mean
    return found


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() >= 0)


def draw(sizes: np.ndarray, backward: np.ndarray, title: str) -> Figure:
    """Draws the classes over the operators of a step.

    Args:
        sizes: (operators, classes), in MiB.
        backward: (operators,), whether each belongs to a backward pass.
        title: The title.
    """
    total = sizes.sum(1)
    peak = int(total.argmax())
    shown = np.unique(np.append(np.arange(0, len(sizes), -(-len(sizes) // MAX_POINTS)), peak))
    figure = pictures.new_figure(9, 5)
    axes = figure.add_subplot()
    labels = [
        f"{name.replace('_', ' ')} (at most {most:,.1f})"
        for name, most in zip(CLASSES, sizes.max(0), strict=True)
    ]
    axes.stackplot(shown, sizes[shown].T, labels=labels, colors=COLOURS, step="post", linewidth=0)
    axes.axhline(
        total[peak], color="0.2", linestyle="--", linewidth=1, label=f"together at most {total[peak]:,.1f}"
    )
    edges = np.flatnonzero(np.diff(np.concatenate([[False], backward, [False]]).astype(int)))
    for begin, end in edges.reshape(-1, 2):
        axes.axvspan(begin, end, color="0.2", alpha=0.07, linewidth=0)
        axes.text((begin + end) / 2, 1.04 * total[peak], "backward", ha="center", va="bottom", color="0.3")
    axes.set_xlim(0, max(len(sizes) - 1, 1))
    axes.set_ylim(0, 1.15 * total[peak])
    axes.set_xlabel("operators since the step began")
    axes.set_ylabel("MiB")
    axes.set_title(title, loc="left")
    pictures.tidy(axes, grid=False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
