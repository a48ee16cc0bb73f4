"""Energy of a run and the carbon dioxide that goes with it, measured or modelled."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from core.errors import ConfigError
from core.technique import technique
from core.training.figures import log_figures
from toolkit.trials import say

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

JOULES_PER_KWH = 3.6e6
RAPL = "/sys/class/powercap"
"""No default of an argument: a checkpoint's config may not name a folder outside of the run's."""

PROCESSORS, MEMORY, GPUS, MACHINES = "processors", "memory", "GPUs", "machines with a counter of processors"
KINDS = (PROCESSORS, MEMORY, GPUS, MACHINES)

GIVE_WATTS = "For a modelled figure, give it the power of the run's devices, such as watts: 350"


@technique(
    paper="RAPL: Linux, Documentation/power/powercap; NVML, nvmlDeviceGetTotalEnergyConsumption; energy times carbon "
    "intensity: Lacoste et al., arXiv:1910.09700",
    observer=True,
)
class EnergyMonitor(Callback):
    """Energy since the start of the run in joules, and the carbon dioxide of it; either measured or modelled, never both.

    Measured, as `energy/measured_joules`, where `watts` is not given: the sum of what the counters of all machines say, RAPL's of
    processors and their memory, and NVML's of the ranks' GPUs (`pip install 'leyden[nvml]'`). Not in there: the rest of the machine.
    RAPL counts for all processes of a machine, and may be readable for the administrator alone. Which counters are in the sum is printed
    once, with what is missing. A resumed run that sums over other counters, such as those of a machine that shows fewer,
    begins at 0 and says so. While a counter cannot be read, as of a GPU that NVML has lost, the figures are left out: its rank says
    so once, and they come again, with the energy of the time between, when all can be read.

    Modelled, as `energy/modelled_joules`, where `watts` is given: the power of all machines and devices of the run, times the time of
    training, with validation and checkpoints.

    `energy/co2_grams` is this energy times `grams_per_kwh`. Logged where figures are logged; other steps cost nothing. A resumed
    run otherwise goes on with the energy of its checkpoint.

    Args:
        watts: Power of all devices of the run together, in watts; None: it is measured.
        grams_per_kwh: Carbon intensity of the electricity, in grams of CO2 per kWh, from your supplier; None: no CO2 is logged.
        rapl: Where the system shows the counters of RAPL; None: /sys/class/powercap.

    Raises:
        ConfigError: If a value is not positive, or there is no counter that this process may read.

    Example:
        trainer:
          callbacks+:
            - class_path: EnergyMonitor
              init_args: {watts: 350.0, grams_per_kwh: 400.0}
    """

    def __init__(
        self,
        watts: float | None = None,
        grams_per_kwh: float | None = None,
        rapl: str | None = None,
    ) -> None:
        for name, value in (("watts", watts), ("grams_per_kwh", grams_per_kwh)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"EnergyMonitor takes a positive {name}, not {value}.")
        self.watts, self.grams_per_kwh, self.rapl = watts, grams_per_kwh, rapl or RAPL
        self._joules = 0.0
        self._counters: list[Counter | Clock] = []
        self._coverage: dict[str, list[int]] = {}
        self._silent = False

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error where there is no counter, before a run on a CPU has begun; the machines of others may have one."""
        watts, root = own.arguments.get("watts"), own.arguments.get("rapl") or RAPL
        here = run.accelerator == "cpu" and run.devices == run.world_size and not run.offline
        if watts is None and here and not any(counter for _, counter in rapl_counters(root)):
            yield f"no energy counter can be read: {why_not(root)}. {GIVE_WATTS}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the energy up to the last logged step, and how it was found."""
        return {
            "joules": self._joules,
            "modelled": self.watts is not None,
            "counters": {kind: list(counts) for kind, counts in self._coverage.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there.

        Raises:
            ConfigError: If the energy of the checkpoint was found in the other way.
        """
        if state_dict["modelled"] != (self.watts is not None):
            was, now = ("modelled", "measured") if state_dict["modelled"] else ("measured", "modelled")
            raise ConfigError(
                f"EnergyMonitor: the energy of the checkpoint was {was}, this run's would be {now}; both in one sum would mean "
                f"nothing.\n{'Set' if was == 'modelled' else 'Leave out'} watts, as the run before did."
            )
        self._joules, self._coverage = state_dict["joules"], dict(state_dict.get("counters", {}))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the counters: one process reads those of its machine, each those of its GPU.

        Raises:
            ConfigError: If there is none.
        """
        if self.watts is not None:
            self._counters = [Clock(self.watts)] if trainer.is_global_zero else []
            return
        machine = trainer.local_rank == 0
        found = rapl_counters(self.rapl) if machine else []
        if pl_module.device.type == "cuda":
            found += gpu_counters(pl_module.device)
        self._counters = [counter for _, counter in found if counter is not None]
        own = torch.tensor(coverage(found, machine), dtype=torch.float32, device=pl_module.device)
        everywhere = torch.as_tensor(trainer.strategy.reduce(own, reduce_op="sum")).int().tolist()
        if not sum(read for read, _ in everywhere):
            raise ConfigError(
                f"EnergyMonitor: no energy counter can be read: {why_not(self.rapl)}.\n{GIVE_WATTS}"
            )
        self._begin(trainer, dict(zip(KINDS, everywhere, strict=True)))

    def _begin(self, trainer: Trainer, now: dict[str, list[int]]) -> None:
        """Says which counters are summed, and begins at 0 if those of the checkpoint were others."""
        partial = any(read < there for read, there in now.values())
        missing = " The energy of the others is missing in energy/measured_joules." if partial else ""
        say(trainer, self, f"measured are {described(now)}.{missing}")
        if self._joules and shares(self._coverage) != shares(now):
            say(
                trainer,
                self,
                f"energy/measured_joules begins at 0: the checkpoint's {self._joules:,.0f} J are the sum over other counters "
                f"({described(self._coverage) or 'which it does not name'}).",
            )
            self._joules = 0.0
        self._coverage = now

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds what was used since the last logged step."""
        if not pl_module.logging_step:
            return
        used, faults = self._used()
        if faults and not self._silent:
            self._silent = True
            print(
                f"EnergyMonitor, rank {trainer.global_rank}: a counter cannot be read ({faults[0]}); figures of energy are left "
                "out until it can.",
                file=sys.stderr,
                flush=True,
            )
        own = torch.tensor([used, float(len(faults))], device=pl_module.device)
        used, missing = torch.as_tensor(trainer.strategy.reduce(own, reduce_op="sum")).tolist()
        self._joules += used
        if missing:
            return
        how = "measured" if self.watts is None else "modelled"
        figures = {f"energy/{how}_joules": self._joules}
        if self.grams_per_kwh is not None:
            figures["energy/co2_grams"] = self._joules / JOULES_PER_KWH * self.grams_per_kwh
        log_figures(trainer, figures)

    def _used(self) -> tuple[float, list[str]]:
        """Returns the energy since the last call, and what is wrong with counters of this rank that cannot be read."""
        used, faults = 0.0, []
        for counter in self._counters:
            try:
                used += counter.joules()
            except read_errors() as error:  # raised here, it would leave other ranks waiting
                faults.append(str(error))
        return used, faults


class Counter:
    """A counter that rises and begins again at 0 after its largest value.

    Args:
        read: Returns its value.
        unit: Joules of 1.
        most: The largest value; None: it never begins again.
    """

    def __init__(self, read: Any, unit: float, most: int | None = None) -> None:
        self._read, self._unit, self._most = read, unit, most
        self._last: int = read()

    def joules(self) -> float:
        """Returns the energy since the last call; one new beginning in between is taken into account."""
        now = self._read()
        used, self._last = now - self._last, now
        if used < 0:
            used = used + self._most + 1 if self._most is not None else now
        return float(used * self._unit)


class Clock:
    """Models energy as a constant power.

    Args:
        watts: The power.
    """

    def __init__(self, watts: float) -> None:
        self._watts, self._last = watts, time.monotonic()

    def joules(self) -> float:
        """Returns the energy since the last call."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return self._watts * seconds


def rapl_counters(root: str) -> list[tuple[str, Counter | None]]:
    """Returns kind and counter of all processors and of their memory, which is not part of theirs; None: it cannot be read."""
    found: list[tuple[str, Counter | None]] = []
    for zone in sorted(Path(root).glob("intel-rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            name = (zone / "name").read_text(encoding="ascii").strip()
            if name.startswith("package") or name == "dram":
                found.append((MEMORY if name == "dram" else PROCESSORS, _rapl_counter(zone)))
    return found


def _rapl_counter(zone: Path) -> Counter | None:
    try:
        most = int((zone / "max_energy_range_uj").read_text(encoding="ascii"))
        return Counter(lambda: int((zone / "energy_uj").read_text(encoding="ascii")), 1e-6, most)
    except (OSError, ValueError):
        return None


def gpu_counters(device: torch.device) -> list[tuple[str, Counter | None]]:
    """Returns the counter of a GPU; None: NVML or the GPU has none."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return [(GPUS, None)]
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return [(GPUS, Counter(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), 1e-3))]
    except pynvml.NVMLError:  # such as a GPU before Volta, or a container without the driver
        return [(GPUS, None)]


def read_errors() -> tuple[type[Exception], ...]:
    """Returns what reading a counter may raise."""
    try:
        from pynvml import NVMLError
    except ModuleNotFoundError:
        return OSError, ValueError
    return OSError, ValueError, NVMLError


def coverage(found: Sequence[tuple[str, Counter | None]], machine: bool) -> list[list[int]]:
    """Returns for each of `KINDS` how many this rank reads, and how many there are.

    Args:
        found: Kind and counter of each.
        machine: Whether this rank answers for its machine.
    """
    counts = {kind: [0, 0] for kind in KINDS}
    for kind, counter in found:
        counts[kind][0] += counter is not None
        counts[kind][1] += 1
    counts[MACHINES] = [int(counts[PROCESSORS][0] > 0), int(machine)]
    return [counts[kind] for kind in KINDS]


def described(counts: Mapping[str, Sequence[int]]) -> str:
    """Returns for people how many counters of each kind are read."""
    return ", ".join(f"{read} of {there} {kind}" for kind, (read, there) in counts.items() if there)


def shares(counts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Returns the share that is read of each kind that there is: the same ones also on more or fewer machines."""
    return {kind: read / there for kind, (read, there) in counts.items() if there}


def why_not(root: str) -> str:
    """Returns why RAPL gives nothing."""
    zones = list(Path(root).glob("intel-rapl:*"))
    return f"{zones[0]}/energy_uj is not readable for this user" if zones else f"{root} has no intel-rapl"
