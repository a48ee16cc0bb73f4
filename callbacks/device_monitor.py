"""How busy, how hot and how hungry the devices are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from core.technique import Package, technique
from core.training.figures import log_figures

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

NVML = Package("nvidia-ml-py>=12", extra="nvml")
PACKAGE_ZONES = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc_thermal", "acpitz")
"""Types of Linux's thermal zones that are of the processor, the best first."""


@technique(
    paper="NVML, nvmlDeviceGetUtilizationRates, nvmlDeviceGetTemperature and nvmlDeviceGetPowerUsage; proc_stat(5)",
    observer=True,
)
class DeviceMonitor(Callback):
    """Utilisation, temperature and power of the devices, read where figures are logged.

    - `device/utilization`: of a GPU the share of the last moments (up to a second) in which a kernel ran, mean over ranks; on a
      CPU the share of the time of all cores of the machine since the last logged step in which they worked, for whomever.
    - `device/temperature_celsius`: of the hottest device; of a CPU where Linux tells it.
    - `device/power_watts`: of a GPU at this moment, sum over ranks. Of a CPU see `EnergyMonitor`.

    What a machine does not tell is not logged. A GPU is asked through NVML, `pip install 'leyden[nvml]'`, which does not wait
    for its kernels. Steps that are not logged cost nothing.

    Example:
        trainer:
          callbacks+:
            - class_path: DeviceMonitor
    """

    def __init__(self) -> None:
        self._times: tuple[int, int] | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error for a GPU without NVML's bindings."""
        if run.accelerator == "cuda" and (missing := NVML.missing(run)):
            yield missing

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the times of the cores so far."""
        self._times = cpu_times() if pl_module.device.type == "cpu" else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs a logged step."""
        if not pl_module.logging_step:
            return
        nan = float("nan")
        own = self._of_gpu(pl_module.device) if pl_module.device.type == "cuda" else self._of_cpu()
        row = torch.tensor([nan if value is None else value for value in own], device=pl_module.device)
        if trainer.world_size > 1:
            row = pl_module.all_gather(row)
        log_figures(trainer, figures(row.view(-1, 3).cpu()))

    def _of_cpu(self) -> tuple[float | None, float | None, None]:
        before, self._times = self._times, cpu_times()
        return utilization(before, self._times), temperature(), None

    @staticmethod
    def _of_gpu(device: torch.device) -> tuple[float | None, float | None, float | None]:
        percent, celsius, milliwatts = (
            told(read, device)
            for read in (torch.cuda.utilization, torch.cuda.temperature, torch.cuda.power_draw)
        )
        return percent and percent / 100, celsius, milliwatts and milliwatts / 1e3


def told(read: Callable[[torch.device], int], device: torch.device) -> float | None:
    """Returns what NVML says of a GPU; None: it does not tell, such as of a part of one (MIG), or not this user."""
    from pynvml import NVMLError_NoPermission, NVMLError_NotSupported

    try:
        return float(read(device))
    except (NVMLError_NoPermission, NVMLError_NotSupported):
        return None


def figures(ranks: torch.Tensor) -> dict[str, float]:
    """Returns what is logged.

    Args:
        ranks: Utilisation, temperature and power of each rank, (ranks, 3); NaN: not known.
    """
    busy, hot, power = ranks.double().T
    found = {
        "device/utilization": float(busy.nanmean()),
        "device/temperature_celsius": float(hot.nan_to_num(-torch.inf).max()),
        "device/power_watts": float(power.sum()),
    }
    return {name: value for name, value in found.items() if abs(value) < torch.inf}


def cpu_times(path: str = "/proc/stat") -> tuple[int, int] | None:
    """Returns (busy, all) time of all cores since the machine started, in clock ticks; None: the system does not tell."""
    try:
        first = Path(path).read_text(encoding="ascii").partition("\n")[0].split()
    except OSError:
        return None
    # user nice system idle iowait irq softirq steal; guests are in user and nice already
    ticks = [int(value) for value in first[1:9]]
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)


def utilization(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Returns the busy share of the time between two `cpu_times`; None: not known, or they are too close."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return min(1.0, max(0.0, (after[0] - before[0]) / (after[1] - before[1])))


def temperature(root: str = "/sys/class/thermal") -> float | None:
    """Returns the temperature of the processor in degrees Celsius; None: the system does not tell."""
    found: dict[str, float] = {}
    for zone in sorted(Path(root).glob("thermal_zone*")):
        try:
            kind, value = ((zone / name).read_text(encoding="ascii").strip() for name in ("type", "temp"))
            found[kind] = max(int(value) / 1e3, found.get(kind, -274.0))
        except (OSError, ValueError):
            continue  # a zone whose sensor is off
    return next((found[kind] for kind in PACKAGE_ZONES if kind in found), None)
