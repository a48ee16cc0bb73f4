"""Traces of real runs, against torch's own sums; and two that are compared by the command line."""

import gzip
import json
import re

import pytest
import torch
from torch.profiler import ProfilerActivity

from callbacks.profile import Profile
from conformance.runs import run as run_words
from core.errors import ConfigError
from toolkit.traces import EVERYWHERE, STEPS, as_text, read_trace


def write(path, events, steps=1):
    document = {
        STEPS: steps,
        "traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "cat": "cpu_op", **event} for event in events],
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_self_time_and_idle_of_a_trace_by_hand(tmp_path):
    events = [
        {"name": "outer", "ts": 0, "dur": 4000},
        {"name": "inner", "ts": 1000, "dur": 1000},
        {"name": "outer", "ts": 6000, "dur": 2000},
        {"name": "kernel", "cat": "kernel", "pid": 0, "tid": 7, "ts": 3000, "dur": 2000},
        {"name": "waits", "cat": "python_function", "ts": 0, "dur": 9000},  # no operator
    ]
    trace = read_trace(write(tmp_path / "trace.json", events, steps=2))
    assert trace.operators() == {"outer": (1, 2.5), "inner": (0.5, 0.5), "kernel": (0.5, 1)}
    assert trace.idle() == pytest.approx(
        {"CPU, thread 0": 2 / 8, "GPU 0, stream 7": 6 / 8, EVERYWHERE: 1 / 8}
    )


def test_gaps_lie_between_what_ended_last_and_what_began_next(tmp_path):
    events = [
        {"name": "long", "ts": 0, "dur": 4000},
        {"name": "inner", "ts": 1000, "dur": 1000},  # ends before what it is in
        {"name": "next", "ts": 6000, "dur": 1000},
        {"name": "at once", "ts": 7000, "dur": 1000},  # no gap
        {"name": "last", "ts": 8500, "dur": 500},
        *(
            {"name": f"k{n}", "cat": "kernel", "pid": 0, "tid": 7, "ts": n * n * 100, "dur": 50}
            for n in range(6)
        ),
    ]
    trace = read_trace(write(tmp_path / "trace.json", events))
    assert trace.gaps(2)["GPU 0, stream 7"] == [(0.85, "k4", "k5"), (0.65, "k3", "k4")]
    assert trace.gaps()["CPU, thread 0"] == [(2, "long", "next"), (0.5, "at once", "last")]
    lines = [line.split() for line in as_text(trace).splitlines()]
    assert ["2.000", "CPU,", "thread", "0", "long", "next"] in lines
    assert len(lines) == 24  # 11 operators, 3 of the idle shares, 5 gaps; three headers; two empty lines


def test_self_times_agree_with_torch(tmp_path):
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        (torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)).relu().sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    found = read_trace(tmp_path / "trace.json.gz").operators()
    expected = {event.key: event for event in profiler.key_averages()}
    for name in ("aten::mm", "aten::relu", "aten::randn"):
        assert found[name].calls == expected[name].count
        assert found[name].self_ms == pytest.approx(
            expected[name].self_cpu_time_total / 1e3, rel=0.02
        )  # the trace has ns


def test_a_run_writes_traces_of_the_chosen_steps(fit, tmp_path):
    run = fit(tmp_path, [Profile(at_step=2, steps=2, every_n_steps=4)], max_steps=8, val_check_interval=3)
    files = sorted(path.name for path in tmp_path.glob("profile*"))
    assert files == [f"profile_step_{step}.rank0.{kind}" for step in (2, 6) for kind in ("json.gz", "txt")]
    assert 0 <= float(run.trainer.callback_metrics["profile/idle_share"]) < 1
    with gzip.open(tmp_path / files[0]) as stream:
        assert json.load(stream)[STEPS] == 2
    trace = read_trace(tmp_path / files[0])
    assert trace.operators()["aten::embedding"].calls == 1
    text = (tmp_path / files[1]).read_text(encoding="utf-8")
    assert re.search(r"^ +[\d.]+ +[\d.]+% +[\d.]+  aten::", text, re.MULTILINE)
    assert re.search(r"^ *[\d.]+%  anywhere$", text, re.MULTILINE)


def test_two_profiles_are_compared(tmp_path):
    one = write(
        tmp_path / "a.json", [{"name": "mm", "ts": 0, "dur": 4000}, {"name": "add", "ts": 5000, "dur": 1000}]
    )
    other = write(
        tmp_path / "b.json",
        [{"name": "mm", "ts": 0, "dur": 1000}, {"name": "add\x1b[31m", "ts": 1000, "dur": 1000}],
    )
    done = run_words(["compare-profiles", str(one), str(other), "--rows=2"], tmp_path)
    assert done.code == 0, done.error_text
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[1] == ["4.000", "1.000", "-3.000", "1.0", "1.0", "mm"]
    assert rows[3] == ["5.000", "2.000", "-3.000", "2.0", "2.0", "all", "3", "operators"]
    assert rows[-1] == ["16.7%", "0.0%", "anywhere"]
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "content", [b"{}", b"\x1f\x8bbroken", b"[1", b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}']
)
def test_what_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "trace.json.gz").write_bytes(content)
    with pytest.raises(ConfigError, match="is no trace that can be read"):
        read_trace(tmp_path / "trace.json.gz")


@pytest.mark.parametrize("options", [{"steps": 0}, {"every_n_steps": 2}, {"ranks": (-1,)}])
def test_mistakes(options):
    with pytest.raises(ConfigError, match="Profile takes at_step >= 1"):
        Profile(**options)
