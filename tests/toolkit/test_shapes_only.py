"""Without what forward computed: the same operations on the same shapes, and nothing is kept but weights and small tensors."""

import contextlib

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiny_training import tiny_gpt
from toolkit.shapes_only import SMALL, ShapesOnly


class Operations(TorchDispatchMode):
    """Notes what is computed, and of which shapes, but for what makes zeros, and what autograd does to keep tensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in ("empty_strided", "zero_", "detach"):
            self.seen.append((str(func), [a.shape for a in args if isinstance(a, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def computed(context):
    """Returns the operations of a forward and backward whose activations are larger than what is kept, and the gradients."""
    torch.manual_seed(0)
    network = tiny_gpt()
    ids = torch.zeros(128, 16, dtype=torch.int64)
    hidden = network({"input_ids": ids})
    assert hidden.numel() * 4 > SMALL
    with Operations() as operations, context:
        network.logits(network({"input_ids": ids})).square().mean().backward()
    return operations.seen, {name: p.grad for name, p in network.named_parameters()}


def test_the_same_operations_are_made_on_tensors_of_the_same_shapes():
    usual, expected = computed(contextlib.nullcontext())
    seen, found = computed(ShapesOnly())
    assert seen == usual
    for name, gradient in expected.items():
        assert found[name].shape == gradient.shape, name
    assert any(not torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("size", "kept"), [(SMALL // 4 + 1, False), (SMALL // 4, True)])
def test_activations_are_freed_and_small_tensors_are_kept(size, kept):
    weight = torch.ones(size, requires_grad=True)
    with ShapesOnly():
        inner = weight.exp()
        result = (inner * inner).sum()
    storage = StorageWeakRef(inner.untyped_storage())
    del inner
    assert storage.expired() != kept
    result.backward()
    assert bool(weight.grad.any()) == kept


def test_a_weight_is_kept_whatever_its_size():
    weight = torch.full((SMALL,), 3.0, requires_grad=True)
    with ShapesOnly():
        result = (weight * weight).sum()
    result.backward()
    assert torch.equal(weight.grad, torch.full((SMALL,), 6.0))
