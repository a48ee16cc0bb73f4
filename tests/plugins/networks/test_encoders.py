"""BERT and T5 compute what transformers computes with the same weights: block by block, and their gradients."""

import pytest
import torch

from plugins.networks.bert import BERT
from tests.support.reference_models import blocks_of, both, hidden_states, lively, tokens

SMALL = {
    "vocab_size": 61,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 32,
    "max_sequence_length": 64,
    "intermediate_size": 96,
}

LENGTHS = (19, 1, 30)


def apart(actual, expected):
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max())


def compare(network, reference, batch, given, tolerance=0.0):
    """Compares hidden states of each block, logits, and the gradient of each weight."""
    actual = hidden_states(network.blocks, lambda: network.logits(network(batch)))
    expected = hidden_states(blocks_of(reference), lambda: reference(**given).logits)
    assert len(actual) == len(expected) == len(network.blocks) + 1
    assert expected[-1].std() > 0.3
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert apart(ours, theirs) <= tolerance, index
    for logits in (actual[-1], expected[-1]):
        logits.logsumexp(-1).sum().backward()


def compare_gradients(network, reference):
    from tests.support.reference_models import renamed

    theirs = dict(reference.named_parameters())
    gradients = renamed(network, {name: weight.grad for name, weight in theirs.items()})
    for key, weight in network.named_parameters():
        if not key.endswith("k_proj.bias"):  # it shifts all scores of a query alike: its gradient is 0
            assert apart(weight.grad, gradients[key]) < 1e-6, key


@pytest.mark.parametrize(("activation", "tolerance"), [("gelu", 0.0), ("gelu_tanh", 1e-6)])
def test_bert_is_that_of_transformers(activation, tolerance):
    network, reference = both(BERT, {**SMALL, "activation": activation})
    ids, types = tokens(), tokens(vocab_size=2, seed=1)
    batch = {"input_ids": ids, "token_type_ids": types}
    compare(network, reference, batch, batch, tolerance)  # gelu_tanh is written out there
    compare_gradients(network, reference)


def test_padding_of_bert_is_masked_as_in_transformers():
    network, reference = both(BERT, SMALL)
    ids, kept = tokens(), torch.arange(50).expand(2, -1) < torch.tensor([[50], [31]])
    documents = torch.where(kept, 0, -1)
    with torch.no_grad():
        ours = network.logits(network({"input_ids": ids, "document_ids": documents}))
        theirs = reference(input_ids=ids, attention_mask=kept.long()).logits
    assert apart(ours[kept], theirs[kept]) < 1e-6
    assert apart(ours[kept], network.logits(network({"input_ids": ids}))[kept]) > 0.01


def packed(name, ids=None):
    numbers = torch.repeat_interleave(torch.tensor([3, 5, 7]), torch.tensor(LENGTHS)).expand(2, -1)
    places = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
    return {"input_ids": tokens(), "document_ids": numbers, "position_ids": places}


def test_documents_of_a_row_are_computed_as_alone():
    network = lively(BERT(**SMALL)).double()
    with torch.no_grad():
        together = network(packed("BERT")).split(LENGTHS, dim=1)
        alone = [network({"input_ids": ids}) for ids in tokens().split(LENGTHS, dim=1)]
    assert max(apart(one, other) for one, other in zip(together, alone, strict=True)) < 1e-12
