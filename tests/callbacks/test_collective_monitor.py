"""Bytes against closed forms, of real ranks."""

import pytest
import torch

from callbacks.collective_monitor import CollectiveMonitor, figures, of_kind
from core.errors import ConfigError
from plugins.networks.gpt import GPT
from tests.support.launched_ranks import CONFIG, forked, results
from toolkit.collectives import COLLECTIVES, Collective
from toolkit.traces import read_trace

COUNTS = 16
"""Bytes of the loss and the number of label tokens, which the ranks share in each step."""


def monitored(folder, *more):
    """Returns the figures of step 2, in which nothing is logged, of a run on two ranks."""
    words = [
        "--trainer.callbacks+=CollectiveMonitor",
        "--trainer.callbacks.every_n_steps=2",
        "--trainer.max_steps=2",
    ]
    words += [
        "--trainer.limit_val_batches=0",
        "--trainer.log_every_n_steps=3",
        "--trainer.gradient_clip_val=null",
    ]
    # which watches the same step
    words += ["--trainer.callbacks+=StepTime", "--trainer.callbacks.every_n_steps=2"]
    done = forked(2, folder, *words, *more)
    assert done.code == 0, done.error_text
    row = results(folder)[0][2]
    return {
        name.removeprefix("collectives/"): float(value)
        for name, value in row.items()
        if "collectives/" in name and value
    }


def network():
    return GPT(**CONFIG["model"]["network"]["init_args"])


def size(module):
    return sum(4 * parameter.numel() for parameter in module.parameters())


@pytest.mark.ci
def test_ddp_reduces_the_gradients_once(tmp_path):
    profile = [
        f"--trainer.callbacks{words}" for words in ("+=Profile", ".at_step=1", ".steps=1", ".ranks=[0,1]")
    ]
    found = monitored(tmp_path, *profile)
    traces = [read_trace(tmp_path / "run" / f"profile_step_1.rank{rank}.json.gz") for rank in (0, 1)]
    assert all(trace.operators()["aten::embedding"].calls for trace in traces)
    assert found["all_reduce_bytes"] == size(network()) + COUNTS
    assert found["all_reduce_gb_per_second"] > 0
    assert not [name for name in found if name.startswith(("all_gather", "reduce_scatter"))]


@pytest.mark.ci
def test_fsdp_gathers_weights_and_scatters_gradients(tmp_path):
    found = monitored(tmp_path, "--trainer.strategy=FSDP")
    net = network()
    whole, blocks = size(net), sum(map(size, net.blocks))
    # in both micro-batches, blocks in backward again; what is not in a block stays gathered for the whole step
    assert found["reduce_scatter_bytes"] == 2 * whole
    assert found["all_gather_bytes"] == whole - blocks + 2 * 2 * blocks
    assert found["all_reduce_bytes"] == COUNTS
    assert found["reduce_scatter_calls"] == 2 * (len(net.blocks) + 1)


def test_bandwidth_is_that_of_the_rank_that_waited_least():
    two = [Collective("all_reduce", 10**9, 0.0, 2.0), Collective("all_reduce", 10**9, 1.0, 4.0)]
    rows = [[of_kind(found, kind) for kind in COLLECTIVES] for found in (two, two)]
    ranks = torch.tensor(rows, dtype=torch.float64)
    ranks[1, 0, 2] = 0.5
    found = figures(ranks)
    assert found == {
        "collectives/all_reduce_calls": 2,
        "collectives/all_reduce_bytes": 2e9,
        "collectives/all_reduce_gb_per_second": 4,
    }
    assert of_kind([*two, Collective("send", 8, 0.0)], "send") == (1, 8, 0)  # nobody says when it ended


def test_a_mistake():
    with pytest.raises(ConfigError, match="every_n_steps >= 1, not 0"):
        CollectiveMonitor(0)
