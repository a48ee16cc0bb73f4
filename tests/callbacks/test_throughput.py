import csv
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.flop_counter import FlopCounterMode

from callbacks.throughput import Throughput, compute_dtype, measured_peak, peak_flops, peak_memory
from plugins.networks.llama import Llama
from plugins.networks.t5 import T5
from plugins.objectives.balanced_routing import BalancedRouting
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.multi_token_prediction import MultiTokenPrediction
from plugins.objectives.span_corruption import SpanCorruption
from plugins.strategies.ddp import DDP
from plugins.strategies.fsdp import FSDP
from tests.benchmarks import gpu

TOKENS_PER_STEP = 8 * 32
MFU = "throughput/mfu_of_measured_cpu_peak"


def figures_of(run):
    with open(run.folder / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["throughput/tokens_per_second"]]
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def test_figures_agree_with_each_other(run):
    peak = run.callback(Throughput)._peak[1]
    for row in figures_of(run):
        rate, milliseconds = row["throughput/tokens_per_second"], row["throughput/step_time_ms"]
        assert rate * milliseconds / 1e3 == pytest.approx(TOKENS_PER_STEP)
        assert row[MFU] == pytest.approx(rate * 6 * 257 * 16 / peak)


def test_figures_are_in_callback_metrics_with_their_median(run):
    rates = [row["throughput/tokens_per_second"] for row in figures_of(run)]
    metrics = run.trainer.callback_metrics
    assert float(metrics["throughput/tokens_per_second"]) == pytest.approx(rates[-1])
    assert float(metrics["throughput/median_tokens_per_second"]) == pytest.approx(
        sorted(rates)[len(rates) // 2]
    )


class SlowStep(Callback):
    """Takes its time in one hook, and remembers the step times that were logged.

    The clock goes on by these seconds, and by what this thread computes: what else the machine does takes no time.
    """

    def __init__(self, hook, seconds, pauses=False):
        self.seconds, self.pauses, self.times, self.waited = seconds, pauses, {}, 0.0
        setattr(self, hook, self.wait)

    def wait(self, trainer, pl_module, *args):
        if trainer.global_step == 7 and trainer.training | trainer.validating:
            if self.pauses:
                for callback in trainer.callbacks:
                    getattr(callback, "pause_clock", int)()
            self.waited += self.seconds

    def perf_counter(self):
        return time.thread_time() + self.waited

    def on_before_zero_grad(self, trainer, *args):  # early in each step: what the one before logged
        metrics = trainer.callback_metrics
        if "throughput/step_time_ms" in metrics:
            self.times[trainer.global_step] = float(metrics["throughput/step_time_ms"])


@pytest.fixture
def step_time_of_5_to_10(fit, monkeypatch):
    def find(folder, *callbacks, **options):
        monkeypatch.setattr("callbacks.throughput.time", callbacks[0])
        fit(folder, [Throughput(), *callbacks], max_steps=12, **options)
        return callbacks[0].times[10]

    return find


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end", "on_validation_batch_start"])
def test_validation_is_not_counted(hook, step_time_of_5_to_10, tmp_path):
    assert step_time_of_5_to_10(tmp_path, SlowStep(hook, 0.5), val_check_interval=7) < 80


def test_a_checkpoint_is_not_counted(step_time_of_5_to_10, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=7)
    assert step_time_of_5_to_10(tmp_path, SlowStep("on_save_checkpoint", 0.5), checkpoint) < 80


def test_what_pauses_the_clock_is_not_counted_and_everything_else_is(step_time_of_5_to_10, tmp_path):
    pausing = SlowStep("on_train_batch_end", 0.5, pauses=True)
    assert step_time_of_5_to_10(tmp_path, pausing, limit_val_batches=0) < 80
    plain = SlowStep("on_train_batch_end", 0.5)
    assert step_time_of_5_to_10(tmp_path, plain, limit_val_batches=0) >= 100


def test_memory_is_logged_with_every_logged_step_and_never_falls(run):
    with open(run.folder / "metrics.csv", newline="") as file:
        rows = [(row["train/loss"], row["throughput/peak_memory_gib"]) for row in csv.DictReader(file)]
    assert all(bool(loss) == bool(gib) for loss, gib in rows)
    peaks = [float(gib) for _, gib in rows if gib]
    assert peaks == sorted(peaks)
    assert len(peaks) == 12


@pytest.mark.slow  # it waits for the operating system
def test_the_peak_of_ram_is_that_of_this_process_and_stays_when_memory_is_freed():
    code = """if True:
        from callbacks.throughput import peak_resident_set
        print(peak_resident_set())
        held = b"1" * (1 << 30)
        print(peak_resident_set())
        del held
        print(peak_resident_set())
    """
    held = b"1" * (1 << 30)  # in the parent: no part of the child's
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, during, after = (int(line) / len(held) for line in done.stdout.split())
    assert 0.01 < before < 0.99
    assert during == pytest.approx(before + 1, abs=0.05)
    assert after == pytest.approx(during, abs=0.01)


def test_memory_of_a_gpu_is_what_torch_allocated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 29)
    assert peak_memory(torch.device("cuda:0")) == {"throughput/peak_memory_gib": 1.5}
    assert peak_memory(torch.device("meta")) == {}


