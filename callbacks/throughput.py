"""Speed and memory: tokens per second, time per step, model FLOPs utilisation (MFU), peak memory."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from core.technique import technique
from core.training.figures import log_figures
from core.training.loss_ranks import dp_size
from toolkit.flops import AddsFlops, ComputesIn, CountsFlops


class Peak(NamedTuple):
    """Peak performance of one device, in dense (not sparse) TFLOP/s; None: not supported.

    Attributes:
        half: bf16 and fp16 matrix units with fp32 accumulation.
        tf32: float32 matrices at `torch.set_float32_matmul_precision` "high" or "medium".
        fp32: float32 matrices at "highest".
    """

    half: float
    tf32: float | None
    fp32: float


PEAKS: dict[str, Peak] = {
    # NVIDIA A100 datasheet (PCIe and SXM alike)
    r"NVIDIA A100(?!.*MIG).*": Peak(312, 156, 19.5),
    # NVIDIA H100 architecture whitepaper, table 2; NVL: H100 datasheet
    r"NVIDIA H100 80GB HBM3": Peak(989.4, 494.7, 66.9),
    r"NVIDIA H100 PCIe": Peak(756, 378, 51.2),
    r"NVIDIA H100 NVL": Peak(835.5, 417.5, 60),
    # NVIDIA H200 datasheet
    r"NVIDIA H200": Peak(989.5, 494.5, 67),
    r"NVIDIA H200 NVL": Peak(835.5, 417.5, 60),
    r"NVIDIA GH200.*": Peak(989.5, 494.5, 67),
    # HGX B200 datasheet, an eighth of the board; GB200: half of the superchip
    r"NVIDIA B200": Peak(2250, 1125, 75),
    r"NVIDIA GB200": Peak(2500, 1250, 80),
    # datasheets of the cards
    r"NVIDIA L4": Peak(121, 60, 30.3),
    r"NVIDIA L40": Peak(181.05, 90.5, 90.5),
    r"NVIDIA L40S": Peak(362.05, 183, 91.6),
    r"NVIDIA A10": Peak(125, 62.5, 31.2),
    r"NVIDIA A40": Peak(149.7, 74.8, 37.4),
    r"NVIDIA RTX A6000": Peak(154.8, 77.4, 38.7),
    # NVIDIA GA102, Ada and RTX Blackwell architecture whitepapers; half precision with fp32 accumulation
    r"NVIDIA GeForce RTX 3090": Peak(71, 35.6, 35.6),
    r"NVIDIA GeForce RTX 4090": Peak(165.2, 82.6, 82.6),
    r"NVIDIA GeForce RTX 5090": Peak(209.5, 104.8, 104.8),
    # AMD CDNA 3 datasheets
    r"AMD Instinct MI300X.*": Peak(1307.4, 653.7, 163.4),
    r"AMD Instinct MI325X.*": Peak(1307.4, 653.7, 163.4),
}
"""Full device name (a regular expression) -> peak."""

PRECISIONS = {
    "bf16": torch.bfloat16,
    "16": torch.float16,
    "32": torch.float32,
    "64": torch.float64,
}
"""How the name of a trainer's precision begins -> the dtype of its matrix products."""


