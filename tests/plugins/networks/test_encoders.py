"""BERT and T5 compute what transformers computes with the same weights: block by block, and their gradients."""

from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from core.errors import ConfigError
from plugins.networks.bert import BERT
from plugins.networks.t5 import T5
from plugins.objectives.masked_lm import MaskedLM
from tests.support.found_on_ranks import found_on_ranks
from tests.support.reference_models import (
    blocks_of,
    both,
    hidden_states,
    lively,
    reference_of,
    renamed,
    tokens,
)
from toolkit.label_positions import LABEL_POSITIONS, at_labels, label_positions

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


def forward_apart(network, reference, batch, given):
    """Returns how far hidden states of each block, and at last logits, are apart; runs backward on both."""
    actual = hidden_states(network.blocks, lambda: network.logits(network(batch)))
    expected = hidden_states(blocks_of(reference), lambda: reference(**given).logits)
    assert len(actual) == len(expected) == len(network.blocks) + 1
    assert expected[-1].std() > 0.1
    for logits in (actual[-1], expected[-1]):
        logits.logsumexp(-1).sum().backward()
    return [apart(ours, theirs) for ours, theirs in zip(actual, expected, strict=True)]


def gradients_apart(network, reference):
    """Returns how far the gradient of each weight is from that of the reference."""
    theirs = dict(reference.named_parameters())
    gradients = renamed(network, {name: weight.grad for name, weight in theirs.items()})
    return {
        key: apart(weight.grad, gradients[key])
        for key, weight in network.named_parameters()
        if not key.endswith("k_proj.bias")  # it shifts all scores of a query alike: its gradient is 0
    }


def beyond(limit, found):
    """Returns what is not within a limit, NaN included."""
    return {key: value for key, value in found.items() if not value <= limit}


@pytest.mark.parametrize(("activation", "tolerance"), [("gelu", 0.0), ("gelu_tanh", 1e-6)])
def test_bert_is_that_of_transformers(activation, tolerance):
    network, reference = both(BERT, {**SMALL, "activation": activation})
    ids, types = tokens(), tokens(vocab_size=2, seed=1)
    batch = {"input_ids": ids, "token_type_ids": types}
    found = forward_apart(network, reference, batch, batch)
    assert not beyond(tolerance, dict(enumerate(found)))  # gelu_tanh is written out there
    assert not beyond(2e-6, gradients_apart(network, reference))


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
    found = forward_apart(network, reference, given, given | {"use_cache": False})
    assert not beyond(1e-6, dict(enumerate(found)))
    assert not beyond(2e-6, gradients_apart(network, reference))


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


def test_the_decoders_first_token_is_in_the_vocabulary():
    with pytest.raises(ConfigError, match="decoder_start_id=61 is not below vocab_size=61"):
        T5(**T5_SMALL, decoder_start_id=61)


