"""Each optimizer against its paper's formula, written here in float64; what a run needs of them besides."""

import math

import pytest
import torch
from torch.optim import Optimizer

from core.errors import ConfigError
from plugins.cli import preflight, selection
from plugins.optimizers.adafactor import Adafactor
from plugins.optimizers.adamw import AdamW
from plugins.optimizers.adamw8bit import AdamW8bit
from plugins.optimizers.ademamix import AdEMAMix
from plugins.optimizers.lion import Lion
from plugins.optimizers.lion8bit import Lion8bit
from plugins.optimizers.muon import Muon
from plugins.optimizers.paged_adamw8bit import PagedAdamW8bit
from plugins.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from plugins.optimizers.sgd import SGD
from plugins.optimizers.soap import SOAP
from plugins.optimizers.torchao_adamw8bit import TorchaoAdamW8bit
from toolkit.selection import Run

STEPS, LR, DECAY, EPS = 6, 0.02, 0.3, 1e-8
SHAPES = [(6, 4), (5,)]
ALL = [
    Adafactor,
    AdamW,
    AdamW8bit,
    AdEMAMix,
    Lion,
    Lion8bit,
    Muon,
    PagedAdamW8bit,
    ScheduleFreeAdamW,
    SGD,
    SOAP,
    TorchaoAdamW8bit,
]


def parameters(dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def gradients(step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1 + step)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (step % 3 - 1)
        for shape in shapes
    ]


def trained(optimizer, values, steps=STEPS):
    for step in range(steps):
        for value, gradient in zip(values, gradients(step, [v.shape for v in values]), strict=True):
            value.grad = gradient.to(value.dtype)
        optimizer.step()
    return [value.detach() for value in values]


def by_formula(update, state, shapes=SHAPES, steps=STEPS):
    """Applies `update(t, p, g, s)` to each parameter; `s` is its state, by name, at first zeros."""
    values = [value.detach().clone() for value in parameters(shapes=shapes)]
    states = [{name: torch.zeros_like(value) for name in state} for value in values]
    for step in range(steps):
        for i, gradient in enumerate(gradients(step, shapes)):
            values[i] = update(step + 1, values[i], gradient, states[i])
    return values


def adam_moments(t, g, s, b1, b2):
    s["m"] = b1 * s["m"] + (1 - b1) * g
    s["v"] = b2 * s["v"] + (1 - b2) * g**2
    return s["m"] / (1 - b1**t), s["v"] / (1 - b2**t)


def adamw(t, p, g, s, b1=0.9, b2=0.95):
    m, v = adam_moments(t, g, s, b1, b2)
    return p - LR * DECAY * p - LR * m / (v.sqrt() + EPS)


def sgd(t, p, g, s):
    s["m"] = 0.9 * s["m"] + g + DECAY * p
    return p - LR * s["m"]


def lion(t, p, g, s):
    sign = (0.9 * s["m"] + 0.1 * g).sign()
    s["m"] = 0.99 * s["m"] + 0.01 * g
    return p - LR * DECAY * p - LR * sign


def adafactor(t, p, g, s):
    """Algorithm 4, with the relative step min(lr, 1/sqrt(t)), decay -0.8 and clipping at 1."""
    beta = 1 - t**-0.8
    if p.ndim == 2:
        s["row"] = beta * s["row"] + (1 - beta) * (g**2).mean(1, keepdim=True).expand_as(p)
        s["col"] = beta * s["col"] + (1 - beta) * (g**2).mean(0, keepdim=True).expand_as(p)
        v = s["row"] * s["col"] / s["row"][:, 0].mean()
    else:
        s["row"] = v = beta * s["row"] + (1 - beta) * g**2
    u = g / v.sqrt()
    size = max(1e-3, float(p.square().mean().sqrt())) * min(LR, 1 / math.sqrt(t))
    return p - LR * DECAY * p - size * u / max(1.0, float(u.square().mean().sqrt()))


def ademamix(t, p, g, s, total=4):
    b1, b2, b3, alpha = 0.9, 0.999, 0.9999, 5.0
    share = t / total
    a_t = min(share * alpha, alpha)
    l1, l3 = math.log(b1), math.log(b3)
    b_t = min(math.exp(l1 * l3 / ((1 - share) * l3 + share * l1)), b3)
    m, v = adam_moments(t, g, s, b1, b2)
    s["slow"] = b_t * s["slow"] + (1 - b_t) * g
    return p - LR * DECAY * p - LR * (m + a_t * s["slow"]) / (v.sqrt() + EPS)


