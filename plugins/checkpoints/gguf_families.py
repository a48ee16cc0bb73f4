"""Networks in GGUF: names of tensors and keys of metadata, in both directions.

A table says which module of transformers a tensor of GGUF is, another which key of config.json a key of metadata is. An
import reads them from left to right and an export from right to left; what an import would not read back is refused.
The names are those of the package `gguf` and of llama.cpp, which compares them when it loads a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.errors import ConfigError

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
    "blk.*.ffn_gate_inp": "model.layers.*.mlp.gate",
    "blk.*.ffn_gate_exps": "model.layers.*.mlp.experts.*.gate_proj",
    "blk.*.ffn_up_exps": "model.layers.*.mlp.experts.*.up_proj",
    "blk.*.ffn_down_exps": "model.layers.*.mlp.experts.*.down_proj",
}
"""Names of tensors in families like Llama."""

AFTER = {
    **{name: theirs for name, theirs in NAMES.items() if name not in ("blk.*.attn_norm", "blk.*.ffn_norm")},
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}
"""The same for families with norms after attention and MLP."""

MIXTRAL = NAMES | {
    "blk.*.ffn_gate_inp": "model.layers.*.block_sparse_moe.gate",
    "blk.*.ffn_gate_exps": "model.layers.*.block_sparse_moe.experts.*.w1",
    "blk.*.ffn_up_exps": "model.layers.*.block_sparse_moe.experts.*.w3",
    "blk.*.ffn_down_exps": "model.layers.*.block_sparse_moe.experts.*.w2",
}

GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.*.attn_norm": "transformer.h.*.ln_1",
    "blk.*.attn_qkv": "transformer.h.*.attn.c_attn",
    "blk.*.attn_output": "transformer.h.*.attn.c_proj",
    "blk.*.ffn_norm": "transformer.h.*.ln_2",
    "blk.*.ffn_up": "transformer.h.*.mlp.c_fc",
    "blk.*.ffn_down": "transformer.h.*.mlp.c_proj",
}

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}

EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


@dataclass(frozen=True)
class Family:
    """A class of transformers in GGUF.

    Args:
        name: `general.architecture`.
        architecture: Class of transformers.
        names: Module in GGUF -> module in transformers; a second "*" is the number of an expert, which GGUF stacks.
        keys: Key of metadata, after `name` -> key of config.json.
        fixed: Keys of config.json that have one value in llama.cpp.
        biases: Key of config.json that says whether there are biases -> a tensor that is there if so.
        adjacent: Whether rotary positions turn neighbouring features, not those of the two halves of a head: rows of
            queries and keys are in another order.
        added: What is added to weights of norms.
        rotary: Whether it has rotary positions.
    """

    name: str
    architecture: str
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    adjacent: bool = False
    added: float = 0.0
    rotary: bool = True

    @property
    def sparse(self) -> bool:
        """Whether it has experts."""
        return "expert_count" in self.keys

    @property
    def transposed(self) -> bool:
        """Whether the matrices of its blocks are (in, out) in transformers."""
        return self.names is GPT2


_LLAMA_BIASES = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_up.bias"}

FAMILIES = (
    Family("llama", "LlamaForCausalLM", biases=_LLAMA_BIASES, adjacent=True),
    Family("llama", "MistralForCausalLM", fixed={"sliding_window": None}, adjacent=True),
    Family(
        "llama",
        "MixtralForCausalLM",
        names=MIXTRAL,
        keys=KEYS | EXPERTS | {"expert_count": "num_local_experts"},
        fixed={"sliding_window": None},
        adjacent=True,
    ),
    Family("qwen2", "Qwen2ForCausalLM", fixed={"use_sliding_window": False}),
    Family("qwen3", "Qwen3ForCausalLM", fixed={"use_sliding_window": False, "attention_bias": False}),
    Family(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        keys=KEYS
        | EXPERTS
        | {
            "feed_forward_length": "moe_intermediate_size",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fixed={"norm_topk_prob": True, "attention_bias": False},
    ),
    Family("olmo2", "Olmo2ForCausalLM", names=AFTER, fixed={"attention_bias": False}),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        keys=KEYS
        | EXPERTS
        | {"attention.head_count_kv": "num_attention_heads"},  # llama.cpp has no groups here
        fixed={"norm_topk_prob": False, "attention_bias": False},
    ),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        names=AFTER
        | {
            "blk.*.attn_norm": "model.layers.*.input_layernorm",
            "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
        },
        keys=KEYS
        | {
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        added=1.0,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        names=GPT2,
        keys={
            "block_count": "n_layer",
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        fixed={"activation_function": "gelu_new"},
        rotary=False,
    ),
)


def family_of(architecture: str) -> Family:
    """Returns the family of a class of transformers.

    Raises:
        ConfigError: If there is none.
    """
    found = next((family for family in FAMILIES if family.architecture == architecture), None)
    if found is None:
        known = ", ".join(family.architecture for family in FAMILIES)
        raise ConfigError(f"{architecture} is not written as GGUF; these are: {known}.")
    return found
