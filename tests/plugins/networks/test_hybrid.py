"""Networks with recurrent and sparse mixers: documents, caches, masks, FLOPs, arguments."""

from copy import deepcopy
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from core.errors import ConfigError
from plugins.networks.hybrid import Hybrid, Mixer
from plugins.networks.mamba2 import Mamba2
from plugins.networks.olmo_hybrid import OLMoHybrid
from plugins.networks.parts.block_sparse import SparsePattern
from plugins.networks.parts.gated_linear_attention import GatedLinearAttention
from plugins.networks.parts.recurrent_mixer import StateCache
from tests.support.reference_models import lively, tokens
from toolkit.fused_masks import masked_attention
from toolkit.generation.beam_search import beam_search

ALL = [
    "gated_delta_net",
    "attention",
    "gated_linear_attention",
    "sliding_window",
    "mamba2",
    "block_sparse",
]
SMALL = {
    "vocab_size": 61,
    "n_layer": 6,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 32,
    "intermediate_size": 48,
    "max_sequence_length": 256,
    "mixers": ALL,
    "sliding_window": 8,
    "sinks": 3,
    "block_size": 4,
    "block_stride": 5,
    "state_size": 8,
    "value_dim": 6,
}


def test_documents_longer_than_a_chunk_are_computed_as_alone():
    network = lively(Hybrid(**SMALL)).double()
    lengths = (70, 1, 2, 97)
    ids = tokens(length=sum(lengths))
    packed = {
        "input_ids": ids,
        "document_ids": torch.arange(4).repeat_interleave(torch.tensor(lengths)).expand(2, -1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).expand(2, -1),
    }
    with torch.no_grad():
        together = network(packed).split(lengths, dim=1)
        for found, own in zip(together, ids.split(lengths, dim=1), strict=True):
            torch.testing.assert_close(found, network({"input_ids": own}), atol=1e-6, rtol=0)


def test_states_replace_keys_and_values_and_do_not_grow():
    network = lively(Hybrid(**SMALL)).double()
    cache = network.new_cache(2, 170)
    assert [isinstance(one, StateCache) for one in cache] == [kind in ALL[::2] for kind in ALL]
    sizes = []
    with torch.no_grad():
        pieces = [
            network({"input_ids": piece}, cache) for piece in tokens(length=170).split((90, 1, 1, 78), dim=1)
        ]
        for one in cache[::2]:
            sizes.append(sum(x.numel() for x in (one.state, *one.tails.values())))
        torch.testing.assert_close(
            torch.cat(pieces, dim=1), network({"input_ids": tokens(length=170)}), atol=1e-6, rtol=0
        )
    # K * V a head, and 3 inputs of each convolution: of keys, queries and values; of x, B and C
    assert sizes == [2 * (4 * 8 * 6 + 3 * (32 + 32 + 24)), 2 * 4 * 8 * 6, 2 * (8 * 8 * 8 + 3 * (64 + 16))]