def test_the_first_interval_is_not_reported(fit, tmp_path):
    slow = SlowStep("on_train_start", 0.3)
    fit(tmp_path, [Throughput(), slow], max_steps=8, limit_val_batches=0)
    assert slow.times == {}


def test_accumulated_batches_are_one_step(fit, tmp_path):
    slow = SlowStep("on_train_start", 0)
    run = fit(tmp_path, [Throughput(), slow], max_steps=12, limit_val_batches=0, accumulate_grad_batches=2)
    rate = float(run.trainer.callback_metrics["throughput/tokens_per_second"])
    assert rate * slow.times[11] / 1e3 == pytest.approx(2 * TOKENS_PER_STEP, rel=1e-4)


def test_mfu_counts_the_devices_of_all_ranks(run):
    throughput = Throughput()
    throughput._peak = ("throughput/mfu", 1e6)
    two = SimpleNamespace(world_size=2)
    flops = run.module.network.flops_per_token(32)
    batch = {"input_ids": torch.zeros(1, 32, dtype=torch.int64)}
    found = throughput._utilisation(two, run.module, 10.0, 1.0, batch)
    assert found == {"throughput/mfu": 10 * flops / 2e6}


def test_mfu_of_an_encoder_counts_all_positions_and_that_of_an_objective_its_modules(run, monkeypatch):
    """Two steps a second of 3 micro-batches, in which 5 label tokens a second are predicted."""
    throughput = Throughput()
    throughput._peak = ("throughput/mfu", 1e6)
    monkeypatch.setattr(run.trainer, "accumulate_grad_batches", 3)
    network = T5(61, n_layer=1, n_head=2, n_embd=8, head_dim=4, intermediate_size=16)
    batch = {
        name: torch.zeros(2, size, dtype=torch.int64)
        for name, size in (("input_ids", 20), ("decoder_input_ids", 5))
    }
    module = SimpleNamespace(network=network, objective=SpanCorruption())
    found = throughput._utilisation(run.trainer, module, 5.0, 2.0, batch)
    assert found == {"throughput/mfu": 2.0 * 3 * network.flops_of_batch(batch) / 1e6}
    decoder = Llama(
        61, n_layer=1, n_head=2, n_embd=8, n_kv_head=2, intermediate_size=16, max_sequence_length=32
    )
    objective = MultiTokenPrediction(CausalLM())
    objective.change_network(decoder)
    outer = BalancedRouting(objective)
    flops = decoder.flops_per_token(20) + objective.further_flops_per_token(decoder, 20)
    found = throughput._utilisation(
        run.trainer, SimpleNamespace(network=decoder, objective=outer), 5.0, 2.0, batch
    )
    assert found == {"throughput/mfu": 5 * flops / 1e6}


