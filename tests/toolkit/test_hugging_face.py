"""Names and configs of transformers: what has a form there, and what is refused. The numbers: test_families.py."""

import pytest
import torch

from core.errors import ConfigError
from plugins.networks.gemma3 import Gemma3
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.qwen2 import Qwen2
from plugins.networks.qwen3 import Qwen3
from toolkit.hugging_face import HasHuggingFaceForm, HuggingFaceForm, Rename

LLAMA2 = {  # as transformers 4 wrote it
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
}
TINY = {"vocab_size": 8, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 8, "max_sequence_length": 4}


def test_several_of_ours_lie_side_by_side_in_theirs_and_come_back():
    form = GPT.hugging_face
    network = GPT(**TINY | {"n_kv_head": 2})
    ours = network.state_dict()
    [fused] = [one for one in form.tensors(ours) if one.theirs == "transformer.h.0.attn.c_attn.weight"]
    assert fused.ours == tuple(f"layers.0.attention.{name}_proj.weight" for name in "qkv")
    theirs = fused.to_theirs([ours[name] for name in fused.ours])
    assert theirs.shape == (8, 24)
    assert torch.equal(theirs[:, 8:16].t(), ours["layers.0.attention.k_proj.weight"])
    back = fused.to_ours(theirs, [8, 8, 8])
    assert all(torch.equal(tensor, ours[name]) for tensor, name in zip(back, fused.ours, strict=True))
    with pytest.raises(ConfigError, match=r"c_attn.weight has 24 rows, not 16"):
        fused.to_ours(theirs, [8, 4, 4])


def test_names_without_a_place_are_refused():
    form = HuggingFaceForm("XForCausalLM", "x", (Rename(("a.*.q", "a.*.k"), "b.*.qk"),), {})
    assert isinstance(Llama(**TINY, intermediate_size=8), HasHuggingFaceForm)
    assert form.tensors(["a.12.q.weight", "a.12.k.weight"])[0].theirs == "b.12.qk.weight"
    with pytest.raises(ConfigError, match=r"no place for a.x.q.weight"):
        form.tensors(["a.x.q.weight"])
    with pytest.raises(ConfigError, match=r"b.0.qk.weight needs more than a.0.q.weight"):
        form.tensors(["a.0.q.weight"])


def test_a_config_of_transformers_4_is_read():
    arguments = Llama.hugging_face.init_args(LLAMA2)
    assert arguments["n_kv_head"] is None
    assert arguments["tie_embeddings"] is False
    assert arguments["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    with torch.device("meta"):
        network = Llama(**arguments)
    assert sum(parameter.numel() for parameter in network.parameters()) == 6_738_415_616  # Llama 2 7B's


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        (Llama, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (Llama, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; linear, llama3, yarn"),
        (Llama, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (Qwen2, {"layer_types": ["sliding_attention"] * 32}, "layer 0 is 'sliding_attention'"),
        (Gemma3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (Gemma3, {"layer_types": ["full_attention", "sliding_attention"] * 16}, "layer 1 is 'sliding_attention'"),
    ],
)  # fmt: skip
def test_what_our_class_does_not_compute_is_refused(form, changes, message):
    with pytest.raises(ConfigError, match=message):
        form.hugging_face.init_args(LLAMA2 | changes)
    missing = {key: value for key, value in LLAMA2.items() if key != "hidden_size"}
    with pytest.raises(ConfigError, match="has no hidden_size"):
        form.hugging_face.init_args(missing)


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (GPT, {"position": "rotary"}, "position='rotary' has no form in transformers"),
        (GPT, {"n_kv_head": 4}, "n_kv_head=4"),
        (GPT, {"activation": "swiglu"}, "activation='swiglu'"),
        (GPT, {"bias": False}, "bias=False"),
        (Gemma3, {"attention_soft_cap": 50.0}, "attention_soft_cap has no form"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(network, arguments, message):
    with pytest.raises(ConfigError, match=message):
        network.hugging_face.config(network, arguments)


def test_dropouts_of_gpt2_are_those_of_the_run():
    config = GPT.hugging_face.config(GPT, {"dropout": 0.1, "attention_dropout": 0.0})
    assert (config["embd_pdrop"], config["attn_pdrop"], config["resid_pdrop"]) == (0.1, 0.0, 0.1)
    assert Qwen3.hugging_face.config(Qwen3, {})["layer_types"] == ["full_attention"] * 28
