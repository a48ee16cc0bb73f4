"""OrderedReduceScatter's own bounds; tests/callbacks/test_rank_invariance.py has its sums on real ranks."""

import pytest
import torch
import torch.distributed as dist

from core.errors import ConfigError
from plugins.strategies.ordered_reduce_scatter import OrderedReduceScatter
from toolkit.ordered_sums import Turn


@pytest.fixture
def reduce_scatter():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield OrderedReduceScatter(Turn())
    dist.destroy_process_group()


def reduced(scatter, values):
    gradient = torch.tensor(values)
    output = scatter.allocate(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    scatter(output, gradient, None, dist.ReduceOp.SUM)
    return output.tolist()


def test_sums_of_a_step_begin_with_it(reduce_scatter):
    assert reduced(reduce_scatter, [1.0, 2.0]) == [1, 2]
    reduce_scatter.turn.number = 1
    assert reduced(reduce_scatter, [1.0, 1.0]) == [2, 3]
    reduce_scatter.turn.step, reduce_scatter.turn.number = 1, 0
    assert reduced(reduce_scatter, [5.0, 5.0]) == [5, 5]


@pytest.mark.parametrize(
    ("number", "values"), [(0, [1.0, 1.0]), (1, [1.0, 1.0, 1.0])], ids=["twice", "others"]
)
def test_gradients_in_parts_are_refused(reduce_scatter, number, values):
    reduced(reduce_scatter, [1.0, 2.0])
    reduce_scatter.turn.number = number
    with pytest.raises(ConfigError, match="reduces gradients in parts"):
        reduced(reduce_scatter, values)
