"""Parts of networks: initialisation, arguments, tables, what attention may be replaced."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from core.errors import ConfigError
from plugins.networks.gemma3 import Gemma3
from plugins.networks.llama import Llama
from plugins.networks.mistral import Mistral
from plugins.networks.parts.attention import attention_mask
from plugins.networks.parts.positions import Rope
from plugins.networks.qwen3 import Qwen3

WIDE = {
    "vocab_size": 500,
    "n_layer": 3,
    "n_head": 4,
    "n_kv_head": 4,
    "n_embd": 256,
    "intermediate_size": 512,
    "max_sequence_length": 8,
}
TINY = {"vocab_size": 8, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 8, "intermediate_size": 8, "max_sequence_length": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("init", "usual", "residual"),
    [
        ("llama", 0.02, 0.02),
        ("gpt2", 0.02, 0.02 / math.sqrt(6)),
        ("small", math.sqrt(2 / (5 * 256)), 2 / (3 * 16)),
    ],
)
def test_weights_begin_with_the_standard_deviation_of_their_kind(init, usual, residual):
    torch.manual_seed(0)
    own = {"embed_tokens": 0.3, "layers.1.*.down_proj": 0.001}
    network = Llama(**WIDE, tie_embeddings=False, bias=True, init=init, init_std=own)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == ("norm" in name)).all(), name
            continue
        expected = residual if "o_proj" in name or "down_proj" in name else usual
        expected = {"embed_tokens.weight": 0.3, "layers.1.mlp.down_proj.weight": 0.001}.get(name, expected)
        assert float(parameter.std()) == pytest.approx(expected, rel=0.03), name


def test_a_mask_shows_the_last_tokens_of_a_window():
    device = torch.device("cpu")
    assert attention_mask(0, 4, None, device, 4) is None
    assert attention_mask(9, 10, None, device, 4) is None
    assert attention_mask(0, 5, None, device, 3).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    # 6 tokens in the cache, of which the last 2 are kept
    assert attention_mask(6, 8, None, device, 3).int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]


def test_tables_are_made_once_for_blocks_that_are_alike():
    network = Gemma3(**{**TINY, "n_layer": 6}, head_dim=4, sliding_window=3, global_every=2, rope_theta=1e6)
    assert [name for name, _ in network.named_buffers()] == ["rope_table_0", "rope_table_1"]
    assert network.windows == [3, None] * 3
    assert not [name for name in network.state_dict() if "table" in name]
    assert torch.equal(network.rope_table_1, Rope(4, 1e6).table(32))


def test_attention_is_replaced_where_another_function_computes_the_same():
    assert Llama(**TINY).replace_attention(scaled_dot_product_attention)
    assert Qwen3(**TINY, head_dim=4).replace_attention(scaled_dot_product_attention)
    assert not Mistral(**TINY, sliding_window=8).replace_attention(scaled_dot_product_attention)
    assert Mistral(**TINY, sliding_window=32).replace_attention(scaled_dot_product_attention)  # it sees all
    gemma = {**TINY, "head_dim": 4, "sliding_window": 32}
    assert Gemma3(**gemma, query_pre_attn_scalar=4).replace_attention(scaled_dot_product_attention)
    for own in ({"query_pre_attn_scalar": 5}, {"query_pre_attn_scalar": 4, "attention_soft_cap": 5.0}):
        assert not Gemma3(**gemma, **own).replace_attention(scaled_dot_product_attention)


def test_a_window_counts_no_more_flops_than_it_sees():
    whole, window = Mistral(**TINY, sliding_window=None), Mistral(**TINY, sliding_window=8)
    assert (
        whole.flops_per_token(8)
        == window.flops_per_token(8)
        == window.flops_per_token(32)
        < whole.flops_per_token(9)
    )


def test_logits_with_a_cap_are_what_forward_returns():
    network = Gemma3(**TINY, head_dim=4, final_soft_cap=0.01)
    logits = network({"input_ids": torch.zeros(1, 3, dtype=torch.long)})
    assert logits.shape == (1, 3, 8)
    assert network.logits(logits) is logits
    assert network.output_weight is None
    assert logits.abs().max() <= 0.01


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (Llama, {"n_kv_head": 3}, "Llama: n_kv_head=3 does not divide n_head=2"),
        (Llama, {"n_embd": 9}, "n_embd=9 is not divisible by n_head=2; 10 is"),
        (Llama, {"head_dim": 3}, "an even head_dim, not 3"),
        (Llama, {"init": "lama"}, "Did you mean llama?"),
        (Llama, {"init_std": {"*.o_proj": -1.0}}, r"init_std\[\*.o_proj\]=-1.0 must be above 0"),
        (Llama, {"rope_theta": math.nan}, "rope_theta=nan must be above 0"),
        (Llama, {"rope_scaling": {"rope_type": "yarm"}}, "Did you mean yarn?"),
        (
            Llama,
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "needs original_max_position_embeddings",
        ),
        (Llama, {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor=0.5 must be at least 1"),
        (Llama, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "has no beta"),
        (
            Llama,
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "factor='2' must be a number above 0",
        ),
        (Llama, {"attention_dropout": 1.0}, "attention_dropout=1.0 must be"),
        (Mistral, {"sliding_window": 0}, "Mistral: sliding_window=0 must be at least 1"),
        (Gemma3, {"final_soft_cap": 0.0}, "Gemma3: final_soft_cap=0.0 must be above 0"),
        (Qwen3, {"max_window_layers": -1}, "max_window_layers=-1 must be at least 0"),
    ],
)
def test_wrong_arguments_are_named(network, options, message):
    with pytest.raises(ConfigError, match=message):
        network(**{**TINY, **options})
