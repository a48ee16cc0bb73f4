"""AdamW against torch's unfused one and against the paper's formula."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plugins.optimizers.adamw import AdamW
from plugins.optimizers.sgd import SGD

STEPS = 20
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(17, 9), (33,), (5, 4, 3), (1,)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer, steps=STEPS):
    """Takes steps on gradients that do not depend on the parameters, of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 7 - 3)
                parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def by_the_paper(values, lr, betas, eps, weight_decay):
    """Algorithm 2 of arXiv:1711.05101 in float64, with the schedule multiplier folded into lr."""
    values = [value.detach().double() for value in values]
    first, second = ([torch.zeros_like(value) for value in values] for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for i, value in enumerate(values):
            gradient = (torch.randn(value.shape, generator=generator) * 10.0 ** (step % 7 - 3)).double()
            first[i] = betas[0] * first[i] + (1 - betas[0]) * gradient
            second[i] = betas[1] * second[i] + (1 - betas[1]) * gradient**2
            m = first[i] / (1 - betas[0] ** (step + 1))
            v = second[i] / (1 - betas[1] ** (step + 1))
            values[i] = value - lr * weight_decay * value - lr * m / (v.sqrt() + eps)
    return values


def test_twenty_steps_equal_torchs_unfused_adamw_to_rounding():
    """Tolerance: 20 steps of a few float32 roundings each, of values and updates of about 1."""
    ours, theirs = parameters(), parameters()
    train(AdamW(ours, **OPTIONS))
    train(torch.optim.AdamW(theirs, **OPTIONS, fused=False, foreach=False))
    for a, b, start in zip(ours, theirs, parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        assert (a - start).abs().max() > 1e-2  # it moved


@pytest.mark.parametrize("fused", [True, False])
def test_twenty_steps_equal_the_papers_formula(fused):
    ours = parameters()
    train(AdamW(ours, **OPTIONS, fused=fused))
    for a, b in zip(ours, by_the_paper(parameters(), **OPTIONS), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-6)


def test_in_float64_the_formula_holds_to_float64():
    ours = parameters(torch.float64)
    train(AdamW(ours, **OPTIONS))
    for a, b in zip(ours, by_the_paper(parameters(torch.float64), **OPTIONS), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fused", "kernels"), [(True, 1), (False, 0)])
def test_all_parameters_are_stepped_by_one_fused_kernel(fused, kernels):
    optimizer = AdamW(parameters(), fused=fused)
    train(optimizer, 1)  # the state exists now
    with Operations() as operations:
        optimizer.step()
    assert operations.names.count("_fused_adamw_") == kernels
    assert ("mul_" in operations.names) == (not fused)


def test_a_group_without_decay_is_not_decayed():
    decayed, kept = parameters()[:2]
    start = kept.detach().clone()
    options = {**OPTIONS, "weight_decay": 0.5}
    optimizer = AdamW([{"params": [decayed]}, {"params": [kept], "weight_decay": 0.0}], **options)
    decayed.grad, kept.grad = torch.zeros_like(decayed), torch.zeros_like(kept)
    before = decayed.detach().clone()
    optimizer.step()
    assert torch.equal(kept, start)
    torch.testing.assert_close(decayed.detach(), before * (1 - 3e-3 * 0.5), rtol=1e-7, atol=0)


def test_the_defaults_are_gpt3s():
    (group,) = AdamW(parameters()).param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (6e-4, (0.9, 0.95), 1e-8)
    assert (group["weight_decay"], group["fused"]) == (0.1, True)


def test_a_resumed_optimizer_goes_on_bitwise():
    whole, halves = parameters(), parameters()
    train(AdamW(whole, **OPTIONS), 2)
    first = AdamW(halves, **OPTIONS)
    train(first, 1)
    second = AdamW(halves, **OPTIONS)
    second.load_state_dict(first.state_dict())
    generator = torch.Generator().manual_seed(1)
    for step in range(2):
        for parameter in halves:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 7 - 3)
    second.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_whole_and_spread_tensors_are_stepped_together(kind, tmp_path):
    """As under tensor parallelism, where only some weights are cut up; with one rank, the numbers are known."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        ours, theirs = parameters(), parameters()
        mixed = [torch.nn.Parameter(distribute_tensor(ours[0].detach(), mesh)), *ours[1:]]
        optimizers = kind(mixed), kind(theirs)
        for step in range(3):
            for one, other in zip(mixed, theirs, strict=True):
                other.grad = torch.full_like(other, 0.1 * (step + 1)) + other.detach()
                one.grad = distribute_tensor(other.grad, mesh) if one is mixed[0] else other.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(mixed[0].to_local(), theirs[0])
        for one, other in zip(mixed[1:], theirs[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)  # SGD's kernels round apart
        assert all(
            hasattr(state, "to_local")
            for name, state in optimizers[0].state[mixed[0]].items()
            if name != "step"
        )
    finally:
        torch.distributed.destroy_process_group()