def test_rows_of_states_are_selected_with_their_padding():
    network = lively(Hybrid(**SMALL)).double()
    padding = torch.tensor([0, 5, 9])
    ids = tokens(3, 30)
    with torch.no_grad():
        cache = network.new_padded_cache(padding, 40)
        for piece in ids[:, :20].split((7, 13), dim=1):  # padding ends in the second piece of a row
            network({"input_ids": piece}, cache)
        rows = torch.tensor([2, 2, 1])
        network.select_cache_rows(cache, rows)
        ids = torch.cat((ids[rows, :20], ids[:, 20:]), dim=1)
        for start, end in ((20, 21), (21, 30)):
            found = network({"input_ids": ids[:, start:end]}, cache)
        for row, begin in enumerate(padding[rows].tolist()):
            alone = network({"input_ids": ids[row : row + 1, begin:]})[:, -9:]
            torch.testing.assert_close(found[row : row + 1], alone, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_it_is_one_graph_and_computes_the_same():
    """With lengths that are multiples of the chunks and others, as a length schedule has them: compiled twice at most."""
    torch.compiler.reset()  # what others compiled of the same blocks counts
    network = Hybrid(**{**SMALL, "n_layer": 3, "mixers": ALL[::2]})
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    for length in (40, 24, 17):
        batch = {"input_ids": tokens(length=length)}
        assert torch.equal(compiled(batch), network(batch))


def test_beams_keep_the_states_of_the_rows_that_they_continue():
    network = lively(
        Hybrid(**{**SMALL, "n_layer": 3, "mixers": ["gated_delta_net", "mamba2", "block_sparse"]})
    )
    options = {"max_new_tokens": 12, "num_beams": 3}
    prompts = [[3, 1, 4, 1, 5, 9], [7]]
    for found, expected in zip(
        beam_search(network, prompts, **options),
        beam_search(network, prompts, cached=False, **options),
        strict=True,
    ):
        assert [one.ids for one in found] == [one.ids for one in expected]


PATTERNS = [
    SparsePattern(4),
    SparsePattern(3, sinks=2),
    SparsePattern(1, sinks=1, block_size=3, block_stride=2),
]


def definition(pattern, documents):
    """Returns the mask, pair by pair."""
    length, first = len(documents), [documents.index(one) for one in documents]
    mask = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        for key in range(query + 1):
            place = key - first[key]
            in_block = (
                pattern.block_stride
                and place // pattern.block_size % pattern.block_stride == pattern.block_stride - 1
            )
            seen = query - key < pattern.window or place < pattern.sinks or in_block
            mask[query, key] = documents[query] == documents[key] and bool(seen)
    return mask


DOCUMENTS = [[0] * 9 + [1] * 14 + [4], [2] * 24]
POSITIONS = torch.tensor([[*range(9), *range(14), 0], list(range(24))])


@pytest.mark.parametrize("pattern", PATTERNS, ids=["window", "sinks", "blocks"])
def test_masks_of_patterns_are_their_definition(pattern):
    ids = torch.tensor(DOCUMENTS)
    expected = torch.stack([definition(pattern, one) for one in DOCUMENTS])[:, None]
    same = ids[:, None, :, None] == ids[:, None, None, :]
    assert torch.equal(pattern.dense(POSITIONS, POSITIONS, same), expected)
    assert pattern.seen(24) == expected[1, 0, -1].sum()


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_computes_what_the_mask_does():
    from torch.nn.attention.flex_attention import flex_attention

    ids, pattern = torch.tensor(DOCUMENTS), PATTERNS[-1]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 24, 16) for heads in (4, 2, 2))
    mask = pattern.dense(POSITIONS, POSITIONS, ids[:, None, :, None] == ids[:, None, None, :])
    expected = masked_attention(q, k, v, mask, enable_gqa=True)
    for row, positions, own in ((slice(2), POSITIONS, ids), (1, torch.arange(24), None)):
        found = flex_attention(q, k, v, block_mask=pattern.blocks(positions, own), enable_gqa=True)
        torch.testing.assert_close(found[row], expected[row], atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
def test_flex_attention_on_cuda_gives_the_gradients_of_the_mask():
    found = []
    for device in ("cpu", "cuda"):
        network = lively(Hybrid(**{**SMALL, "mixers": ["block_sparse", "sliding_window"], "n_embd": 64})).to(
            device
        )
        batch = {
            "input_ids": tokens(length=200),
            "document_ids": torch.tensor([0, 1]).repeat_interleave(100).expand(2, -1),
            "position_ids": torch.arange(100).repeat(2).expand(2, -1),
        }
        batch = {name: value.to(device) for name, value in batch.items()}
        network.logits(network(batch)).logsumexp(-1).mean().backward()
        found.append([weight.grad.cpu() for weight in network.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 1e-3 * one.abs().max()  # TF32 is off; other order of sums


@pytest.mark.parametrize(
    ("mixer", "uncounted"),
    [("mamba2", 0), ("gated_linear_attention", 8 * 8)],
)
def test_flops_are_those_that_are_counted(mixer, uncounted):
    """All but scores with a decay for each feature, which are no matrix products."""
    network = Hybrid(**{**SMALL, "n_layer": 2, "mixers": [mixer]})
    counter = FlopCounterMode(display=False)
    with counter:
        network.logits(network({"input_ids": tokens(2, 128)})).sum().backward()
    counted = counter.get_total_flops() / 256 + 2 * 6 * 4 * uncounted
    assert counted == pytest.approx(network.flops_per_token(128), rel=1e-9)


def test_flops_of_states_do_not_grow_with_the_sequence():
    delta = Hybrid(**{**SMALL, "n_layer": 1, "mixers": ["gated_delta_net"]})
    # projections, MLP and head; chunks of 64, K = 8 and V = 6 of 4 heads
    weights = sum(p.numel() for p in delta.layers.parameters() if p.ndim == 2) + 61 * 32
    assert delta.flops_per_token(128) == 6 * weights + 6 * 4 * (64 * (3 * 8 + 2 * 6) + 3 * 8 * 6)
    assert delta.flops_per_token(128) == delta.flops_per_token(256)


def test_a_strong_gate_forgets_and_a_weak_one_keeps():
    """Gated linear attention by hand: one head, one feature, a gate that is open or shut."""
    mixer = GatedLinearAttention(1, 1, 1, 1, norm_eps=1e-30, gate_rank=1)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.fill_(1.0)
        for bias, kept in ((1e4, 1.0), (-1e4, 0.0)):
            mixer.gk_proj[1].bias.fill_(bias)
            cache = StateCache(3)
            mixer(torch.tensor([[[1.0], [2.0], [3.0]]]), None, None, cache)
            assert float(cache.state) == pytest.approx(9 + kept * (4 + 1))


@pytest.mark.parametrize("mixer", get_args(Mixer))
def test_mixers_compute_in_half_precision_what_they_do_in_float64(mixer):
    """bfloat16 has 8 bits: an operation is exact to 2^-9, and what 6 blocks make of that is 0.6% to 1.1% of all states.

    The largest difference of a single one varies with the seed by more than mixers do.
    """
    torch.manual_seed(0)
    network = Hybrid(**{**SMALL, "head_dim": None, "mixers": [mixer]}).eval()
    batch = {"input_ids": torch.arange(40)[None]}
    with torch.no_grad():
        found = deepcopy(network).bfloat16()(batch)
        assert found.dtype == torch.bfloat16
        exact = network.double()(batch)
    assert (found.double() - exact).norm() < 0.015 * exact.norm()


def test_heads_that_do_not_divide_the_width_of_a_mixer_that_is_not_used_are_taken():
    with torch.device("meta"):
        assert Hybrid(**{**SMALL, "head_dim": 6, "mixers": ["attention"]}).head_dim == 6


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (Hybrid, {"mixers": []}, "mixers is empty"),
        (Hybrid, {"mixers": ["mamba"]}, "'mamba', none of .* Did you mean mamba2"),
        (Hybrid, {"sinks": -1}, "sinks=-1 must be at least 0"),
        (Hybrid, {"head_dim": 6}, "head_dim=6 does not divide mamba2's width, 2 n_embd=64"),
        (Mamba2, {"n_embd": 32, "head_dim": 24}, "head_dim=24 does not divide expand"),
        (Mamba2, {"n_embd": 32, "head_dim": 16, "n_groups": 3}, "n_groups=3 does not divide the 4 heads"),
        (OLMoHybrid, {"n_embd": 33}, "n_embd=33 is not divisible by n_head=30; 60 is"),
    ],
)
def test_wrong_arguments_are_named(network, options, message):
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        network(**((SMALL if network is Hybrid else {}) | options))