@technique(
    paper="PaLM, arXiv:2204.02311, appendix B (MFU); peaks from the makers' datasheets, dense",
    maturity="stable",
    observer=True,
)
class Throughput(Callback):
    """Logs tokens per second, milliseconds per step, MFU and peak memory, named `throughput/...`.

    `throughput/tokens_per_second`, `throughput/step_time_ms` and `throughput/mfu` are means over the
    optimizer steps since the last logged one and count the label tokens of all ranks. Not counted: the
    steps up to the first logged one after a start, which hold compilation and warm-up, and the time of
    validation, checkpoints and sampling. At the end of `fit` the median over the run's intervals is
    `throughput/median_tokens_per_second` in `trainer.callback_metrics`.

    MFU is tokens per second times `network.flops_per_token`, over the peak of all devices: model FLOPs
    only, recomputed activations do not count. Of BERT and T5, where few positions have a label, the FLOPs are those of
    all positions of encoder and decoder, for batches of the shape of the last one; the modules of
    MultiTokenPrediction count. The peak is looked up by device name and precision in
    `PEAKS`; a device that is not there gets no MFU. A CPU's peak is measured once, as the best of a few
    matrix products in the run's precision, and the figure is called `throughput/mfu_of_measured_cpu_peak`.

    `throughput/peak_memory_gib` is the peak of the process of rank 0 since its start, in
    GiB (2**30 bytes): on CUDA, of its device in torch's allocator; on a CPU, of RAM (resident set).

    Nothing is done in steps that are not logged.

    Example:
        trainer:
          callbacks+:
            - class_path: Throughput
    """

    def __init__(self) -> None:
        self._since: float | None = None  # start of the interval, on the clock of time.perf_counter
        self._paused_at: float | None = None
        self._step = 0
        self._tokens = 0
        self._peak: tuple[str, float] | None = None
        self._memory: dict[str, float] = {}
        self._rates: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Forgets the interval of an earlier run."""
        self._since = self._paused_at = None
        self._rates = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Continues the clock after a pause."""
        if self._paused_at is not None:
            if self._since is not None:
                self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def pause_clock(self) -> None:
        """Leaves out the time from now until the next training batch starts.

        For callbacks that do something other than training between two batches: call it on every callback that
        offers `core.contracts.PausesClock`.
        """
        if self._paused_at is None and self._since is not None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the steps in the queue are training
            self._paused_at = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Stops the clock."""
        self.pause_clock()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Stops the clock."""
        self.pause_clock()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the figures of the interval that ends with this step, if it is a logged one."""
        if not pl_module.logging_step:
            return
        now, step, tokens = time.perf_counter(), trainer.global_step, pl_module.tokens_seen
        # Linux updates the count of each CPU late: the reported peak may fall by some pages
        memory = peak_memory(pl_module.device)
        self._memory = {name: max(gib, self._memory.get(name, gib)) for name, gib in memory.items()}
        figures = dict(self._memory)
        if self._since is not None and step > self._step:
            seconds = now - self._since
            rate = (tokens - self._tokens) / seconds
            self._rates.append(rate)
            figures["throughput/tokens_per_second"] = rate
            figures["throughput/step_time_ms"] = 1e3 * seconds / (step - self._step)
            steps_per_second = (step - self._step) / seconds
            figures |= self._utilisation(trainer, pl_module, rate, steps_per_second, batch)
        log_figures(trainer, figures)
        self._since, self._step, self._tokens = time.perf_counter(), step, tokens

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Puts the median of the run into `trainer.callback_metrics`."""
        if self._rates:
            value = torch.tensor(median(self._rates), dtype=torch.float64)
            trainer.callback_metrics["throughput/median_tokens_per_second"] = value

    def _utilisation(
        self, trainer: Trainer, pl_module: Any, rate: float, steps_per_second: float, batch: Any
    ) -> dict[str, float]:
        if self._peak is None:
            self._peak = peak_flops(pl_module.device, compute_dtype(trainer))
        name, peak = self._peak
        if not peak:
            return {}
        network, length = pl_module.network, batch["input_ids"].shape[-1]
        if isinstance(network, CountsFlops):
            batches = trainer.accumulate_grad_batches * dp_size(trainer)
            flops = steps_per_second * batches * network.flops_of_batch(batch)
        else:
            flops = rate * network.flops_per_token(length)
        for part in pl_module.objective.modules():
            if isinstance(part, AddsFlops):
                flops += rate * part.further_flops_per_token(network, length)
        return {name: flops / (trainer.world_size * peak)}


def peak_memory(device: torch.device) -> dict[str, float]:
    """Returns `throughput/peak_memory_gib`, or nothing for devices that do not report a peak."""
    if device.type not in ("cuda", "cpu"):
        return {}
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_set()
    return {"throughput/peak_memory_gib": held / 2**30}


def peak_resident_set() -> int:
    """Returns the peak RAM of this process since it started, in bytes."""
    # Not from getrusage if possible: on Linux it includes what the parent had at the fork.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as status:
        if peak := re.search(r"^VmHWM:\s*(\d+) kB$", status.read(), re.MULTILINE):
            return 1024 * int(peak[1])
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compute_dtype(trainer: Any) -> torch.dtype | None:
    """Returns the data type of a run's matrix products; None: not known."""
    strategy, precision = trainer.strategy, str(trainer.precision)
    if isinstance(strategy, ComputesIn) and strategy.compute_dtype is not None:
        return strategy.compute_dtype
    return next((dtype for start, dtype in PRECISIONS.items() if precision.startswith(start)), None)


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> tuple[str, float]:
    """Returns the name of the MFU figure and the peak that it is measured against.

    Args:
        device: The device of this process.
        dtype: The data type of matrix products; None: not known.

    Returns:
        The name and the device's peak in FLOP/s; 0 where the peak is not known, with a warning.
    """
    if device.type == "cpu" and dtype is not None:
        return "throughput/mfu_of_measured_cpu_peak", measured_peak(device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)
    if peak is not None and dtype in (torch.bfloat16, torch.float16):
        tera: float | None = peak.half
    elif peak is not None and dtype == torch.float32:
        tera = peak.fp32 if torch.get_float32_matmul_precision() == "highest" else peak.tf32
    else:
        tera = None
    if tera is None:
        rank_zero_warn(
            f"No MFU: the peak of {name} in {dtype or 'this precision'} is not in callbacks/throughput.py.",
        )
    return "throughput/mfu", 1e12 * (tera or 0.0)


def measured_peak(device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 0.2) -> float:
    """Returns the FLOP/s of the fastest of several (size, size) matrix products."""
    a = torch.full((size, size), 0.5, device=device, dtype=dtype)
    out = torch.mm(a, a)
    best, start = float("inf"), time.perf_counter()
    while (begin := time.perf_counter()) - start < seconds:
        torch.mm(a, a, out=out)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
