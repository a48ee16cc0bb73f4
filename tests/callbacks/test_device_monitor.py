"""Files as Linux shows them, and a real run on this machine's cores."""

import pytest
import torch

from callbacks.device_monitor import DeviceMonitor, cpu_times, figures, temperature, told, utilization
from callbacks.energy_monitor import gpu_counters

STAT = "cpu  100 10 50 800 40 5 5 0 30 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"


def test_busy_is_all_but_idle_and_waiting(tmp_path):
    (tmp_path / "stat").write_text(STAT, encoding="ascii")
    before = cpu_times(str(tmp_path / "stat"))
    assert before == (170, 1010)
    (tmp_path / "stat").write_text(STAT.replace("100", "130").replace("800", "810"), encoding="ascii")
    assert utilization(before, cpu_times(str(tmp_path / "stat"))) == 30 / 40
    assert utilization(before, before) is None
    assert cpu_times(str(tmp_path / "none")) is None


def test_temperature_is_of_the_processor(tmp_path):
    assert temperature(str(tmp_path)) is None
    for number, (kind, value) in enumerate(
        (("acpitz", "20000"), ("x86_pkg_temp", "61500"), ("x86_pkg_temp", "off"))
    ):
        zone = tmp_path / f"thermal_zone{number}"
        zone.mkdir()
        (zone / "type").write_text(f"{kind}\n", encoding="ascii")
        (zone / "temp").write_text(f"{value}\n", encoding="ascii")
    assert temperature(str(tmp_path)) == 61.5


def test_figures_are_of_all_ranks_and_what_is_not_known_is_left_out():
    nan = float("nan")
    assert figures(torch.tensor([[0.5, 60.0, 100.0], [1.0, 70.0, 200.0]])) == {
        "device/utilization": 0.75,
        "device/temperature_celsius": 70.0,
        "device/power_watts": 300.0,
    }
    assert figures(torch.tensor([[0.5, nan, nan]])) == {"device/utilization": 0.5}


def test_a_run_uses_the_cores(fit, tmp_path):
    run = fit(tmp_path, [DeviceMonitor()], max_steps=40, log_every_n_steps=40, limit_val_batches=0)
    found = {name: float(value) for name, value in run.trainer.callback_metrics.items() if "device/" in name}
    assert 0 <= found.get("device/utilization", 0.0) <= 1  # a clock tick is 10 ms: it may find none
    assert "device/power_watts" not in found


def test_what_nvml_does_not_tell_is_not_known():
    pynvml = pytest.importorskip("pynvml")
    for code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION):
        assert told(lambda device, code=code: pynvml._nvmlCheckReturn(code), torch.device("cuda")) is None
    assert told(lambda device: 61, torch.device("cuda")) == 61.0
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        told(lambda device: pynvml._nvmlCheckReturn(pynvml.NVML_ERROR_GPU_IS_LOST), torch.device("cuda"))


@pytest.mark.gpu
def test_figures_of_a_gpu_are_those_of_nvml():
    pynvml = pytest.importorskip("pynvml")
    device = torch.device("cuda", 0)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    [(_, counter)] = gpu_counters(device)
    matrix = torch.ones(4096, 4096, device=device)
    for _ in range(2000):  # seconds of work: NVML looks a few times a second
        matrix = matrix @ matrix / 4096
    torch.cuda.synchronize()
    busy, celsius, watts = DeviceMonitor._of_gpu(device)
    assert 0 < busy <= 1
    assert abs(celsius - pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)) <= 3
    limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
    assert 10 < watts < 1.2 * limit
    joules = counter.joules()
    assert 1 < joules < 1.2 * limit * 600
