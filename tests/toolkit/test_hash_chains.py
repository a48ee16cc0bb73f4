"""Fingerprints against numpy, and files that were cut, written twice or by others."""

import json

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from toolkit.hash_chains import fingerprint, group_of, ordered_fingerprint, read_chain


@pytest.mark.parametrize(
    ("dtype", "integers"),
    [
        (torch.float32, np.uint32),
        (torch.bfloat16, np.int16),
        (torch.float64, np.uint32),
        (torch.bool, np.uint8),
    ],
)
def test_a_fingerprint_is_the_sum_of_the_bits(dtype, integers):
    tensor = torch.randn(7, 33).to(dtype)
    raw = tensor.view(torch.uint8).numpy().tobytes() if tensor.dim() else b""
    expected = int(np.frombuffer(raw, integers).astype(np.int64).sum()) % 2**32
    assert int(fingerprint(tensor)) % 2**32 == expected
    assert int(fingerprint(tensor.T)) == int(fingerprint(tensor))  # in whatever order


def test_one_bit_changes_it_and_an_exchange_only_the_ordered_one():
    tensor = torch.arange(1000, dtype=torch.float32)
    changed = tensor.clone()
    changed.view(torch.int32)[123] ^= 1
    assert int(fingerprint(changed)) != int(fingerprint(tensor))
    swapped = tensor.flip(0)
    assert int(fingerprint(swapped)) == int(fingerprint(tensor))
    assert int(ordered_fingerprint([swapped])) != int(ordered_fingerprint([tensor]))
    assert int(ordered_fingerprint([tensor, changed])) != int(ordered_fingerprint([changed, tensor]))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("network.layers.3.mlp.up_proj.weight", "network.layers.3"),
        ("network.embed_tokens.weight", "network.embed_tokens"),
        ("scale", "scale"),
    ],
)
def test_the_weights_of_a_block_are_one_entry(name, group):
    assert group_of(name) == group


def test_of_a_step_made_twice_the_last_line_counts_and_a_cut_line_does_not(tmp_path):
    head = {"environment": {}, "groups": ["a", "b"]}
    lines = [head, *({"step": n, "loss": f"{i}"} for i, n in enumerate([1, 2, 3, 2]))]
    lines.append({"step": 3, "weights": "0000000100000002"})
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    chain = read_chain(path)
    assert {step: line.get("loss") for step, line in chain.steps.items()} == {1: "0", 2: "3", 3: None}
    assert chain.weights(3) == {"a": "00000001", "b": "00000002"}
    path.write_text('{"step": -1}\n')
    with pytest.raises(ConfigError, match="not as HashChain writes it"):
        read_chain(path)
