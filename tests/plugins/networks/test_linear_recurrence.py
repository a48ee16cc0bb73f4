"""The chunked form of linear recurrences against their definition, token by token."""

import pytest
import torch

from plugins.networks.parts.linear_recurrence import Segments, chunked, recurrent


def inputs(length, *, gates=1, delta=False, dtype=torch.float64, decay=2.0, heads=2):
    """Returns q, k, v, log_decay, state and options, K = 5 and V = 7; queries and keys are shared by 3 value heads."""
    torch.manual_seed(0)
    shared = (2, heads, 1, length)
    q, k = torch.randn(*shared, 5, dtype=dtype), torch.randn(*shared, 5, dtype=dtype)
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(2, heads, 3, length, 7, dtype=dtype)
    log_decay = -decay * torch.rand(2, heads, 3, length, gates, dtype=dtype)
    state = torch.randn(2, heads, 3, 5, 7, dtype=dtype)
    beta = 2 * torch.rand(2, heads, 3, length, dtype=dtype) if delta else None
    found = [q, k, v, log_decay, state]
    return [x.requires_grad_() for x in found], None if beta is None else beta.requires_grad_()


def segments(length):
    """Returns documents of several chunks, of one token, and ends within a chunk; the first goes on or does not."""
    ids = torch.zeros(2, length, dtype=torch.int64)
    ids[0, 3:], ids[0, 4:], ids[0, 25:], ids[1, 16:] = 1, 2, 3, 5
    return Segments(ids, torch.tensor([0, -1]))


def everything(form, given, beta, own):
    """Returns outputs, last state and all gradients of both."""
    y, state = form(*given, own, beta=beta)
    wanted = [*given, *([] if beta is None else [beta])]
    return [y, state, *torch.autograd.grad(y.sin().sum() + state.cos().sum(), wanted)]


@pytest.mark.parametrize("delta", [False, True], ids=["", "delta"])
@pytest.mark.parametrize("gates", [1, 5], ids=["scalar", "vector"])
def test_chunks_give_outputs_states_and_gradients_of_single_steps(gates, delta):
    for length in (1, 8, 37):  # less than a chunk, one, and no multiple
        given, beta = inputs(length, gates=gates, delta=delta)
        for own in (None, segments(length)) if length > 25 else (None,):
            steps = everything(recurrent, given, beta, own)
            chunks = everything(lambda *a, **b: chunked(*a, **b, chunk_size=8), given, beta, own)
            for one, other in zip(chunks, steps, strict=True):
                torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("delta", [False, True], ids=["linear", "delta"])
def test_a_step_is_the_product_of_matrices_that_the_papers_write(delta):
    (q, k, v, log_decay, state), beta = inputs(6, delta=delta)
    y, last = recurrent(q, k, v, log_decay, state, beta=beta)
    own = state[1, 0, 2]
    for t in range(6):
        key, decay = k[1, 0, 0, t], log_decay[1, 0, 2, t].exp()
        strength = beta[1, 0, 2, t] if delta else 1.0
        turn = (
            torch.eye(5, dtype=own.dtype) - strength * torch.outer(key, key)
            if delta
            else torch.eye(5).double()
        )
        own = decay * turn @ own + strength * torch.outer(key, v[1, 0, 2, t])
        torch.testing.assert_close(y[1, 0, 2, t], own.T @ q[1, 0, 0, t])
    torch.testing.assert_close(last[1, 0, 2], own)


@pytest.mark.parametrize("gates", [1, 5], ids=["scalar", "vector"])
def test_long_sequences_and_strong_decays_stay_finite_and_near_float64(gates):
    """Decays of up to e^-200 a token beside weak ones: a quotient of products of decays would be 0 / 0."""
    given, beta = inputs(2048, gates=gates, delta=True, decay=200.0, heads=1)
    with torch.no_grad():
        given[3][..., ::3, :] *= 1e-4
    exact, _ = chunked(*given, beta=beta, chunk_size=16)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):  # bfloat16: 2^-8 of each input
        short = [x.detach().to(dtype).requires_grad_() for x in given]
        short[4] = given[4].detach().float()  # states are
        y, state = chunked(*short, beta=beta.detach().to(dtype), chunk_size=16)
        assert (y.dtype, state.dtype) == (dtype, torch.float32)
        assert (y - exact).abs().max() < near * exact.abs().max()
        y.float().square().sum().backward()
        assert all(x.grad.isfinite().all() for x in short[:4])


def test_autocast_leaves_the_recurrence_in_float32():
    given, beta = inputs(40, delta=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked(*given, beta=beta, chunk_size=8)
    for one, other in zip(found, chunked(*given, beta=beta, chunk_size=8), strict=True):
        assert torch.equal(one, other)
