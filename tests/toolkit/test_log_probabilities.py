"""Log-probabilities of labels against the definition in float64: values, gradients, precision and memory."""

import pytest
import torch

from plugins.networks.gpt import GPT
from tests.support.largest_tensor import LargestTensor
from toolkit.log_probabilities import log_probabilities, row_sums

VOCAB, B, T = 37, 3, 12


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = GPT(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=16, max_sequence_length=T)
    with torch.no_grad():  # far from uniform, so that a wrong label or position shows
        network.output_weight.mul_(20)
    return network


@pytest.fixture
def batch():
    tokens = torch.randint(VOCAB, (B, T + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[0, :5] = labels[1, 8:] = -100
    labels[2] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


def by_definition(network, batch):
    labels = batch["labels"]
    logits = network.logits(network(batch)).double()
    chosen = logits.softmax(-1).log().gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen.where(labels != -100, 0.0)


def gradients(network, loss):
    network.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in network.named_parameters()}


@pytest.mark.parametrize("chunk_tokens", [1, 7, B * T])
def test_values_and_gradients_are_those_of_the_definition(chunk_tokens, network, batch):
    """Each position has a gradient of its own, as in a loss that is no sum over tokens; all in float64."""
    network.double()
    found, expected = log_probabilities(network, batch, chunk_tokens), by_definition(network, batch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    ours, theirs = (gradients(network, (x.sum(1).exp() * x.sum(1)).sum()) for x in (found, expected))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize("chunk_tokens", [7, B * T])
def test_under_autocast_logits_are_compared_in_float32(chunk_tokens, network, batch):
    with torch.autocast("cpu", torch.bfloat16):
        found = log_probabilities(network, batch, chunk_tokens)
        expected = by_definition(network, batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    ours, theirs = gradients(network, found.square().sum()), gradients(network, expected.square().sum())
    for name in ours:
        if name.endswith("k_proj.bias"):  # 0 but for rounding: it changes no attention
            continue
        assert (ours[name] - theirs[name]).norm() / theirs[name].norm() < 2**-6, name  # roundings to bfloat16


def test_a_network_with_logits_of_its_own_is_read_alike(batch):
    class Capped(GPT):
        def logits(self, hidden):
            return 5 * (super().logits(hidden) / 5).tanh()

    torch.manual_seed(0)
    network = Capped(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=16, max_sequence_length=T).double()
    found, expected = log_probabilities(network, batch, 5), by_definition(network, batch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("training", [True, False])
def test_no_tensor_holds_all_logits(training):
    torch.manual_seed(0)
    network = GPT(vocab_size=1000, n_layer=1, n_head=2, n_embd=8, max_sequence_length=64)
    tokens = torch.randint(1000, (16, 65))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    with LargestTensor() as largest, torch.set_grad_enabled(training):
        found = log_probabilities(network, batch, 32).square().sum()
        if training:
            found.backward()
    assert largest.bytes <= 4 * 1000 * 64  # a chunk, or the weights


def test_rows_are_summed_over_their_labels(batch):
    sums, counts = row_sums(torch.full((B, T), 0.5), batch["labels"])
    assert counts.tolist() == [7, 8, 0]
    assert sums.tolist() == [3.5, 4.0, 0.0]
