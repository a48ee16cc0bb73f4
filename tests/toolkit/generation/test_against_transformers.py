"""Generation beside that of transformers, token for token, with the same weights."""

import functools

import pytest
import torch
from transformers import GenerationConfig

from plugins.networks.llama import Llama
from plugins.networks.mistral import Mistral
from tests.support.reference_models import both
from toolkit.generation.beam_search import beam_search
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling

SIZES = {
    "vocab_size": 61,
    "n_layer": 3,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 32,
    "intermediate_size": 48,
    "max_sequence_length": 64,
}
NETWORKS = {"Llama": (Llama, SIZES), "Mistral": (Mistral, SIZES | {"sliding_window": 8})}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [7, 1], [2, 7, 1, 8, 2], [1, 1, 2, 3, 5, 8, 13, 21, 34]]
NEW, END = 25, 11
FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "all": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.03, "repetition_penalty": 1.2},
}


@functools.cache
def pair(name):
    return both(*NETWORKS[name])


def theirs(reference, prompts, **options):
    """Returns what `generate` of transformers adds to prompts padded in front, without the end and what is behind."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (length - len(one)) + [1] * len(one) for one in prompts])
    settings = {"max_new_tokens": NEW, "pad_token_id": 0, "top_k": 0, **options}
    config = GenerationConfig(**settings)
    rows = reference.generate(ids, attention_mask=mask, generation_config=config)[:, length:].tolist()
    end = options.get("eos_token_id")
    return [ids[: ids.index(end)] if end in ids else ids for ids in rows]


def ours(network, prompts, sampling, seeds, **options):
    found = [[] for _ in prompts]
    for token in Decoding(network, prompts, max_new_tokens=NEW, sampling=sampling, seeds=seeds, **options):
        found[token.row].append(token.id)
    return found


@pytest.mark.parametrize("penalty", [1.0, 1.8])
@pytest.mark.parametrize("name", NETWORKS)
def test_greedy_texts(name, penalty):
    network, reference = pair(name)
    # alone: transformers penalises the padding of a batch
    expected = [
        theirs(reference, [ids], do_sample=False, eos_token_id=END, repetition_penalty=penalty)[0]
        for ids in PROMPTS
    ]
    sampling = Sampling(0, repetition_penalty=penalty)
    assert ours(network, PROMPTS, sampling, [0] * 4, stop_ids=[END]) == expected
    assert len(set(map(tuple, expected))) == 4
    if penalty == 1:
        assert theirs(reference, PROMPTS, do_sample=False, eos_token_id=END) == expected


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_sampled_texts_of_the_same_seed(name, options):
    network, reference = pair(name)
    expected = []
    for seed, ids in enumerate(PROMPTS):
        torch.manual_seed(seed)
        expected += theirs(reference, [ids], do_sample=True, **options)
    assert ours(network, PROMPTS, Sampling(**options), [0, 1, 2, 3]) == expected


def test_each_filter_changes_the_texts():
    network, _ = pair("Llama")
    found = [str(ours(network, PROMPTS, Sampling(**options), [0, 1, 2, 3])) for options in FILTERS.values()]
    assert len(set(found)) == len(FILTERS)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1},
        {"num_beams": 4},
        {"num_beams": 4, "length_penalty": 0.0},
        {"num_beams": 3, "length_penalty": -1.5},
        {"num_beams": 5, "length_penalty": 2.0, "repetition_penalty": 1.3},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("end", [END, None])
@pytest.mark.parametrize("name", NETWORKS)
def test_beam_search(name, end, options):
    network, reference = pair(name)
    number = options["num_beams"]
    stop_ids = () if end is None else (end,)
    found = beam_search(network, PROMPTS, max_new_tokens=NEW, stop_ids=stop_ids, **options)
    again = beam_search(network, PROMPTS, max_new_tokens=NEW, stop_ids=stop_ids, cached=False, **options)
    for ids, hypotheses, uncached in zip(PROMPTS, found, again, strict=True):
        config = GenerationConfig(
            **{"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, "eos_token_id": end},
            **{"num_return_sequences": number, "output_scores": True, "return_dict_in_generate": True},
            **options,
        )
        expected = reference.generate(torch.tensor([ids]), generation_config=config)
        rows = [row[len(ids) :] for row in expected.sequences.tolist()]
        texts = [row[: row.index(end)] if end in row else row for row in rows]
        assert [one.ids for one in hypotheses] == [one.ids for one in uncached] == texts
        if number > 1:  # transformers has no scores of a greedy search
            assert [one.score for one in hypotheses] == pytest.approx(
                expected.sequences_scores.tolist(), rel=1e-5, abs=1e-4
            )
