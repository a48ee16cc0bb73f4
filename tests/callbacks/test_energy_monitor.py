"""Real files as the system shows its counters: read, wrapped around, resumed; and modelled energy."""

import time

import pytest
from lightning.pytorch import Callback

from callbacks.energy_monitor import Counter, EnergyMonitor, rapl_counters
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


def test_what_cannot_be_read_is_left_out_and_nothing_at_all_is_said(fit, rapl, tmp_path):
    (rapl / "intel-rapl:0" / "energy_uj").write_text("?", encoding="ascii")
    assert len(rapl_counters(str(rapl))) == 1
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
