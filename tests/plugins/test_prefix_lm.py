"""Prefixes: what sees what, which labels remain, and that lengths depend on the row alone."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.errors import ConfigError
from plugins.networks.bert import BERT
from plugins.networks.deepseek_v3 import DeepSeekV3
from plugins.networks.llama import Llama
from plugins.networks.mistral import Mistral
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.prefix_lm import PrefixLM, prefixes
from tests.support.reference_models import both, lively, tokens
from tests.support.small_networks import DENSE, LATENT, packed


def test_hidden_states_are_those_of_transformers_with_the_mask_written_out():
    network, reference = both(Llama, DENSE)
    assert isinstance(reference, LlamaForCausalLM)
    assert isinstance(reference.config, LlamaConfig)
    ids = tokens()
    lengths = torch.tensor([[7], [20]])
    prefix = torch.arange(50) < lengths
    seen = torch.ones(50, 50, dtype=torch.bool).tril() | (prefix[:, :, None] & prefix[:, None, :])
    with torch.no_grad():
        actual = network.logits(network({"input_ids": ids, "prefix": prefix}))
        expected = reference(ids, attention_mask=torch.where(seen, 0.0, -torch.inf)[:, None]).logits
        causal = network.logits(network({"input_ids": ids}))
    assert (actual - expected).abs().max() < 1e-6 * expected.abs().max()
    assert (causal - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize(("network_class", "arguments"), [(Llama, DENSE), (DeepSeekV3, LATENT)])
def test_a_token_reaches_the_loss_of_its_document_alone_and_its_prefix_in_both_directions(
    network_class, arguments
):
    network, batch = lively(network_class(**arguments)), packed()
    place, length = prefixes(batch, 0.5, 0.5, 0)
    assert length[0, 0] == 9
    assert length[0, -1] == 15
    vectors = network.embed_tokens(batch["input_ids"]).detach().requires_grad_()
    network.embed_tokens.forward = lambda ids: vectors
    hidden = network({**batch, "prefix": place < length})
    for query, reached in {
        3: [*range(9)],
        12: [*range(13)],
        19: [19],
        25: [*range(20, 35)],
        40: [*range(20, 41)],
    }.items():
        [gradient] = torch.autograd.grad(hidden[0, query].square().sum(), vectors, retain_graph=True)
        assert gradient[0].abs().sum(1).nonzero().flatten().tolist() == reached
        assert not gradient[1].any()


def test_the_loss_is_that_of_the_tokens_after_the_prefixes():
    network, batch = lively(Llama(**DENSE)), packed()
    objective = PrefixLM(CausalLM(), 0.2, 0.8, seed=1)
    loss, _ = objective.loss(network, batch)
    place, length = prefixes(batch, 0.2, 0.8, 1)
    with torch.no_grad():
        logits = network.logits(network({**batch, "prefix": place < length}))
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    predicted = (place + 1 >= length).flatten()  # the last token of a prefix predicts the first one after it
    assert loss.tokens == predicted.sum()
    assert loss.total.item() == pytest.approx(losses[predicted].sum().item(), rel=1e-6)


def test_lengths_are_uniform_and_depend_on_seed_and_document_alone():
    ids = torch.randint(1000, (4000, 21), generator=torch.Generator().manual_seed(0))
    _, lengths = prefixes({"input_ids": ids}, 0.0, 1.0, 0)
    counts = lengths[:, 0].bincount(minlength=21)
    assert len(counts) == 21  # 0 to 20: one token remains
    assert (
        (counts - 4000 / 21).square() / (4000 / 21)
    ).sum() < 45.3  # chi square, 20 degrees of freedom: p = 0.001
    _, again = prefixes({"input_ids": ids[100:200]}, 0.0, 1.0, 0)
    assert torch.equal(again, lengths[100:200])
    _, other = prefixes({"input_ids": ids}, 0.0, 1.0, 1)
    assert (other != lengths).float().mean() > 0.9
    batch = packed()
    _, whole = prefixes(batch, 0.0, 1.0, 0)
    _, alone = prefixes({"input_ids": batch["input_ids"][:, 20:]}, 0.0, 1.0, 0)
    assert torch.equal(whole[:, 20:], alone)


def test_a_window_and_wrong_shares_are_refused():
    with pytest.raises(ConfigError, match="Mistral cannot attend in both directions"):
        PrefixLM(CausalLM()).loss(Mistral(**DENSE, sliding_window=8), packed())
    encoder = BERT(61, n_layer=1, n_head=4, n_embd=32, max_sequence_length=64, intermediate_size=48)
    with pytest.raises(ConfigError, match="BERT cannot attend in both directions"):
        PrefixLM(CausalLM()).loss(encoder, packed())
    with pytest.raises(ConfigError, match=r"not 0\.6 and 0\.5"):
        PrefixLM(CausalLM(), 0.6, 0.5)
    network = Llama(**DENSE)
    with pytest.raises(ConfigError, match="a prefix cannot be used with a cache"):
        network({"input_ids": tokens(), "prefix": tokens() > 0}, network.new_cache(2, 50))
