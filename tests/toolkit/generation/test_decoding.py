"""Batches, caches and seeds: a text is the same however it is computed."""

import copy
import functools

import pytest
import torch

from core.errors import ConfigError
from plugins.networks.gemma3 import Gemma3
from plugins.networks.gpt import GPT
from plugins.networks.hybrid import Hybrid
from plugins.networks.llama import Llama
from plugins.networks.mistral import Mistral
from plugins.networks.qwen3 import Qwen3
from tests.support.reference_models import lively
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling
from toolkit.generation.rows import Rows, evaluating
from toolkit.generation.single_rows import store_for_single_rows

SIZES = {"vocab_size": 61, "n_layer": 3, "n_head": 4, "n_embd": 32, "max_sequence_length": 64}
GROUPED = {"n_kv_head": 2, "intermediate_size": 48}
NETWORKS = {
    "GPT": (GPT, {}),
    "GPT sinusoidal": (GPT, {"position": "sinusoidal", "norm_position": "post"}),
    "Llama": (Llama, GROUPED),
    "Mistral": (Mistral, GROUPED | {"sliding_window": 8}),
    "Qwen3": (Qwen3, GROUPED | {"head_dim": 8}),
    "Gemma3": (Gemma3, GROUPED | {"sliding_window": 8, "head_dim": 8}),
    "Hybrid": (
        Hybrid,
        GROUPED
        | {"state_size": 8, "sliding_window": 4, "sinks": 2, "block_size": 2, "block_stride": 3}
        | {"mixers": ["block_sparse", "gated_delta_net", "mamba2"]},
    ),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [7], [2, 7, 1, 8, 2], [1, 1, 2, 3, 5, 8, 13, 21, 34]]
SAMPLED = Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3)


@functools.cache
def network(name):
    network_class, arguments = NETWORKS[name]
    return lively(network_class(**SIZES, **arguments))


def texts(network, prompts, sampling, seeds, **options):
    """Returns the ids of each row."""
    options.setdefault("max_new_tokens", 30)
    found = [[] for _ in seeds]
    for token in Decoding(network, prompts, sampling=sampling, seeds=seeds, **options):
        found[token.row].append(token.id)
    return found


