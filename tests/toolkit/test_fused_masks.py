"""Masks of FlexAttention: their definition, the blocks that torch finds, and attention with them."""

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from toolkit.fused_masks import as_autocast, fused_attention, fused_mask, masked_attention

LENGTH = 700
"""Of five whole blocks and a part of one."""


def rising():
    """Documents of one token up to several blocks, with padding of -1 behind them, as data modules pack them."""
    ends = torch.tensor([[1, 128, 200, 520, 650], [256, 257, 258, 400, 700]])
    ids = (torch.arange(LENGTH) >= ends[..., None]).sum(1)
    ids[0, 650:] = -1
    return ids


def seen_by(ids, window):
    """The definition."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    near = (distance >= 0) & (distance < (window or LENGTH))
    return near if ids is None else near & (ids[:, None, :, None] == ids[:, None, None, :])


CASES = {  # documents, window, and whether no block is listed in vain
    "documents": (rising(), None, True),
    "documents and window": (rising(), 300, True),
    "window": (None, 300, True),
    "falling ids": (rising().flip(1), None, False),
    "ids that come again": (rising() % 2, None, False),
}


@pytest.mark.parametrize(("ids", "window", "sparse"), CASES.values(), ids=CASES)
def test_a_mask_is_its_definition_and_its_blocks_are_those_of_torch(ids, window, sparse):
    mask = fused_mask(LENGTH, LENGTH, torch.device("cpu"), None if ids is None else (ids, ids), window=window)
    seen = seen_by(ids, window).expand(2, 1, -1, -1)
    places = [torch.arange(size) for size in (2, 1, LENGTH, LENGTH)]
    assert torch.equal(mask.mask_mod(*torch.meshgrid(*places, indexing="ij")), seen)
    rows = None if ids is None else 2
    torchs = create_block_mask(
        lambda row, head, query, key: seen[row, 0, query, key], rows, None, LENGTH, LENGTH, "cpu"
    )
    listed, needed = mask.to_dense(), torchs.to_dense()
    assert (listed >= needed).all()
    assert torch.equal(listed[-1], needed[-1]) or not sparse
    if sparse:
        assert torch.equal(mask.full_kv_num_blocks[-1], torchs.full_kv_num_blocks[-1])
        assert (mask.full_kv_num_blocks > 0).any()


def test_queries_and_keys_of_two_chunks():
    """As ring attention has them: of other lengths, all keys before all queries, and queries that see nothing."""
    queries, keys = rising()[:, 300:], rising()[:, :300]
    mask = fused_mask(400, 300, torch.device("cpu"), (queries, keys), causal=False)
    seen = queries[:, None, :, None] == keys[:, None, None, :]
    needed = create_block_mask(
        lambda row, head, query, key: seen[row, 0, query, key], 2, None, 400, 300, "cpu"
    )
    assert (mask.to_dense() >= needed.to_dense()).all()
    assert mask.to_dense().sum() < mask.to_dense().numel()
    assert not seen.any(-1).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention_without_gradients_is_that_of_flex_attention(cap):
    """On a CPU both compute it; the log-sum-exp, too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, LENGTH, size) for heads, size in ((4, 16), (2, 16), (2, 24)))
    ids = rising()
    mask = fused_mask(LENGTH, LENGTH, q.device, (ids, ids), window=150)
    cap_scores = None if cap is None else lambda score, *_: cap * torch.tanh(score / cap)
    theirs, more = flex_attention(
        q, k, v, cap_scores, mask, scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    ours, lse = fused_attention(q, k, v, mask, 0.3, cap, with_lse=True)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, more.lse, atol=2e-6, rtol=1e-5)
    if cap is None:
        dense = masked_attention(q, k, v, seen_by(ids, 150), scale=0.3, enable_gqa=True)
        torch.testing.assert_close(masked_attention(q, k, v, mask, scale=0.3), dense, atol=2e-6, rtol=1e-5)


def test_attention_under_autocast_has_its_type():
    """On CUDA layer norms of queries and keys are in float32; scaled_dot_product_attention casts them."""
    given = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8).bfloat16()
    assert [x.dtype for x in as_autocast(*given)] == [x.dtype for x in given]
    with torch.autocast("cpu", torch.bfloat16):
        assert {x.dtype for x in as_autocast(*given)} == {torch.bfloat16}
        assert as_autocast(given[0].double())[0].dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 64])
def test_gradients_on_a_gpu_are_those_of_float64(width):
    torch.manual_seed(0)
    ids = rising().cuda()
    given = [torch.randn(2, heads, LENGTH, width, device="cuda") for heads in (4, 2, 2)]
    mask, found = fused_mask(LENGTH, LENGTH, ids.device, (ids, ids), window=150), []
    for dtype in (torch.float64, torch.bfloat16):  # in float64 it is written out
        inputs = [x.bfloat16().to(dtype).requires_grad_() for x in given]
        out, lse = fused_attention(*inputs, mask, cap=2.0, with_lse=True)
        found.append((out, lse, *torch.autograd.grad(out.sum() + lse.square().sum(), inputs)))
    for exact, rounded in zip(*found, strict=True):
        torch.testing.assert_close(rounded.double(), exact, atol=0.05, rtol=0.05)
