"""Ring attention on gloo ranks: attention of one process in float64, its gradients, and what it keeps in memory."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from plugins.strategies.context_parallel import ContextParallel
from plugins.strategies.ring_attention import Ring, ring_attention
from plugins.strategies.ring_kernels import Block, CPUKernel, FlashKernel, RecomputingKernel
from tests.support.found_on_ranks import found_on_ranks

RANKS, ROWS, HEADS, GROUPS, LENGTH, WIDTH = 3, 2, 4, 2, 6 * 140, 16
"""A chunk of 140 tokens is no multiple of a block of 128, and two of them none of a tile of 256 queries."""


def inputs(length=LENGTH):
    """Queries, keys, values and the gradient of the output, of all ranks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, heads, length, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def documents(length=LENGTH):
    """Ids of documents of one token up to more than a chunk, which go on over chunks; padding of -1 behind them."""
    ends = torch.tensor([[1, 150, 190, 500, 800], [260, 261, 400, 700, 840]])
    ids = (torch.arange(length) >= ends[..., None]).sum(1)
    ids[0, 800:] = -1
    return ids


def written_out(q, k, v, mask):
    """Attention with its log-sum-exp, by a softmax."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.clamp(min=-1e300)[..., None]).exp() @ v, lse


def seen_by(ids):
    return (ids[:, None, :, None] == ids[:, None, None, :]).tril()


def own(x, rank, dim):
    chunks = x.chunk(2 * RANKS, dim=dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim=dim)


def apart(rank):
    """Returns by how much output and gradients of this rank are apart from those of one process."""
    parallel, found = ContextParallel(dist.group.WORLD, "ring"), {}
    for name in ("rows", "documents"):
        ids = documents() if name == "documents" else torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        batch = {"input_ids": ids, "document_ids": ids}
        parallel.shard(batch if name == "documents" else {"input_ids": ids})
        *whole, upstream = inputs()
        parts = [own(x, rank, 2).requires_grad_() for x in whole]
        whole = [x.requires_grad_() for x in whole]
        expected, _ = written_out(*whole, seen_by(ids))
        wanted = (expected, *torch.autograd.grad(expected, whole, upstream))
        ring = Ring(dist.group.WORLD, parallel.documents, RecomputingKernel())
        for kernel, y in {
            "torch's": parallel.attend(*parts, is_causal=True),
            "recomputing": ring_attention(*parts, ring),
        }.items():
            got = (y, *torch.autograd.grad(y, parts, own(upstream, rank, 2)))
            found[f"{name}, {kernel}"] = max(
                (one - own(other, rank, 2)).abs().max().item() for one, other in zip(got, wanted, strict=True)
            )
    return found


def peaks():
    """Returns the most bytes of tensors during forward and backward, for two lengths."""
    found = []
    for length in (3072, 6144):
        ids = torch.arange(length)[None] // 500
        q, k, v, _ = (x[:1, :, : length // RANKS].float().requires_grad_() for x in inputs(length))
        tracker = MemTracker()
        with tracker:
            ring_attention(q, k, v, Ring(dist.group.WORLD, ids)).sum().backward()
        found.append(sum(tracker.get_tracker_snapshot("peak")[torch.device("cpu")].values()))
    return found


def measured(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    try:
        return {"apart": apart(rank), "peaks": peaks()}
    finally:
        dist.destroy_process_group()


@pytest.mark.ci
def test_ranks_attend_as_one_process_with_memory_linear_in_the_length(tmp_path):
    for found in found_on_ranks(measured, RANKS, tmp_path, str(tmp_path / "meeting")):
        assert len(found["apart"]) == 4
        assert max(found["apart"].values()) < 1e-13, found  # sums of some hundred terms about 1, in float64
        short, long = found["peaks"]
        assert long < 2.05 * short  # scores, or a mask of all queries, would make it 4


def test_messages_travel_while_blocks_are_computed(monkeypatch):
    """Each message starts before the block that it may hide behind, and is waited for after it."""
    said = []

    class Work:
        def __init__(self, number):
            self.number = number

        def wait(self):
            said.append(f"wait {self.number}")

    class Alone(Ring):
        ranks, rank, started = 3, 1, 0

        def start(self, tensor):
            type(self).started += 1
            said.append(f"start {self.started}")
            return tensor.clone(), [Work(self.started)]

    class Said(CPUKernel):
        def attend(self, *given):
            said.append("attend")
            return super().attend(*given)

        def gradients(self, *given):
            said.append("gradients")
            return super().gradients(*given)

    x = torch.ones(1, 1, 4, 8, requires_grad=True)
    ring_attention(x, x, x, Alone(None, None, Said())).sum().backward()
    assert said[:7] == ["start 1", "attend", "wait 1", "start 2", "attend", "wait 2", "attend"]
    backward = [
        "start 3",
        "gradients",
        "start 4",
        "wait 3",
        "start 5",
        "gradients",
        "wait 4",
        "start 6",
        "wait 5",
    ]
    assert said[7:] == [*backward, "gradients", "wait 6", "start 7", "wait 7"]


def check_block(kernel, device, dtype, causal, ids, bound):
    """Compares with float64 what a kernel has of one of two blocks: the queries see 100 keys of another one, too."""
    q, k, v, upstream = (x[..., :300, :].to(device, dtype) for x in inputs())
    others = [x[..., 300:400, :].to(device, dtype).double().repeat_interleave(2, 1) for x in inputs()[1:3]]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    of_all = torch.ones(300, 300, dtype=torch.bool, device=device)
    seen = of_all if ids is None else ids[:, None, :, None] == ids[:, None, None, :]
    seen = seen.tril() if causal else seen
    out, lse = written_out(*wide, seen)
    other, other_lse = written_out(wide[0].detach(), *others, of_all[:, :100])
    total = torch.logaddexp(lse, other_lse)
    merged = out * (lse - total).exp()[..., None] + other * (other_lse - total).exp()[..., None]
    wanted = torch.autograd.grad(merged, wide, upstream.double())
    documents = None if ids is None else (ids, ids)
    block = Block(slice(0, 300), slice(0, 300), causal, q.device, documents)
    exact = torch.promote_types(dtype, torch.float32)
    found = kernel.attend(q, k, v, block)
    got = kernel.gradients(upstream, q, k, v, merged.detach().to(dtype), total.detach().to(exact), block)
    for one, exactly in zip((*found, *got), (out, lse, *wanted), strict=True):
        torch.testing.assert_close(one.double(), exactly, atol=bound, rtol=bound)


@pytest.mark.parametrize("kernel", [CPUKernel(), RecomputingKernel()])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ids", [None, documents()[:, :300]], ids=["rows", "documents"])
def test_blocks_of_queries_that_see_others_agree_with_autograd(kernel, causal, ids):
    check_block(kernel, "cpu", torch.float64, causal, ids, 1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kernel", "dtype", "bound"),
    [
        (FlashKernel(), torch.bfloat16, 3e-2),
        (RecomputingKernel(), torch.bfloat16, 3e-2),
        (RecomputingKernel(), torch.float32, 1e-2),  # of products in tf32
    ],
)
def test_blocks_on_a_gpu_agree_with_float64(kernel, dtype, bound, causal):
    check_block(kernel, "cuda", dtype, causal, None, bound)
    if isinstance(kernel, RecomputingKernel):
        check_block(kernel, "cuda", dtype, causal, documents()[:, :300].cuda(), bound)
