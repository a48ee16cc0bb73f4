"""Checkpoints of small networks as a run writes them, with a tokenizer, without a run."""

import json
import string

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.checkpoints.sharded_checkpoint import ShardedCheckpoint
from plugins.networks.gemma3 import Gemma3
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.mistral import Mistral
from plugins.networks.olmo2 import OLMo2
from plugins.networks.qwen2 import Qwen2
from plugins.networks.qwen3 import Qwen3
from tests.support.reference_models import lively

SMALL = {"vocab_size": 61, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "max_sequence_length": 64}
MLP = {**SMALL, "intermediate_size": 96}
PLAIN = {key: value for key, value in SMALL.items() if key != "n_kv_head"}
ROTARY = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
LINEAR = {"rope_type": "linear", "factor": 4.0}

FAMILIES = {
    "GPT": (GPT, PLAIN),
    "GPT-untied": (GPT, {**PLAIN, "tie_embeddings": False, "activation": "gelu"}),
    "GPT-as-Llama": (GPT, {**SMALL, **ROTARY}),
    "GPT-as-Llama-biases": (GPT, {**SMALL, **ROTARY, "bias": True, "tie_embeddings": False}),
    "Llama": (Llama, MLP),
    "Llama-scaled": (Llama, {**MLP, "rope_scaling": LINEAR, "tie_embeddings": False, "bias": True}),
    "Mistral": (Mistral, {**MLP, "sliding_window": 8}),
    "Qwen2": (Qwen2, MLP),
    "Qwen3": (Qwen3, {**MLP, "head_dim": 12}),
    "Gemma3": (Gemma3, {**MLP, "head_dim": 12, "sliding_window": 8, "global_every": 2}),
    "Gemma3-capped": (Gemma3, {**MLP, "head_dim": 12, "sliding_window": 8, "final_soft_cap": 3.0}),
    "OLMo2": (OLMo2, MLP),
}


def tokenizer_json():
    """Returns a tokenizer of 53 letters, one that ends a text, and a merge."""
    words = ["<|end|>", *string.ascii_letters, "Ġ", "th"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer.to_str()


def lively_network(network_class, arguments):
    torch.manual_seed(0)
    return lively(network_class(**arguments))


def content_of(network, arguments, data=True, tokenizer=None):
    """Returns what a run stores of a network."""
    kind = type(network)
    model = {"network": {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": arguments}}
    config = yaml.safe_dump({"model": model, "trainer": {}})
    state = {"tokenizer": tokenizer or tokenizer_json(), "end_of_text_id": 0, "position": None}
    return {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {f"network.{name}": value for name, value in network.state_dict().items()},
        "leyden": {"config": config, "version": "0", "ranks": 1},
        "epoch": 0,
        "global_step": 7,
    } | ({"PretrainDataModule": state} if data else {})


def store(network, arguments, path, sharded=False, data=True, tokenizer=None):
    """Writes a checkpoint of a network, a file or a folder; returns its path."""
    plugin = ShardedCheckpoint(asynchronous=False) if sharded else AtomicCheckpoint()
    plugin.save_checkpoint(content_of(network, arguments, data, tokenizer), path)
    plugin.teardown()
    return path


def edit_json(path, **changes):
    """Changes keys of a JSON file; None takes a key out."""
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