def counted(network, run):
    """Returns the FLOPs of forward and backward as torch counts them, with attention written out as two products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(network).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "own", [{}, {"activation": "gated_gelu", "tie_embeddings": False}], ids=["1.0", "1.1"]
)
def test_flops_of_t5_are_those_of_both_lengths(own):
    network = T5(**T5_SMALL, **own)
    batch = {"input_ids": tokens(), "decoder_input_ids": tokens(length=11)}
    assert counted(network, lambda network: network.logits(network(batch))) == network.flops_of_batch(batch)
    alone = {"input_ids": tokens()}
    assert network.flops_of_batch(alone) == pytest.approx(2 * 50 * network.flops_per_token(50), rel=1e-12)


def test_masked_lm_computes_the_logits_of_labels_alone():
    network, (ids, labels) = lively(BERT(**SMALL)), (tokens(), tokens(seed=1))
    labels = labels.masked_fill(torch.arange(50) % 7 != torch.tensor([[2], [5]]), -100)
    labels[1, 20:] = -100  # rows have 7 labels and 3
    plain = {"input_ids": ids, "labels": labels, "document_ids": torch.zeros_like(ids)}
    batch = plain | {LABEL_POSITIONS: label_positions(list(labels.numpy()), 50)}
    assert batch[LABEL_POSITIONS].shape == (2, 12)  # a multiple of 50 // 8
    sizes, found = [], {}
    for name, one in (("all", plain), ("labels", batch)):
        network.zero_grad()
        with mock.patch.object(network, "logits", side_effect=network.logits) as logits:
            loss, _ = MaskedLM().loss(network, one)
        sizes.append(tuple(logits.call_args.args[0].shape))
        loss.mean.backward()
        found[name] = [
            loss.mean.detach(),
            *(weight.grad.clone() for weight in network.parameters() if weight.grad is not None),
        ]
        assert loss.tokens == 10
    assert sizes == [(2, 50, 32), (2, 12, 32)]
    assert max(apart(one, other) for one, other in zip(found["labels"], found["all"], strict=True)) < 2e-6
    network.zero_grad()
    flops = counted(network, lambda network: MaskedLM().loss(network, batch)[0].total)
    assert flops == network.flops_of_batch(batch)


def test_rows_without_labels_or_cut_since_have_no_loss():
    labels = torch.full((2, 16), -100)
    labels[0, 12] = 3
    batch = {"labels": labels, LABEL_POSITIONS: label_positions(list(labels.numpy()), 16)}
    hidden = torch.randn(2, 16, 4)
    found, chosen = at_labels(hidden, batch)
    assert chosen.tolist() == [[3, -100], [-100, -100]]
    assert torch.equal(found[0, 0], hidden[0, 12])
    assert (at_labels(hidden[:, :8], batch)[1] == -100).all()


def _train_step_on_two_ranks(rank, file, plans):
    """Returns how far the gradient of each weight is from that of one process."""
    from torch import distributed

    from plugins.strategies.tensor_parallel import apply

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = distributed.init_device_mesh("cpu", (2,))
    found, labels = {}, tokens(seed=1).masked_fill(torch.arange(50) % 3 > 0, -100)
    labelled = {"labels": labels, LABEL_POSITIONS: label_positions(list(labels.numpy()), 50)}
    for kind, arguments, sequence, vocabulary in plans:
        arguments = {**arguments, "vocab_size": 62}
        whole, split = (lively(kind(**arguments)) for _ in range(2))
        apply(split, mesh, sequence=sequence, vocabulary=vocabulary)
        for network in (whole, split):
            hidden, _ = at_labels(
                network(packed()), labelled if kind is BERT else {"labels": labelled["labels"]}
            )
            logits = network.logits(hidden)
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            logits.logsumexp(-1).sum().backward()
        for (key, expected), actual in zip(whole.named_parameters(), split.parameters(), strict=True):
            gradient = actual.grad.full_tensor() if hasattr(actual.grad, "full_tensor") else actual.grad
            if not key.endswith("k_proj.bias"):
                found[f"{kind.__name__} {sequence} {vocabulary} {key}"] = apart(gradient, expected.grad)
    distributed.destroy_process_group()
    return found


@pytest.mark.ci
def test_parallel_plans_give_the_gradients_of_one_process(tmp_path):
    plans = [
        (BERT, SMALL, False, False),
        (BERT, SMALL, False, True),
        (BERT, SMALL, True, True),
        (T5, T5_SMALL, False, False),
        (T5, T5_SMALL, False, True),
    ]
    folder = tmp_path / "found"
    folder.mkdir()
    for found in found_on_ranks(_train_step_on_two_ranks, 2, folder, str(tmp_path / "rendezvous"), plans):
        assert len(found) > 30 * len(plans)
        assert not beyond(1e-4, found)


@pytest.mark.parametrize(
    "name", [pytest.param("BERT", marks=pytest.mark.ci), pytest.param("T5", marks=pytest.mark.slow)]
)
def test_compiles_to_one_graph_without_breaks(name):
    torch.compiler.reset()  # what others compiled of the same blocks counts
    network = lively(BERT(**SMALL) if name == "BERT" else T5(**T5_SMALL))
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    for batch in ({"input_ids": tokens()}, packed()):
        assert torch.equal(compiled(batch), network(batch))
