"""Real files as the system shows its counters: read, wrapped around, resumed; and modelled energy."""

import time

import numpy as np
import pytest
from lightning.pytorch import Callback

from callbacks.energy_monitor import (
    GPUS,
    MACHINES,
    MEMORY,
    PROCESSORS,
    Counter,
    EnergyMonitor,
    coverage,
    shares,
)
from core.errors import ConfigError
from core.technique import technique
from toolkit.selection import Run, Selected

MOST = 1_000_000


def zone(root, number, name, value, most=MOST):
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (("name", name), ("energy_uj", value), ("max_energy_range_uj", most)):
        (folder / file).write_text(f"{content}\n", encoding="ascii")
    return folder


@pytest.fixture
def rapl(tmp_path):
    root = tmp_path / "powercap"
    zone(root, "0", "package-0", 900_000)
    zone(root, "0:0", "core", 5)  # within the package
    zone(root, "0:1", "dram", 100)
    zone(root, "1", "psys", 7)  # the package again
    return root


class Works(Callback):
    """Uses energy: 60 mJ of the processor and 10 of its memory in each step."""

    def __init__(self, root):
        self.root, self.uses = root, {"0": 900_000, "0:1": 100}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for number, step in (("0", 60_000), ("0:1", 10_000)):
            self.uses[number] = (self.uses[number] + step) % (MOST + 1)  # begins again at 0
            (self.root / f"intel-rapl:{number}" / "energy_uj").write_text(
                f"{self.uses[number]}\n", encoding="ascii"
            )


def test_measured_energy_counts_over_the_wrap_of_a_counter(fit, rapl, tmp_path):
    options = {"max_steps": 10, "log_every_n_steps": 5, "limit_val_batches": 0}
    run = fit(tmp_path, [EnergyMonitor(grams_per_kwh=360.0, rapl=str(rapl)), Works(rapl)], **options)
    found = run.trainer.callback_metrics
    assert float(found["energy/measured_joules"]) == pytest.approx(
        10 * 0.070, rel=1e-6
    )  # float32 between the ranks
    assert float(found["energy/co2_grams"]) == pytest.approx(10 * 0.070 * 1e-4, rel=1e-6)
    assert "energy/modelled_joules" not in found


class Lost(Callback):
    """The processor's counter cannot be read at the end of steps 5 and 10."""

    def __init__(self, root):
        self.file, self.found = root / "intel-rapl:0" / "energy_uj", {}

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if trainer.global_step in (4, 9):
            self.kept = self.file.read_text(encoding="ascii")
            self.file.write_text("?", encoding="ascii")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step in (5, 10):
            self.file.write_text(self.kept, encoding="ascii")
        if pl_module.logging_step:
            self.found[trainer.global_step] = trainer.callback_metrics.get("energy/measured_joules")


def test_while_a_counter_cannot_be_read_figures_are_left_out_and_nothing_is_lost(fit, rapl, tmp_path, capsys):
    options = {"max_steps": 15, "log_every_n_steps": 5, "limit_val_batches": 0}
    lost = Lost(rapl)
    fit(tmp_path, [EnergyMonitor(rapl=str(rapl)), lost, Works(rapl)], **options)
    assert [lost.found[5], lost.found[10]] == [None, None]
    assert float(lost.found[15]) == pytest.approx(15 * 0.070, rel=1e-6)
    assert capsys.readouterr().err.count("EnergyMonitor, rank 0: a counter cannot be read") == 1


def test_a_run_on_this_machine_that_has_no_counter_does_not_begin(rapl, tmp_path):
    def problems(run=Run(), **arguments):  # noqa: B008
        own = Selected("", "EnergyMonitor", "", "callbacks", "", "", technique(paper=""), arguments)
        return list(EnergyMonitor.preflight(run, own))

    assert problems(rapl=str(rapl)) == []
    assert problems(rapl=str(tmp_path / "none"), watts=1.0) == []
    assert problems(Run(devices=1, world_size=2), rapl=str(tmp_path / "none")) == []
    [message] = problems(rapl=str(tmp_path / "none"))
    assert "none has no intel-rapl. For a modelled figure, give it the power" in message


