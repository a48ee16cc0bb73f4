"""Compressed gradients: the hooks run, once for each bucket of an optimizer step, and round as they should."""

import re

import pytest

from core.__main__ import main
from core.errors import ConfigError
from plugins.strategies.ddp import DDP
from tests.support.same_run import STEPS, differences, fit, one_process

COUNTING = {"trainer": {"callbacks": [{"class_path": "tests.support.counting.HookCalls"}]}}
ROUNDING = {"bf16": 2**-8, "fp16": 2**-10, "powersgd": 0.2}
"""Relative to float32's run after 6 steps: one unit in the last place of the format; what rank 2 leaves out."""


def compressed(**init_args):
    return COUNTING["trainer"] | {"strategy": {"class_path": "DDP", "init_args": init_args}}


@pytest.mark.parametrize(
    "compression", [pytest.param(name, marks=[pytest.mark.ci] * (name != "fp16")) for name in ROUNDING]
)
def test_hooks_run_and_round(compression):
    arguments = {"compression": compression, "powersgd_rank": 2, "powersgd_start": 2}
    done = fit({"trainer": compressed(**arguments)}, 2)
    apart = differences(done, one_process({}))
    assert 1e-6 < max(apart["loss"], apart["gradient norm"]) < ROUNDING[compression], apart
    assert (
        int(re.search(r"HOOK_CALLS (\d+)", done.stdout)[1]) == STEPS
    )  # one bucket; not with each micro-batch


def test_small_buckets_travel_one_by_one():
    done = fit({"trainer": compressed(compression="bf16", bucket_mb=0.001)}, 2)
    assert int(re.search(r"HOOK_CALLS (\d+)", done.stdout)[1]) > 5 * STEPS


@pytest.mark.parametrize(
    ("name", "value"),
    [("powersgd_start", 1), ("powersgd_rank", 0), ("bucket_mb", 0), ("timeout_minutes", -1)],
)
def test_numbers_out_of_range(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be"):
        DDP(**{name: value})


@pytest.mark.parametrize(
    "more", [{"callbacks": [{"class_path": "SkipStep"}]}, {"precision": "16-mixed"}, {}], ids=str
)
def test_powersgd_is_refused_beside_what_goes_on_behind_gradients_that_are_not_finite(
    more, tmp_path, capsys, write_yaml, tiny
):
    tiny["trainer"] |= compressed(compression="powersgd") | {"devices": 2} | more
    code = main(["check", "--config", str(write_yaml("run.yaml", tiny))])
    message = capsys.readouterr().err
    assert code == (2 if more else 0), message
    assert not more or "compression=powersgd adds the error of gradients" in message
