"""Parts of networks: initialisation, arguments, tables, what attention may be replaced."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from core.errors import ConfigError
from core.training.parameter_groups import parameter_groups
from plugins.networks.gemma3 import Gemma3
from plugins.networks.llama import Llama
from plugins.networks.mistral import Mistral
from plugins.networks.parts.attention import attention_mask
from plugins.networks.parts.positions import Rope
from plugins.networks.qwen3 import Qwen3
from plugins.objectives.causal_lm import CausalLM
from plugins.optimizers.adamw import AdamW
from tests.support.reference_models import hidden_states, tokens

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


def sizes_of_activations(width, mup, steps=6):
    """Returns the mean size of hidden states of each block, and of logits, after some steps of Adam on one batch."""
    torch.manual_seed(0)
    network = Llama(
        vocab_size=64, n_layer=2, n_head=width // 32, n_kv_head=width // 32, n_embd=width, intermediate_size=2 * width,
        max_sequence_length=32, tie_embeddings=False, init="mup" if mup else "llama",
    )  # fmt: skip
    rates = (
        {pattern: {"lr": 0.02 * 64 / width} for pattern in ("*_proj.weight", "lm_head.weight")} if mup else {}
    )
    if mup:  # 2 C inputs
        rates["*.down_proj.weight"] = {"lr": 0.02 * 32 / width}
    optimizer = AdamW(parameter_groups(network, True, rates), lr=0.02 if mup else 0.005, weight_decay=0.0)
    ids = tokens(8, 33, 64)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    for _ in range(steps):
        optimizer.zero_grad()
        CausalLM().loss(network, batch)[0].mean.backward()
        optimizer.step()
    with torch.no_grad():
        found = hidden_states(network.blocks, lambda: network.logits(network(batch)))
    return [float(x.abs().mean()) for x in found]


@pytest.mark.ci
def test_with_mup_activations_after_some_steps_do_not_grow_with_the_width():
    """The coordinate check of arXiv:2203.03466, appendix D.1."""
    sizes = {
        mup: [sizes_of_activations(width, mup) for width in (64, 128, 256, 512)] for mup in (True, False)
    }
    growth = {
        mup: [wide / narrow for narrow, wide in zip(found[0], found[-1], strict=True)]
        for mup, found in sizes.items()
    }
    assert max(growth[True]) < 1.25, sizes
    assert min(growth[True]) > 0.5, sizes  # logits settle slowly: 1.00, 0.84, 0.71, 0.62
    assert min(growth[False]) > 3, sizes


def test_mup_begins_with_a_head_of_zeros_and_refuses_a_tied_one():
    torch.manual_seed(0)
    network = Llama(**WIDE, tie_embeddings=False, init="mup", init_std={"layers.*.q_proj": 0.5})
    assert not network.lm_head.weight.any()
    assert float(network.embed_tokens.weight.detach().std()) == pytest.approx(1, rel=0.03)
    block = network.blocks[1]
    for module, expected in (
        (block.mlp.up_proj, 256**-0.5),
        (block.mlp.down_proj, 512**-0.5),
        (block.attention.q_proj, 0.5),
    ):
        assert float(module.weight.detach().std()) == pytest.approx(expected, rel=0.03)
    with pytest.raises(ConfigError, match="set tie_embeddings to false"):
        Llama(**WIDE, tie_embeddings=True, init="mup")


PUBLISHED = {
    "Llama 3.1": (128, 500000.0, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "Qwen2.5 at 128k": (128, 1000000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "DeepSeek-V3": (64, 10000.0, {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "gpt-oss": (64, 150000.0, {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}),
    "linear": (96, 10000.0, {"rope_type": "linear", "factor": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_of_published_sizes_are_transformers_tables(name):
    """Heads of 64 features and more: the bounds of YaRN's ramp lie between pairs, and rounding them matters."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    dim, theta, scaling = PUBLISHED[name]
    config = LlamaConfig(
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=65536,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    positions = torch.arange(40000)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    table = Rope(dim, theta, scaling).table(40000)
    assert torch.equal(table[:, : dim // 2], sin[0, :, : dim // 2])
    assert torch.equal(table[:, dim // 2 :], cos[0, :, : dim // 2])


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