@pytest.mark.parametrize("sampling", [Sampling(0), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NETWORKS)
def test_together_alone_and_without_a_cache_a_text_is_the_same(name, sampling):
    seeds = [4, 5, 6, 7]
    together = texts(network(name), PROMPTS, sampling, seeds)
    alone = [
        texts(network(name), [ids], sampling, [seed])[0] for ids, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert together == alone == texts(network(name), PROMPTS, sampling, seeds, cached=False)
    assert all(len(ids) == 30 for ids in together)
    assert len(set(map(tuple, together))) == 4


@pytest.mark.parametrize("name", NETWORKS)
def test_padding_changes_no_logits_and_is_finite(name):
    one = network(name)
    with torch.inference_mode():
        padding = torch.tensor([0, 11, 7, 3])
        cache = one.new_padded_cache(padding, 20)
        ids = torch.tensor([[0] * (12 - len(ids)) + ids for ids in PROMPTS])
        hidden = torch.cat([one({"input_ids": piece}, cache) for piece in (ids[:, :9], ids[:, 9:])], dim=1)
        assert hidden.isfinite().all()
        for row, prompt in zip(hidden, PROMPTS, strict=True):
            alone = one({"input_ids": torch.tensor([prompt])})[0]
            torch.testing.assert_close(row[12 - len(prompt) :], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["GPT", "Mistral"])
def test_rows_that_end_and_rows_beyond_the_window_leave_the_others_as_they_are(name):
    greedy = Sampling(0)
    whole = texts(network(name), PROMPTS, greedy, [0] * 4, max_new_tokens=80)  # 12 + 80 tokens of 64
    assert whole == [texts(network(name), [ids], greedy, [0], max_new_tokens=80)[0] for ids in PROMPTS]
    stop = whole[1][10]
    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in whole]
    assert len({len(ids) for ids in cut}) > 1
    assert texts(network(name), PROMPTS, greedy, [0] * 4, max_new_tokens=80, stop_ids=[stop]) == cut


@pytest.mark.parametrize("name", ["GPT", "Mistral"])
def test_several_samples_of_a_prompt_are_those_of_their_seeds(name):
    seeds = list(range(12))
    found = texts(network(name), PROMPTS, SAMPLED, seeds, samples=3)
    alone = [texts(network(name), [PROMPTS[row // 3]], SAMPLED, [row])[0] for row in seeds]
    assert found == alone
    assert len(set(map(tuple, found))) == 12


def test_a_row_can_be_ended_from_outside():
    decoding = Decoding(network("GPT"), PROMPTS, max_new_tokens=9, sampling=SAMPLED, seeds=[1, 2, 3, 4])
    found = [[], [], [], []]
    for token in decoding:
        found[token.row].append(token.id)
        if token.row == 2 and len(found[2]) == 4:
            decoding.finish(2)
    whole = texts(network("GPT"), PROMPTS, SAMPLED, [1, 2, 3, 4], max_new_tokens=9)
    assert found == [whole[0], whole[1], whole[2][:4], whole[3]]


def test_log_probabilities_are_those_of_the_network_before_any_filter():
    one = network("Llama")
    options = {"max_new_tokens": 8, "sampling": SAMPLED, "seeds": [1, 2, 3, 4]}
    tokens = list(Decoding(one, PROMPTS, log_probabilities=True, **options))
    for row, prompt in enumerate(PROMPTS):
        mine = [token for token in tokens if token.row == row]
        ids = prompt + [token.id for token in mine]
        with torch.no_grad():
            logs = one.logits(one({"input_ids": torch.tensor([ids])}))[0].log_softmax(-1)
        expected = [float(logs[place - 1, ids[place]]) for place in range(len(prompt), len(ids))]
        assert [token.log_probability for token in mine] == pytest.approx(expected, abs=1e-4)
    assert all(token.log_probability is None for token in Decoding(one, PROMPTS, **options))


@pytest.mark.parametrize("name", ["GPT", "Mistral"])
def test_only_new_tokens_are_computed_in_one_batch(name):
    shapes = []
    handle = network(name).register_forward_pre_hook(
        lambda _, args: shapes.append(args[0]["input_ids"].shape)
    )
    texts(network(name), PROMPTS, SAMPLED, [0] * 4, max_new_tokens=5)
    handle.remove()
    assert shapes == [(4, 12), (4, 1), (4, 1), (4, 1), (4, 1)]


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_a_sliding_cache_is_not_copied_for_each_token(name):
    rows = Rows(network(name), [[1, 2, 3]], 40)
    with evaluating(network(name)), torch.inference_mode():
        rows.first()
        layer = rows._cache.cache[network(name).windows.index(8)]
        places = set()
        for token in range(40):
            rows.step([0], [token])
            places.add(layer._keys.data_ptr())
            assert layer.keys.shape[2] <= 7
    assert len(places) == 1
    assert layer._keys.shape[2] == 16


class OneLength(GPT):
    """A network that knows no padding: each row has a cache of its own."""

    new_padded_cache = None


@pytest.mark.parametrize("name", ["GPT", "Mistral", "Hybrid"])
def test_a_text_that_begins_as_another_continues_from_its_cache(name):
    """A window and a state cannot go back far: then the text is computed again."""
    one, [prompt], computed = network(name), PROMPTS[:1], []
    options = {"max_new_tokens": 6, "sampling": Sampling(0), "seeds": [0]}
    hook = one.register_forward_pre_hook(lambda _, args: computed.append(args[0]["input_ids"].shape[1]))
    first = Decoding(one, [prompt], **options)
    answer = [token.id for token in first]
    all_of_it, edited = [*prompt, *answer[:5], 9, 8, 7], [*prompt, *answer[:2], (answer[2] + 1) % 61, 5]
    for ids, known in ((all_of_it, 17), (edited, 14), (edited, 15), (PROMPTS[1], 0)):
        computed.clear()
        second = Decoding(one, [ids], **options, before=first)
        found = [token.id for token in second]
        goes_back = name == "GPT" or ids is all_of_it
        assert computed[0] == len(ids) - (known if goes_back else 0)
        assert found == [token.id for token in Decoding(one, [ids], **options)]
        first = second
    hook.remove()


def test_an_interrupted_text_hands_over_no_cache():
    one, [prompt] = network("GPT"), PROMPTS[:1]
    options = {"max_new_tokens": 6, "sampling": Sampling(0), "seeds": [0]}
    first = Decoding(one, [prompt], **options)
    tokens = iter(first)
    next(tokens)
    hook = one.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(tokens)
    hook.remove()
    found = list(Decoding(one, [[*prompt, 3]], **options, before=first))
    assert found == list(Decoding(one, [[*prompt, 3]], **options))


def test_networks_that_know_no_padding_generate_the_same():
    other = lively(OneLength(**SIZES))
    lengths = []
    other.register_forward_pre_hook(lambda _, args: lengths.append(tuple(args[0]["input_ids"].shape)))
    for sampling in (Sampling(0), SAMPLED):
        expected = texts(network("GPT"), PROMPTS, sampling, list(range(8)), samples=2)
        assert texts(other, PROMPTS, sampling, list(range(8)), samples=2) == expected
    assert set(lengths) == {(1, 1), (1, 12), (1, 5), (1, 9)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_generates_the_same_together_and_alone(dtype):
    one = lively(Llama(**SIZES, **GROUPED))
    for parameter in one.parameters():
        parameter.data = parameter.data.to(dtype)
    found = texts(one, PROMPTS, Sampling(0), [0] * 4, max_new_tokens=6)
    assert found == [texts(one, [ids], Sampling(0), [0], max_new_tokens=6)[0] for ids in PROMPTS]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [1, 2]}, "2 seeds for 4 prompts of 1 samples"),
        ({"seeds": [], "samples": 0}, "0 seeds"),
        ({"sampling": Sampling(min_p=1.1)}, "min_p=1.1 must be 0 to 1"),
        ({"sampling": Sampling(repetition_penalty=0.0)}, "repetition_penalty=0.0 must be above 0"),
    ],
)
def test_wrong_values_are_named_at_the_call(options, message):
    with pytest.raises(ConfigError, match=message):
        Decoding(network("GPT"), PROMPTS, **{"max_new_tokens": 3, "seeds": [0] * 4, **options})


@pytest.mark.gpu
def test_a_gpu_draws_what_the_cpu_draws():
    one = lively(Llama(**SIZES, **GROUPED))
    expected = texts(one, PROMPTS, SAMPLED, [4, 5, 6, 7])
    assert texts(one.cuda(), PROMPTS, SAMPLED, [4, 5, 6, 7]) == expected


def test_weights_that_are_stored_for_single_rows_are_the_same_and_draw_the_same():
    network_class, arguments = NETWORKS["Llama"]
    other = lively(network_class(**SIZES, **arguments))
    state = {name: value.clone() for name, value in other.state_dict().items()}
    store_for_single_rows(other)
    head, up, down = (
        other.output_weight,
        other.layers[0].mlp.up_proj.weight,
        other.layers[0].mlp.down_proj.weight,
    )
    assert head.stride(0) == up.stride(0) == 1
    assert head is other.embed_tokens.weight
    assert down.is_contiguous()
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    for sampling in (Sampling(0), SAMPLED):
        seeds = [4, 5, 6, 7]
        assert texts(other, PROMPTS, sampling, seeds) == texts(network("Llama"), PROMPTS, sampling, seeds)


def test_one_row_in_bfloat16_is_multiplied_without_onednn_and_no_worse():
    torch.manual_seed(0)
    half = Llama(
        **SIZES | {"n_embd": 128, "vocab_size": 512}, **GROUPED | {"intermediate_size": 256}
    ).bfloat16()
    exact = copy.deepcopy(half).double()
    switches: list[bool] = []
    half.layers[0].register_forward_pre_hook(lambda *_: switches.append(torch.backends.mkldnn.enabled))
    batches = [{"input_ids": torch.arange(count)[None]} for count in (1, 7)]

    def logits(network):
        return [network.logits(network(batch)).double() for batch in batches]

    expected, before = logits(exact), logits(half)
    store_for_single_rows(half)
    assert all(parameter.is_contiguous() for parameter in half.parameters())
    after = logits(half)
    assert switches == [True, True, False, True]
    assert torch.equal(after[1], before[1])
    errors = [(found[0] - expected[0]).norm() for found in (before, after)]
    assert errors[1] < 1.1 * errors[0]  # both round each product to bfloat16 once
    with pytest.raises(ConfigError, match="longer"):
        half({"input_ids": torch.zeros(1, 65, dtype=torch.long)})
    assert torch.backends.mkldnn.enabled
