"""Data types of what FSDP gathers and reduces, and which of it is alive between forward and backward."""

import weakref

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.nn import functional as F

from plugins.networks.gpt import GPT
from plugins.networks.parts.moe import Router
from plugins.networks.parts.positions import rotate, sinusoid_table
from plugins.networks.t5 import T5
from plugins.precision.float8 import Float8
from plugins.precision.fp16_mixed import FP16Mixed
from plugins.strategies.fsdp import FSDP
from plugins.strategies.mixed_precision import Formats
from tests.support.fake_ranks import shards

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
IN_BF16 = MixedPrecision("bf16-mixed", "cpu")


@pytest.mark.parametrize(
    ("precision", "given", "weights", "expected"),
    [
        (Precision(), (None, None), FP32, (None, FP32)),
        (Precision(), (None, None), FP64, (None, FP64)),
        (HalfPrecision("bf16-true"), (None, None), BF16, (None, BF16)),
        (HalfPrecision("bf16-true"), (None, "fp32"), BF16, (None, FP32)),
        (Precision(), ("bf16", None), FP32, (BF16, BF16)),
        (Precision(), ("bf16", "fp32"), FP32, (BF16, FP32)),
        (FP16Mixed(), (None, None), FP32, (None, FP32)),
        (IN_BF16, (None, None), FP32, (BF16, BF16)),
        (IN_BF16, (None, "fp32"), FP32, (BF16, FP32)),
        (IN_BF16, ("fp32", None), FP32, (FP32, FP32)),
        (Float8(), (None, None), FP32, (BF16, BF16)),
    ],
)
def test_gathers_and_reductions_have_a_data_type_with_every_version_of_torch(
    precision, given, weights, expected
):
    """Without a data type torch took that of the parameters before 2.15, and takes float32 since."""
    policy = Formats(precision, *given).policy(nn.Linear(2, 2, dtype=weights))
    assert (policy.param_dtype, policy.reduce_dtype) == expected
    assert policy.cast_forward_inputs is False


@pytest.mark.parametrize(
    ("precision", "given", "expected"),
    [(Precision(), None, None), (Precision(), "bf16", BF16), (IN_BF16, None, None), (IN_BF16, "fp32", None)],
)
def test_products_are_in_the_data_type_of_autocast_where_there_is_one(precision, given, expected):
    """MFU is measured against the peak of this data type."""
    strategy = FSDP(param_format=given)
    strategy.precision_plugin = precision
    assert strategy.compute_dtype is expected


@pytest.mark.parametrize(
    ("precision", "given", "inside"),
    [(IN_BF16, None, False), (IN_BF16, "fp32", True), (Float8(), None, True)],
    ids=["by policy", "by autocast", "a precision that asks autocast"],
)
def test_blocks_compute_without_autocast_where_nothing_asks_it(precision, given, inside):
    class Block(nn.Module):
        def forward(self, x, rope):
            return x, rope, torch.is_autocast_enabled("cpu")

    block = Block()
    Formats(precision, given, None).set_up(block)
    with torch.autocast("cpu", BF16):
        called = block(torch.ones(2), torch.ones(2)), block(rope=torch.ones(2), x=torch.ones(2))
    for x, rope, on in called:
        assert on is inside
        assert rope.dtype is FP32
        assert x.dtype is (BF16 if given is None else FP32)


def attends(x):
    """Returns what 2,048 keys of about the same score give of values that are all 1."""
    return F.scaled_dot_product_attention(x[None, None], x[None, None], torch.ones_like(x)[None, None])


SUMS = {
    "RMSNorm": (lambda x: F.rms_norm(x.T, x.shape[:1]), 2**-8),
    "LayerNorm": (lambda x: F.layer_norm(x.T, x.shape[:1]), 2**-8),
    "softmax": (attends, 2**-8),
    "rotary positions": (
        lambda x: rotate(x[None, None], sinusoid_table(len(x), x.shape[-1], 1e4).float()),
        2**-8,
    ),
    "router": (
        lambda x: Router.forward(ROUTER.to(x.dtype), x).probabilities,
        2**-5,
    ),  # of logits that are rounded
}
with torch.random.fork_rng():
    torch.manual_seed(0)
    ROUTER = Router(64, 8, 2).requires_grad_(False)
    nn.init.normal_(ROUTER.weight, std=0.1)


@pytest.mark.parametrize("name", SUMS)
def test_sums_within_an_operation_are_float32_where_its_tensors_are_not(name):
    """In bf16 a sum of 2,048 ones would end at 256."""
    operation, tolerance = SUMS[name]
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    found, expected = operation(x).double(), operation(x.double())
    scale = expected.abs().max() if name == "rotary positions" else expected.abs()
    assert float(((found - expected).abs() / scale.clamp(min=0.1)).max()) < tolerance


def network():
    return GPT(
        vocab_size=64,
        n_layer=3,
        n_head=2,
        n_embd=24,
        max_sequence_length=16,
        position="rotary",
        norm="rmsnorm",
    )


def copies_between_forward_and_backward(**options):
    """Returns how many bytes of matrices of blocks, or of their casts, autograd keeps when the loss is known."""
    kept = []

    def keep(tensor):
        kept.append(weakref.ref(tensor.untyped_storage()))
        sizes.append((tuple(tensor.shape), tensor.untyped_storage()))
        return tensor

    sizes = []
    with shards(network, FSDP(**options), 0, 2, precision="bf16-mixed") as module:
        shapes = {
            tuple(p.shape) for block in module.network.blocks for p in block.parameters() if p.ndim == 2
        }
        shapes |= {shape[::-1] for shape in shapes}
        batch = {
            "input_ids": torch.zeros(2, 16, dtype=torch.int64),
            "labels": torch.ones(2, 16, dtype=torch.int64),
        }
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = module.trainer.strategy.training_step(batch, 0)
        alive = {id(storage): storage.nbytes() for shape, storage in sizes if shape in shapes}
        del loss
    return sum(alive.values())


def test_no_copy_of_the_weights_is_alive_between_forward_and_backward():
    weights = 3 * (4 * 24 * 24 + 2 * 4 * 24 * 24)
    assert copies_between_forward_and_backward() == 0
    # what autocast keeps, which this counts if it is there
    assert copies_between_forward_and_backward(param_format="fp32") == 2 * weights


def test_blocks_multiply_the_states_of_an_encoder_whose_norm_autocast_makes_wide(monkeypatch):
    """As on CUDA, where norms under autocast return float32; on a CPU they do not."""
    narrow = F.rms_norm

    def norm(x, *more):
        found = narrow(x, *more)
        return found.float() if torch.is_autocast_enabled("cpu") else found

    monkeypatch.setattr(F, "rms_norm", norm)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "head_dim": 8, "intermediate_size": 32}
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "labels": torch.ones(2, 8, dtype=torch.int64)}
    with shards(lambda: T5(vocab_size=64, **sizes), FSDP(), 0, 2, precision="bf16-mixed") as module:
        module.trainer.strategy.training_step(batch, 0).backward()
        assert all(p.grad is not None for p in module.network.encoder_layers.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize(("given", "expected"), [(None, BF16), ("fp32", FP32)])
def test_norms_return_two_bytes_on_a_gpu(given, expected):
    """Under autocast they return float32 there, which sequence parallelism would gather."""
    norm = nn.RMSNorm(8).to("cuda", BF16 if given is None else FP32)
    Formats(MixedPrecision("bf16-mixed", "cuda"), given, None).set_up(norm)
    with torch.autocast("cuda", BF16):
        assert norm(torch.ones(2, 8, device="cuda")).dtype is expected
