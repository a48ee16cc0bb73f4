"""BERT and T5 compute what transformers computes with the same weights: block by block, and their gradients."""

import pytest
import torch

from conformance.runs import on_ranks
from plugins.networks.bert import BERT
from plugins.networks.t5 import T5
from tests.support.reference_models import (
    blocks_of,
    both,
    hidden_states,
    lively,
    reference_of,
    renamed,
    tokens,
)

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
    assert expected[-1].std() > 0.1
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert apart(ours, theirs) <= tolerance, index
    for logits in (actual[-1], expected[-1]):
        logits.logsumexp(-1).sum().backward()


def compare_gradients(network, reference):
    theirs = dict(reference.named_parameters())
    gradients = renamed(network, {name: weight.grad for name, weight in theirs.items()})
    for key, weight in network.named_parameters():
        if not key.endswith("k_proj.bias"):  # it shifts all scores of a query alike: its gradient is 0
            assert apart(weight.grad, gradients[key]) < 2e-6, key


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


def packed():
    numbers = torch.repeat_interleave(torch.tensor([3, 5, 7]), torch.tensor(LENGTHS)).expand(2, -1)
    places = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
    return {"input_ids": tokens(), "document_ids": numbers, "position_ids": places}


@pytest.mark.parametrize("name", ["BERT", "T5"])
def test_documents_of_a_row_are_computed_as_alone(name):
    network = lively(BERT(**SMALL) if name == "BERT" else T5(**T5_SMALL)).double()
    with torch.no_grad():
        together = network(packed()).split(LENGTHS, dim=1)
        alone = [network({"input_ids": ids}) for ids in tokens().split(LENGTHS, dim=1)]
    assert max(apart(one, other) for one, other in zip(together, alone, strict=True)) < 1e-12


T5_SMALL = {
    "vocab_size": 61,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "head_dim": 6,
    "n_decoder_layer": 3,
    "intermediate_size": 48,
    "max_distance": 20,  # of 50 tokens: the widest range of distances is used
}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_t5_is_that_of_transformers(version):
    own = {"activation": "gated_gelu", "tie_embeddings": False} if version == "1.1" else {}
    arguments = {**T5_SMALL, **own}
    reference = reference_of(T5, arguments)
    if own:  # transformers 5 ties the head in any case
        head = torch.nn.Linear(32, 61, bias=False)
        reference.lm_head = lively(torch.nn.ModuleDict({"lm_head": head})).lm_head
    network = T5(**arguments).eval()
    network.load_state_dict(renamed(network, reference.state_dict()))
    ids, targets = tokens(), tokens(length=23, seed=3)
    given = {"input_ids": ids, "decoder_input_ids": targets}
    compare(network, reference, given, given | {"use_cache": False}, 1e-6)
    compare_gradients(network, reference)


def test_padding_of_t5_is_masked_as_in_transformers():
    network, reference = both(T5, T5_SMALL)
    ids, targets = tokens(), tokens(length=23, seed=3)
    kept, read = (
        torch.arange(size).expand(2, -1) < torch.tensor([[50], [n]]) for size, n in ((50, 31), (23, 9))
    )
    documents = {"document_ids": torch.where(kept, 0, -1), "decoder_document_ids": torch.where(read, 0, -1)}
    given = {"input_ids": ids, "decoder_input_ids": targets}
    with torch.no_grad():
        ours = network.logits(network(given | documents))
        theirs = reference(**given, attention_mask=kept.long(), use_cache=False).logits
        unmasked = network.logits(network(given))
    assert apart(ours[read], theirs[read]) < 1e-6
    assert apart(ours[read], unmasked[read]) > 0.01
    assert torch.isfinite(ours).all()


def test_without_decoder_ids_t5_reads_its_input_one_place_later():
    network, reference = both(T5, T5_SMALL)
    ids = tokens()
    with torch.no_grad():
        ours = network.logits(network({"input_ids": ids}))
        later = reference.prepare_decoder_input_ids_from_labels(ids)
        theirs = reference(input_ids=ids, decoder_input_ids=later, use_cache=False).logits
    assert apart(ours, theirs) < 1e-6


def _train_step_on_two_ranks(rank, file, plans):
    from torch import distributed

    from plugins.strategies.tensor_parallel import apply

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = distributed.init_device_mesh("cpu", (2,))
    for kind, arguments, sequence, vocabulary in plans:
        arguments = {**arguments, "vocab_size": 62}
        whole, split = (lively(kind(**arguments)) for _ in range(2))
        apply(split, mesh, sequence=sequence, vocabulary=vocabulary)
        for network in (whole, split):
            logits = network.logits(network(packed()))
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            logits.logsumexp(-1).sum().backward()
        for (key, expected), actual in zip(whole.named_parameters(), split.parameters(), strict=True):
            gradient = actual.grad.full_tensor() if hasattr(actual.grad, "full_tensor") else actual.grad
            if not key.endswith("k_proj.bias"):
                assert apart(gradient, expected.grad) < 1e-4, (kind, sequence, vocabulary, key)
    distributed.destroy_process_group()


@pytest.mark.ci
def test_parallel_plans_give_the_gradients_of_one_process(tmp_path):
    plans = [
        (BERT, SMALL, False, False),
        (BERT, SMALL, False, True),
        (BERT, SMALL, True, True),
        (T5, T5_SMALL, False, False),
        (T5, T5_SMALL, False, True),
    ]
    on_ranks(_train_step_on_two_ranks, 2, tmp_path / "rendezvous", plans)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["BERT", "T5"])
def test_compiles_to_one_graph_without_breaks(name):
    torch.compiler.reset()  # what others compiled of the same blocks counts
    network = lively(BERT(**SMALL) if name == "BERT" else T5(**T5_SMALL))
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    for batch in ({"input_ids": tokens()}, packed()):
        assert torch.equal(compiled(batch), network(batch))