def test_modelled_energy_is_power_times_time(fit, tmp_path):
    began = time.monotonic()
    options = {"max_steps": 10, "log_every_n_steps": 5, "limit_val_batches": 0}
    run = fit(tmp_path, [EnergyMonitor(watts=100.0)], **options)
    found = {name for name in run.trainer.callback_metrics if "energy/" in name}
    assert found == {"energy/modelled_joules"}
    assert 0 < run.callback(EnergyMonitor)._joules < 100.0 * (time.monotonic() - began)


def test_a_counter_without_a_largest_value_that_begins_again_counts_from_0():
    values = iter([500, 800, 30])
    counter = Counter(lambda: next(values), 1e-3)
    assert [counter.joules(), counter.joules()] == pytest.approx([0.3, 0.03])


def test_what_is_summed_is_said_and_a_sum_over_other_counters_begins_anew(fit, rapl, tmp_path, capsys):
    options = {"max_steps": 5, "log_every_n_steps": 5, "limit_val_batches": 0}
    works = Works(rapl)

    def energy(name, before=None):
        monitor = EnergyMonitor(rapl=str(rapl))
        if before:
            monitor.load_state_dict(before)
        fit(tmp_path / name, [monitor, works], **options)
        return monitor.state_dict(), capsys.readouterr().err

    whole, said = energy("whole")
    assert (
        "measured are 1 of 1 processors, 1 of 1 memory, 1 of 1 machines with a counter of processors.\n"
        in said
    )
    more, said = energy("more", whole)
    assert more["joules"] == pytest.approx(2 * 5 * 0.070, rel=1e-6)
    assert "begins at 0" not in said
    (rapl / "intel-rapl:0:1" / "max_energy_range_uj").write_text("?", encoding="ascii")
    part, said = energy("part", more)
    assert part["joules"] == pytest.approx(5 * 0.060, rel=1e-6)
    assert "0 of 1 memory" in said
    assert "The energy of the others is missing in energy/measured_joules." in said
    assert (
        "begins at 0: the checkpoint's 1 J are the sum over other counters (1 of 1 processors, 1 of 1 memory"
        in said
    )
    assert (
        "the sum over other counters (which it does not name)"
        in energy("old", {"joules": 1.0, "modelled": False})[1]
    )


def test_counters_are_the_same_ones_where_their_share_is():
    """Of two machines, one without RAPL, with two GPUs each."""
    counter = Counter(lambda: 0, 1.0)
    ranks = [([(PROCESSORS, counter), (MEMORY, None), (GPUS, counter)], True), ([(GPUS, counter)], False)]
    ranks += [([(GPUS, counter)], True), ([(GPUS, counter)], False)]
    counts = np.sum([coverage(*rank) for rank in ranks], axis=0).tolist()
    assert counts == [[1, 1], [0, 1], [4, 4], [1, 2]]
    now = dict(zip((PROCESSORS, MEMORY, GPUS, MACHINES), counts, strict=True))
    assert shares({**now, GPUS: [8, 8], MACHINES: [2, 4]}) == shares(now)
    assert shares({**now, MACHINES: [1, 1]}) != shares(now)  # the other machine's processors are out
    assert shares({**now, GPUS: [3, 4]}) != shares(now)


def test_no_counter_at_all_is_an_error(fit, tmp_path):
    with pytest.raises(ConfigError, match=r"no energy counter can be read: .* has no intel-rapl"):
        fit(tmp_path, [EnergyMonitor(rapl=str(tmp_path / "none"))], max_steps=1)


def test_a_resumed_run_goes_on_and_never_mixes():
    one, other = EnergyMonitor(watts=5.0), EnergyMonitor(watts=5.0)
    one._joules = 12.5
    other.load_state_dict(one.state_dict())
    assert other._joules == 12.5
    with pytest.raises(ConfigError, match="was modelled, this run's would be measured"):
        EnergyMonitor().load_state_dict(one.state_dict())
    with pytest.raises(ConfigError, match="a positive watts, not 0"):
        EnergyMonitor(watts=0.0)