@pytest.mark.parametrize(
    ("name", "half", "tf32", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 156, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 156, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7, 66.9),
        ("NVIDIA H100 PCIe", 756, 378, 51.2),
        ("NVIDIA H200", 989.5, 494.5, 67),
        ("NVIDIA B200", 2250, 1125, 75),
        ("NVIDIA L4", 121, 60, 30.3),
        ("NVIDIA L40S", 362.05, 183, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6),
        ("AMD Instinct MI300X", 1307.4, 653.7, 163.4),
    ],
)
def test_peaks_of_devices(name, half, tf32, fp32, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda:0")
    assert peak_flops(device, torch.bfloat16) == ("throughput/mfu", half * 1e12)
    assert peak_flops(device, torch.float16) == ("throughput/mfu", half * 1e12)
    assert peak_flops(device, torch.float32) == ("throughput/mfu", fp32 * 1e12)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops(device, torch.float32) == ("throughput/mfu", tf32 * 1e12)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, "torch.bfloat16"),  # another chip than the 4090
        ("NVIDIA H20", torch.bfloat16, "torch.bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, "torch.bfloat16"),  # a seventh of one
        ("NVIDIA H100 PCIe", torch.float64, "torch.float64"),
        ("NVIDIA H100 PCIe", None, "this precision"),
    ],
)
def test_an_unknown_peak_is_said_and_gives_no_mfu(name, dtype, said, monkeypatch, run):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    throughput = Throughput()
    with pytest.warns(UserWarning, match=re.escape(f"the peak of {name} in {said}")):
        throughput._peak = peak_flops(torch.device("cuda:0"), dtype)
    assert throughput._utilisation(run.trainer, run.module, 10.0, 1.0, {}) == {}


@pytest.mark.parametrize(
    ("strategy", "precision", "expected"),
    [
        (FSDP(param_format="bf16"), "32-true", torch.bfloat16),
        (FSDP(), "32-true", torch.float32),
        (DDP(), "16-mixed", torch.float16),
        (DDP(), "transformer-engine", None),
    ],
)
def test_the_peak_is_that_of_the_data_type_that_the_strategy_computes_in(strategy, precision, expected):
    assert compute_dtype(SimpleNamespace(strategy=strategy, precision=precision)) is expected


def test_the_cpu_peak_is_that_of_the_fastest_matrix_product(monkeypatch):
    size, clock = 64, iter([0.0, 0.0, 0.05, 0.05, 0.06, 0.06, 0.3, 0.3])  # products of 0.05, 0.01 and 0.24 s
    monkeypatch.setattr("callbacks.throughput.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with FlopCounterMode(display=False) as counter:
        found = measured_peak(torch.device("cpu"), torch.float32, size=size, seconds=0.2)
    products = 4  # the first warms up
    assert found == pytest.approx(counter.get_total_flops() / products / 0.01)


@pytest.mark.ci
def test_the_benchmark_of_a_gpu_trains_both_sides_where_there_is_none(tmp_path, monkeypatch, capsys):
    size = gpu.SIZES["tiny"]
    numbers = [
        sum(p.numel() for p in network.parameters())
        for network in (gpu.network_of(size)(), gpu.HandGPT(size))
    ]
    assert numbers[0] == numbers[1]
    monkeypatch.chdir(tmp_path)
    for way in ({"precision": "bf16"}, {"precision": "bf16", "by_hand": True}):
        found = gpu.measured(size, way, steps=2)
        assert found["rate"] == pytest.approx(size["rows"] * size["length"] / found["ms"] * 1e3)
        assert found["mfu"] > 0
        assert gpu.measured(size, way, steps=2, kernels=True)["kernels"]
    report = tmp_path / "gpu.md"
    gpu.main(["--tiny", "--budget", "0", "--out", str(report)])  # each part says that there was no time
    written = report.read_text()
    assert written.count("the budget is spent") == 2 + len(gpu.WAYS)
    assert written in capsys.readouterr().out
