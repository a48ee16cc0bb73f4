"""`--quantize`: logits within what the step of quantisation allows, and the memory that is printed."""

import re

import pytest
import torch
from bitsandbytes.functional import get_4bit_type
from torch import nn

from core.__main__ import main
from plugins.commands.quantize import quantize
from plugins.networks.llama import Llama
from tests.support.stored_networks import MLP, lively_network, store

SIZES = MLP | {"n_embd": 64, "intermediate_size": 128}


def rounded(weight, kind, layer):
    """Returns the values that a weight (out, in) is rounded to, and the most that each may be off."""
    if kind == "int8":
        scale = layer.weight.SCB[:, None] / 127  # of the row's largest value
        # bitsandbytes divides in float16, whose spacing at 127 levels is 1/16 of one
        return layer.weight.CB * scale, (0.5 + 2 / 16) * scale.expand_as(weight)
    levels = get_4bit_type("nf4", "cpu")
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scale[..., None] - levels).abs().argmin(-1)
    half = (levels[1:] - levels[:-1]).max() / 2
    return (levels[nearest] * scale).reshape(weight.shape), (half * scale).expand_as(blocks).reshape(
        weight.shape
    )


def logits(network, ids):
    return network.logits(network({"input_ids": ids}))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_logits_are_off_by_what_the_step_allows(kind):
    exact, quantised, reference = (lively_network(Llama, SIZES).eval() for _ in range(3))
    said = quantize(quantised, kind)
    inside = {
        name: layer
        for name, layer in reference.named_modules()
        if isinstance(layer, nn.Linear) and "layers" in name
    }
    steps = {}
    for name, layer in inside.items():
        values, steps[name] = rounded(layer.weight.data, kind, quantised.get_submodule(name))
        assert ((values - layer.weight).abs() <= steps[name] * (1 + 1e-5)).all()
        layer.weight.data = values
    ids = torch.arange(24)[None] % 61
    found, expected = logits(quantised, ids).detach(), logits(reference, ids).detach()
    # the same weights, and so the same sums but for their order
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    # to first order a logit is off by at most the sum over weights of |gradient| times half a step
    before = logits(exact, ids)
    off = (found - before.detach()).abs()
    assert off.max() > 1e-4
    layers = dict(exact.named_modules())
    for place in range(0, 24, 8):
        exact.zero_grad()
        before[0, place, 7].backward(retain_graph=True)
        bound = sum(float((layers[name].weight.grad.abs() * step).sum()) for name, step in steps.items())
        assert float(off[0, place, 7]) <= bound
    weights = sum(layer.weight.numel() for layer in inside.values())
    size = float(re.search(r"take ([\d.]+) KiB", said)[1]) * 1024
    bits = 8.5 if kind == "int8" else 4.5  # with scales: 32 bits for each row of 64 or 128, or for 64 weights
    assert size / weights * 8 == pytest.approx(bits, abs=0.15)


@pytest.mark.parametrize(
    "words", [["int8"], ["nf4"], ["int8", "--dtype", "bfloat16"], ["nf4", "--dtype", "bfloat16"]]
)
def test_generate_says_what_is_saved(words, tmp_path, capsys):
    network = lively_network(Llama, SIZES)
    path = store(network, SIZES, tmp_path / "a.ckpt")
    command = ["generate", f"--ckpt_path={path}", "--prompt=ab", "--max_new_tokens=5", "--quantize", *words]
    assert main(command) == 0
    written = capsys.readouterr()
    assert f"# {words[0]}: 21 linear layers take " in written.err
    assert "# 5 tokens" in written.err
