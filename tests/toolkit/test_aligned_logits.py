"""Logits with a copy of the output weight that has more rows: the same values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.chunked import sums_over_positions
from toolkit.aligned_logits import first_columns, logits_of, padded

VOCAB, WIDTH = 201, 24


def results(logits, weight, hidden, labels):
    """Returns the loss and the gradients of weight and hidden states."""
    weight.grad = None
    rows = hidden.clone().requires_grad_()
    found = logits(rows)
    assert found.shape == (*labels.shape, VOCAB)
    loss = F.cross_entropy(found.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach(), weight.grad, rows.grad


@pytest.mark.parametrize(("dtype", "mixed"), [(torch.float64, False), (torch.float32, True)])
def test_loss_and_gradients_are_those_of_the_weight_itself(dtype, mixed):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(VOCAB, WIDTH, dtype=dtype))
    hidden, labels = torch.randn(2, 5, WIDTH, dtype=dtype), torch.randint(VOCAB, (2, 5))
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        one = results(lambda x: first_columns(F.linear(x, padded(weight)), VOCAB), weight, hidden, labels)
        # with bfloat16 products, and gradients that are rounded to it on the way
        other = results(lambda x: F.linear(x, weight).to(one[0].dtype), weight, hidden, labels)
    bound = 2.0**-7 if mixed else 1e-13
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound * float(expected.abs().max()))


def test_on_a_cpu_nothing_is_padded():
    network = GPT(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=WIDTH, max_sequence_length=8)
    assert logits_of(network, torch.zeros(1, 1, WIDTH)) == network.logits


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [VOCAB, 256])
def test_on_cuda_the_loss_is_that_of_plain_logits(vocab_size):
    torch.manual_seed(0)
    network = GPT(vocab_size=vocab_size, n_layer=1, n_head=2, n_embd=WIDTH, max_sequence_length=8).cuda()
    hidden, labels = torch.randn(2, 8, WIDTH, device="cuda"), torch.randint(vocab_size, (2, 8), device="cuda")
    chosen = logits_of(network, hidden)
    assert (chosen == network.logits) is (vocab_size % 64 == 0)
    torch.testing.assert_close(chosen(hidden), network.logits(hidden), rtol=1e-5, atol=1e-6)
    batch = {"input_ids": labels, "labels": labels}
    loss = CausalLM().loss(network, batch)[0]
    plain = sums_over_positions(
        lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum")[None],
        network, network(batch), labels, chunk_tokens=4,
    )  # fmt: skip
    torch.testing.assert_close(loss.total, plain[0], rtol=1e-5, atol=0)