def soap(t, p, g, s, b=0.95):
    """Algorithm 3 with a basis that is not renewed; the first step only makes it. Vectors: Adam."""
    if t == 1:
        if p.ndim == 2:  # the basis of the first gradient's products; signs of its columns cancel
            s["left"], s["right"] = (torch.linalg.eigh(m)[1] for m in (g @ g.T, g.T @ g))
        return p
    left, right = (s["left"], s["right"]) if p.ndim == 2 else (None, None)
    turned = left.T @ g @ right if p.ndim == 2 else g
    s["m"] = b * s["m"] + (1 - b) * g
    s["v"] = b * s["v"] + (1 - b) * turned**2
    m = left.T @ s["m"] @ right if p.ndim == 2 else s["m"]
    k = t - 1
    u = m / (s["v"].sqrt() + EPS) * math.sqrt(1 - b**k) / (1 - b**k)
    u = left @ u @ right.T if p.ndim == 2 else u
    return (p - LR * u) * (1 - LR * DECAY)


def fused(optimizer):
    """Steps with the function that `Compile` compiles."""
    optimizer.compile_update(lambda function: function)
    return optimizer


FORMULAS = {
    "SGD": (lambda p: SGD(p, LR, weight_decay=DECAY), sgd, ["m"], 1e-12),
    "Lion": (lambda p: Lion(p, LR, weight_decay=DECAY), lion, ["m"], 1e-12),
    # torch keeps squares of gradients above float32's smallest difference: 1e-7 of values of about 1
    "Adafactor": (lambda p: Adafactor(p, LR, weight_decay=DECAY), adafactor, ["row", "col"], 1e-6),
    "AdEMAMix": (lambda p: AdEMAMix(p, LR, weight_decay=DECAY, alpha_beta3_steps=4), ademamix, ["m", "v", "slow"], 1e-12),
    "Lion, fused": (lambda p: fused(Lion(p, LR, weight_decay=DECAY)), lion, ["m"], 1e-12),
    "AdEMAMix, fused": (lambda p: fused(AdEMAMix(p, LR, weight_decay=DECAY, alpha_beta3_steps=4)), ademamix, ["m", "v", "slow"], 1e-12),
    "SOAP": (lambda p: SOAP(p, LR, weight_decay=DECAY, precondition_frequency=100), soap, ["m", "v"], 1e-9),
}  # fmt: skip


@pytest.mark.parametrize(("build", "formula", "state", "rounding"), FORMULAS.values(), ids=FORMULAS)
def test_six_steps_are_those_of_the_formula(build, formula, state, rounding):
    shapes = (
        [(4, 4), (5,)] if formula is soap else SHAPES
    )  # of other matrices a part of the basis is arbitrary
    values = parameters(shapes=shapes)
    found = trained(build(values), values)
    for one, other, start in zip(
        found, by_formula(formula, state, shapes), parameters(shapes=shapes), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)
        assert (one - start).abs().max() > 0.01


@pytest.mark.parametrize("kind", [AdamW8bit, PagedAdamW8bit, Lion8bit, TorchaoAdamW8bit])
def test_small_tensors_have_the_plain_formula(kind):
    """Below 4,096 elements bitsandbytes keeps the state in float32."""
    formula, state = (lion, ["m"]) if kind is Lion8bit else (adamw, ["m", "v"])
    values = parameters(torch.float32)
    for one, other in zip(
        trained(kind(values, LR, weight_decay=DECAY), values), by_formula(formula, state), strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AdamW8bit, PagedAdamW8bit])
def test_moments_of_8_bits_give_nearly_the_same_steps(kind):
    """Blockwise dynamic quantization has a relative error of about 2% on average."""
    shapes = [(128, 64)]
    values, exact = parameters(torch.float32, shapes), by_formula(adamw, ["m", "v"], shapes)
    optimizer = kind(values, LR, weight_decay=DECAY)
    [found], [start] = trained(optimizer, values), parameters(shapes=shapes)
    error = (found - exact[0]).norm() / (exact[0] - start).norm()
    assert 1e-6 < error < 0.1
    assert {
        s.dtype for s in optimizer.state[values[0]].values() if torch.is_tensor(s) and s.numel() == 8192
    } == {torch.uint8}


def test_a_momentum_of_8_bits_has_nearly_the_same_signs():
    shapes = [(128, 64)]
    values, exact = parameters(torch.float32, shapes), by_formula(lion, ["m"], shapes, steps=2)
    [found] = trained(Lion8bit(values, LR, weight_decay=DECAY), values, steps=2)
    assert ((found - exact[0]).abs() < 1e-4).float().mean() > 0.97


# -- Muon -------------------------------------------------------------------------------------------


