"""Transformers' models with experts: their weights under the names that files have."""

from __future__ import annotations

import re

import torch

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def published(tensors, mixtral=False):
    """Returns tensors of a model in memory, where experts are stacked, one for each expert, as in files."""
    found = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.mlp\.)experts\.(gate_up_proj|down_proj)", name)
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        if match is None:
            found |= _of_hybrid(name, tensor, tensors)
            continue
        prefix = match[1].replace(".mlp.", ".block_sparse_moe.") if mixtral else match[1]
        for expert, matrix in enumerate(tensor):
            parts = PARTS[match[2]]
            for part, piece in zip(parts, torch.chunk(matrix, len(parts)), strict=True):
                leaf = OF_MIXTRAL[part] if mixtral else part
                found[f"{prefix}experts.{expert}.{leaf}.weight"] = piece
    return found


def _of_hybrid(name, tensor, tensors):
    """Returns a tensor under its name in files; in memory OLMo Hybrid has one convolution and other names of norms."""
    layer = re.match(r".*\.layers\.\d+\.", name)
    linear = f"{layer[0]}linear_attn." if layer else ""
    if f"{linear}conv1d.weight" not in tensors or not linear:
        return {name: tensor}
    if name == f"{linear}conv1d.weight":
        sizes = [len(tensors[f"{linear}{part}_proj.weight"]) for part in "qkv"]
        pieces = zip("qkv", tensor.split(sizes), strict=True)
        return {f"{linear}{part}_conv1d.weight": piece for part, piece in pieces}
    norms = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    for ours, theirs in norms.items():
        name = name.replace(ours, theirs)
    return {name: tensor}
