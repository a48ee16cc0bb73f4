"""Arguments of tiny networks, and a batch of packed documents."""

from __future__ import annotations

import torch

from tests.support.reference_models import tokens

DENSE = {
    "vocab_size": 61,
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 32,
    "intermediate_size": 48,
    "max_sequence_length": 64,
}
LATENT = {
    "vocab_size": 61,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 32,
    "intermediate_size": 48,
    "max_sequence_length": 64,
    "n_experts": 8,
    "experts_per_token": 3,
    "expert_size": 24,
    "dense_layers": 1,
    "groups": 4,
    "groups_per_token": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
LENGTHS = (19, 1, 30)
"""Of the documents in a row of `packed`."""


def packed():
    """Returns two rows of three documents, with labels across their ends."""
    ids = tokens()
    return {
        "input_ids": ids,
        "labels": ids.roll(-1, 1),
        "document_ids": torch.repeat_interleave(torch.tensor([3, 5, 7]), torch.tensor(LENGTHS)).expand(2, -1),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1),
    }