def orthogonal(g, steps=5):
    """Newton-Schulz with the published coefficients, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.norm()
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon(t, p, g, s):
    s["m"] = 0.95 * s["m"] + 0.05 * g
    u = 0.05 * g + 0.95 * s["m"]
    return p - LR * DECAY * p - LR * 0.2 * math.sqrt(max(p.shape)) * orthogonal(u)


def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adamw():
    shapes = [(6, 4), (4, 9), (5,)]
    values = parameters(torch.float32, shapes)
    found = trained(Muon(values, LR, weight_decay=DECAY), values)
    expected = by_formula(lambda t, p, g, s: (muon if p.ndim == 2 else adamw)(t, p, g, s), ["m", "v"], shapes)
    starts = parameters(shapes=shapes)
    for one, other, start in zip(found, expected, starts, strict=True):
        error = (one.double() - other).norm() / (other - start).norm()
        assert error < (0.03 if one.ndim == 2 else 1e-5)  # of bfloat16 products, and of float32


def test_muon_takes_the_matrices_of_the_blocks_only_where_they_are_marked():
    matrix, embedding, norm = parameters(torch.float32, [(6, 4), (9, 4), (4,)])
    matrix.hidden_matrix = True
    groups = [{"params": [matrix, embedding]}, {"params": [norm], "weight_decay": 0.0}]
    optimizer = Muon(groups, LR, weight_decay=DECAY)
    assert [[p.shape for p in g["params"]] for g in optimizer.param_groups] == [[(6, 4)], [(9, 4)], [(4,)]]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [DECAY, DECAY, 0.0]
    trained(optimizer, [matrix, embedding, norm], 2)
    assert [sorted(optimizer.state[p]) for p in (matrix, embedding)] == [
        ["momentum_buffer"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert set(state["state"]) == {0, 1, 2}


# -- Schedule-Free ----------------------------------------------------------------------------------


def schedule_free(values, warmup=3, b1=0.9, b2=0.95):
    """Algorithm 1 with explicit x, y and z; returns y and x."""
    results = []
    for i, start in enumerate(values):
        x = z = y = start.detach().clone()
        v, total, largest = torch.zeros_like(x), 0.0, 0.0
        for step in range(STEPS):
            g, t = gradients(step, [p.shape for p in values])[i], step + 1
            rate = LR * min(t / warmup, 1)
            largest = max(largest, rate)
            v = b2 * v + (1 - b2) * g**2
            z = z - rate * (g / ((v / (1 - b2**t)).sqrt() + EPS) + DECAY * y)
            total += largest**2
            x = x + (largest**2 / total) * (z - x)
            y = (1 - b1) * z + b1 * x
        results.append((y, x))
    return results


@pytest.mark.parametrize("change", [lambda optimizer: optimizer, fused], ids=["library", "fused"])
def test_schedule_free_trains_y_and_shows_x(change):
    values = parameters()
    optimizer = change(ScheduleFreeAdamW(values, LR, weight_decay=DECAY, warmup_steps=3))
    trained(optimizer, values)
    expected, before = schedule_free(parameters()), [v.detach().clone() for v in values]
    for value, (y, _) in zip(values, expected, strict=True):
        torch.testing.assert_close(value.detach(), y, rtol=1e-10, atol=1e-10)
    optimizer.eval()
    assert not optimizer.in_training
    for value, (_, x) in zip(values, expected, strict=True):
        torch.testing.assert_close(value.detach(), x, rtol=1e-10, atol=1e-10)
    optimizer.eval()
    optimizer.train()
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))


# -- all of them ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_parameters_may_be_named_and_settings_hold_by_group(kind):
    matrix, vector = parameters(torch.float32)
    groups = [{"params": [("a", matrix)]}, {"params": [("b", vector)], "weight_decay": 0.0, "lr": 0.0}]
    optimizer = kind(groups, lr=LR)
    assert isinstance(optimizer, Optimizer)
    before = vector.detach().clone(), matrix.detach().clone()
    trained(optimizer, [matrix, vector], 3)
    assert torch.equal(vector, before[0])
    assert not torch.equal(matrix, before[1])
    assert [name for group in optimizer.param_groups for name in group["param_names"]] == ["a", "b"]


@pytest.mark.parametrize(
    "kind", [PagedAdamW8bit, TorchaoAdamW8bit, ScheduleFreeAdamW], ids=lambda kind: kind.__name__
)
def test_checkpoints_of_lightnings_strategies_are_refused_with_an_alternative(kind):
    from lightning.pytorch.strategies import ModelParallelStrategy

    items = (selection.describe("model.optimizer", kind, f"x.{kind.__name__}"),
             selection.describe("trainer.strategy", ModelParallelStrategy, "y.ModelParallelStrategy"))  # fmt: skip
    with pytest.raises(ConfigError, match=r"exclude each other.*: take FSDP or HybridParallel"):
        preflight.check(Run(items))


def test_ademamix_is_told_the_length_of_the_run():
    values = parameters()
    optimizer = AdEMAMix(values, LR, weight_decay=DECAY)
    optimizer.bind(4)
    for one, other in zip(trained(optimizer, values), by_formula(ademamix, ["m", "v", "slow"]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
