"""Each decoder family computes what transformers computes with the same weights: block by block, and its gradients."""

import pytest
import torch

from plugins.networks.gemma3 import Gemma3
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.mistral import Mistral
from plugins.networks.olmo2 import OLMo2
from plugins.networks.qwen2 import Qwen2
from plugins.networks.qwen3 import Qwen3
from tests.support.reference_models import blocks_of, both, hidden_states, lively, renamed, tokens

SMALL = {
    "vocab_size": 61,
    "n_layer": 3,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 32,
    "intermediate_size": 96,
    "max_sequence_length": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
GPT2 = {"vocab_size": 61, "n_layer": 3, "n_head": 4, "n_embd": 32, "max_sequence_length": 64}
GEMMA = {**SMALL, "head_dim": 12, "sliding_window": 8, "global_every": 2, "query_pre_attn_scalar": 12}

CASES = {  # sequences are of 50 tokens: longer than the windows, and than the original length of scaled positions
    "Llama-llama3": (Llama, {**SMALL, "rope_scaling": LLAMA3, "tie_embeddings": False}),
    "Llama-linear": (Llama, {**SMALL, "rope_scaling": LINEAR, "rope_theta": 100.0, "n_kv_head": None}),
    "Llama-yarn": (Llama, {**SMALL, "rope_scaling": YARN, "rope_theta": 10000.0}),
    "Llama-biases": (Llama, {**SMALL, "bias": True, "mlp_bias": True, "head_dim": 12}),
    "Mistral": (Mistral, {**SMALL, "sliding_window": 8}),
    "Mistral-everywhere": (Mistral, {**SMALL, "sliding_window": None}),
    "Qwen2": (Qwen2, SMALL),
    "Qwen2-windows": (Qwen2, {**SMALL, "tie_embeddings": False, "sliding_window": 8, "max_window_layers": 1}),
    "Qwen3": (Qwen3, {**SMALL, "head_dim": 12}),
    "Qwen3-windows": (Qwen3, {**SMALL, "tie_embeddings": False, "sliding_window": 8, "max_window_layers": 1}),
    "OLMo2": (OLMo2, SMALL),
    "OLMo2-tied": (OLMo2, {**SMALL, "tie_embeddings": True, "n_kv_head": None, "rope_scaling": YARN}),
    "Gemma3": (Gemma3, GEMMA),
    "Gemma3-scaled": (Gemma3, {**GEMMA, "query_pre_attn_scalar": 30, "rope_scaling": LINEAR, "final_soft_cap": 3.0}),
    "GPT2": (GPT, GPT2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_gradients(name):
    network, reference = both(*CASES[name])
    ids = tokens()
    batch = {"input_ids": ids}
    actual = hidden_states(network.blocks, lambda: network.logits(network(batch)))
    expected = hidden_states(blocks_of(reference), lambda: reference(ids, use_cache=False).logits)
    print(name, [float((a - b).detach().abs().max()) for a, b in zip(actual, expected)])
    for x in (actual[-1], expected[-1]):
        x.logsumexp(-1).sum().backward()
    grads = renamed(network, {n: p.grad for n, p in reference.named_parameters()})
    print(max(float((p.grad - grads[n]).abs().max() / grads[n].abs().max()) for n, p in network.named_parameters()))
