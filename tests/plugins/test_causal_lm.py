"""CausalLM against torch's own cross-entropy: value, gradient, ignored labels, precision."""

import pytest
import torch
import torch.nn.functional as F

from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM

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
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


def gradients(loss, network):
    network.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def reference(network, batch, reduction):
    """Cross-entropy with classes in the second dimension, (B, V, T), the layout torch documents."""
    logits = F.linear(network(batch), network.output_weight)
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction=reduction)


@pytest.mark.parametrize("ignored", [0, 7, B * T - 1])
def test_sum_mean_and_gradient_are_those_of_cross_entropy(ignored, network, batch):
    batch["labels"].view(-1)[
        torch.randperm(B * T, generator=torch.Generator().manual_seed(2))[:ignored]
    ] = -100
    loss, metrics = CausalLM().loss(network, batch)
    assert metrics == {}
    assert loss.tokens.item() == B * T - ignored
    torch.testing.assert_close(loss.total, reference(network, batch, "sum"), rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.mean, reference(network, batch, "mean"), rtol=1e-6, atol=0)
    ours = gradients(loss.mean, network)
    theirs = gradients(reference(network, batch, "mean"), network)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-7, msg=name)


def test_it_is_minus_the_sum_of_log_probabilities(network, batch):
    """From the definition, in float64."""
    loss, _ = CausalLM().loss(network, batch)
    logits = network.double().logits(network(batch))
    chosen = logits.softmax(-1).gather(-1, batch["labels"][..., None])
    assert loss.total.item() == pytest.approx(-chosen.log().sum().item(), rel=1e-5)


def test_an_ignored_position_has_no_influence_on_the_gradient_of_its_logits(network, batch):
    batch["labels"][:, 5:] = -100
    logits = []
    network.logits = lambda hidden: logits.append(F.linear(hidden, network.output_weight)) or logits[0]
    loss, _ = CausalLM().loss(network, batch)
    logits[0].retain_grad()
    loss.total.backward()
    assert logits[0].grad[:, :5].abs().min() > 0
    assert logits[0].grad[:, 5:].abs().max() == 0


def test_without_any_label_loss_and_gradient_are_zero_and_finite(network, batch):
    batch["labels"].fill_(-100)
    loss, _ = CausalLM().loss(network, batch)
    assert (loss.total.item(), loss.tokens.item(), loss.mean.item()) == (0, 0, 0)
    assert all(gradient.abs().max() == 0 for gradient in gradients(loss.mean, network).values())


def test_logits_of_a_bfloat16_network_are_compared_in_float32(network, batch):
    network.to(torch.bfloat16)
    loss, _ = CausalLM().loss(network, batch)
    logits = network.logits(network(batch))
    assert logits.dtype == torch.bfloat16
    assert loss.total.dtype == torch.float32
    wide = F.cross_entropy(logits.double().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    narrow = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    assert loss.total.item() == pytest.approx(wide.item(), rel=1e-6)
    assert narrow.item() != pytest.approx(wide.item(), rel=1e-6)  # what it would have been


def test_autocast_makes_no_difference_to_how_logits_are_compared(network, batch):
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = CausalLM().loss(network, batch)
        logits = network.logits(network(batch))
    assert logits.dtype == torch.bfloat16
    wide = F.cross_entropy(logits.double().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    assert loss.total.item() == pytest.approx(wide.item(), rel=1e-6)
