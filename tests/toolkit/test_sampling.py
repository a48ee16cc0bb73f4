import math
from collections import Counter

import pytest
import torch

from core.errors import ConfigError
from plugins.networks.gpt import GPT
from toolkit.sampling import generate, next_token_probabilities

SIZE = {
    "vocab_size": 50,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "max_sequence_length": 32,
    "tie_embeddings": False,
}
PROMPT = [3, 1, 4, 1, 5]


class UncachedGPT(GPT):
    """The same network, always computed anew."""

    def new_cache(self, batch_size, max_length):
        return None


def build(kind=GPT, **options):
    """A network whose next token depends strongly on the context."""
    network = kind(**SIZE, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.4, generator=generator)
    return network


@pytest.fixture(scope="module")
def network():
    return build()


def sample(network, seed=0, **options):
    return list(generate(network, PROMPT, **{"max_new_tokens": 20, "seed": seed, **options}))


def brute_force(logits, temperature=1.0, top_k=None, top_p=None):
    """The distribution in plain Python: keep the k best, of these the fewest that reach p."""
    weights = [math.exp(logit / temperature) for logit in logits]
    best = sorted(range(len(logits)), key=lambda token: -weights[token])[:top_k]
    total, reached, kept = sum(weights[token] for token in best), 0.0, []
    for token in best:
        kept.append(token)
        reached += weights[token] / total
        if top_p is not None and reached >= top_p:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 100},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"top_p": 1.0},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.7},
]


@pytest.mark.parametrize("options", FILTERS)
def test_filters_give_the_brute_force_distribution(options):
    for seed in range(20):
        logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(seed))
        actual = next_token_probabilities(logits, **options)
        torch.testing.assert_close(actual, torch.tensor(brute_force(logits.tolist(), **options)))


@pytest.mark.ci
def test_tokens_are_drawn_from_that_distribution(network):
    with torch.no_grad():
        logits = network.logits(network({"input_ids": torch.tensor([PROMPT])})[0, -1])
    options = {"temperature": 8.0, "top_k": 6, "top_p": 0.9}
    expected = brute_force(logits.tolist(), **options)
    assert sum(probability > 0 for probability in expected) >= 4
    seeds, draws = torch.Generator().manual_seed(0), 2000
    drawn = Counter(
        next(generate(network, PROMPT, max_new_tokens=1, seed=seeds, **options)) for _ in range(draws)
    )
    for token, probability in enumerate(expected):
        error = abs(drawn[token] / draws - probability)
        assert error <= 4.5 * math.sqrt(probability * (1 - probability) / draws)


def test_extreme_logits_and_temperatures_stay_finite():
    logits = torch.tensor([1e4, -1e4, 9.9e3, -math.inf])
    for temperature in (0.0, 1e-6, 1.0, 1e6):
        for options in ({}, {"top_k": 3}, {"top_p": 0.9}):
            probabilities = next_token_probabilities(logits, temperature, **options)
            assert probabilities.sum().item() == pytest.approx(1)
            assert probabilities[3] == 0
    assert next_token_probabilities(logits.bfloat16(), 0.0).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("n_kv_head", [None, 2])
def test_cached_greedy_generation_equals_uncached(position, n_kv_head):
    options = {"position": position, "n_kv_head": n_kv_head}
    arguments = {"temperature": 0, "max_new_tokens": 60}  # 5 + 60 tokens: on beyond the 32 of the window
    cached, uncached = (
        sample(build(**options), **arguments),
        sample(build(UncachedGPT, **options), **arguments),
    )
    assert cached == uncached
    assert len(cached) == 60
    assert len(set(cached)) > 5


def test_beyond_the_window_the_last_tokens_count_at_their_new_positions(network):
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(60):
            window = torch.tensor([ids[-32:]])
            ids.append(int(network.logits(network({"input_ids": window}))[0, -1].argmax()))
    assert sample(network, temperature=0, max_new_tokens=60) == ids[5:]


def test_a_prompt_longer_than_the_window_is_cut_from_the_left(network):
    prompt = list(range(50))
    long = list(generate(network, prompt, max_new_tokens=5, temperature=0))
    assert long == list(generate(network, prompt[-32:], max_new_tokens=5, temperature=0))


def test_one_token_is_computed_for_each_token_while_the_cache_lasts():
    lengths, network = [], build()
    network.register_forward_pre_hook(lambda module, args: lengths.append(args[0]["input_ids"].shape[1]))
    sample(network, max_new_tokens=30)
    assert lengths == [5] + [1] * 27 + [32] * 2


def test_seeds_are_reproducible_and_differ(network):
    assert sample(network, seed=1) == sample(network, seed=1) != sample(network, seed=2)
    assert sample(network, seed=None) != sample(network, seed=None)
    generator = torch.Generator().manual_seed(1)
    assert sample(network, seed=generator) == sample(network, seed=1)
    assert sample(network, seed=generator) != sample(network, seed=1)  # it has moved on


@pytest.mark.parametrize("seed", [None, 0])
def test_global_random_state_is_untouched(network, seed):
    before = torch.get_rng_state()
    sample(network, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_are_streamed_and_the_callers_code_runs_outside_inference_mode(network):
    stream = generate(network, PROMPT, max_new_tokens=10**9, seed=0)
    assert [next(stream) for _ in range(3)] == sample(network, max_new_tokens=3)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    stream.close()


def test_each_module_gets_its_mode_back_also_when_the_stream_is_closed_early():
    network = build(dropout=0.5)
    network.train()
    network.layers[0].eval()
    modes = [module.training for module in network.modules()]
    assert sample(network) == sample(network)  # dropout is off
    assert [module.training for module in network.modules()] == modes
    stream = generate(network, PROMPT, max_new_tokens=5)
    next(stream)
    assert not network.training
    stream.close()
    assert [module.training for module in network.modules()] == modes


def test_stop_id_ends_the_stream_and_is_not_yielded(network):
    whole = sample(network)
    stop = whole[7]
    assert sample(network, stop_id=stop) == whole[: whole.index(stop)]
    assert sample(network, max_new_tokens=0) == []


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([3, 50], {}, r"prompt token 50 is not in the vocabulary \(50\)"),
        ([-1], {}, "prompt token -1"),
        (PROMPT, {"max_new_tokens": -1}, "max_new_tokens=-1 must be at least 0"),
        (PROMPT, {"temperature": -0.1}, "temperature=-0.1"),
        (PROMPT, {"temperature": math.nan}, "temperature=nan"),
        (PROMPT, {"top_k": 0}, "top_k=0 must be at least 1"),
        (PROMPT, {"top_p": 0.0}, "top_p=0.0"),
        (PROMPT, {"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_wrong_values_are_named_at_the_call(network, prompt, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(network, prompt, **{"max_new_tokens": 1, **options})


def test_a_diverged_network_is_named():
    network = build()
    with torch.no_grad():
        network.embed_tokens.weight.fill_(math.nan)
    for temperature in (0, 1):
        with pytest.raises(ConfigError, match="logits are not finite"):
            sample(network, temperature=temperature)
