"""Q4_K: blocks against those of llama.cpp, as `gguf` reads both, and a file of them in llama.cpp."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import Q4_K

from plugins.checkpoints.initial_weights import InitialWeights
from plugins.commands.gguf_q4k import _packed, quantize
from plugins.networks.llama import Llama
from tests.support.cli_runs import core  # noqa: F401
from tests.support.llama_cpp import log_probabilities, quantise
from tests.support.reference_models import tokens
from tests.support.stored_networks import MLP, store

RANDOM = np.random.default_rng(0)
MATRICES = {
    "normal": RANDOM.normal(size=(64, 1024)),
    "heavy tails": RANDOM.standard_t(3, size=(64, 1024)),
    "uniform": RANDOM.uniform(-1, 1, (64, 1024)),
    "positive": 1 + np.abs(RANDOM.normal(size=(64, 1024))),
    "negative": -1 - np.abs(RANDOM.normal(size=(64, 1024))),
    "mixed sizes": RANDOM.normal(size=(64, 1024))
    * 10.0 ** RANDOM.integers(-3, 2, (64, 32)).repeat(32, axis=1),
    "few values": RANDOM.integers(-2, 3, (64, 1024)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_the_error_is_no_larger_than_that_of_llama_cpp(name):
    """By 2% at most, weighted as llama.cpp weighs it: each of the two finds the better line for some parts."""
    matrix = MATRICES[name].astype(np.float32)
    parts = matrix.reshape(-1, 32)
    weights = np.sqrt((parts**2).mean(axis=1, keepdims=True)) + np.abs(parts)
    ours, theirs = (
        float(
            (weights * (gguf.dequantize(found, GGMLQuantizationType.Q4_K).reshape(-1, 32) - parts) ** 2).sum()
        )
        for found in (quantize(matrix), quantise(matrix, "Q4_K"))
    )
    assert ours < 1.02 * theirs


def test_scales_and_minima_are_read_as_they_were_packed():
    scales, minima = RANDOM.integers(0, 64, (2, 500, 8), dtype=np.uint8)
    for found, packed in zip(Q4_K.get_scale_min(_packed(scales, minima)), (scales, minima), strict=True):
        np.testing.assert_array_equal(found, packed)


def test_what_blocks_hold_exactly_comes_back_exactly():
    """Numbers from 0 to 15 with a scale of 63 and one of 21; zeros; and one value in all places."""
    numbers = RANDOM.integers(0, 16, (8, 32))
    numbers[:, :2] = (0, 15)
    steps = np.array([63, 21, 63, 63, 21, 63, 63, 63]) * 2.0**-8
    exact = np.stack([(numbers * steps[:, None]).reshape(-1), np.zeros(256)]).astype(np.float32)
    np.testing.assert_array_equal(gguf.dequantize(quantize(exact), GGMLQuantizationType.Q4_K), exact)
    same = np.full((2, 3, 256), -0.3, np.float32)
    found = gguf.dequantize(quantize(same), GGMLQuantizationType.Q4_K)
    assert found.shape == same.shape
    np.testing.assert_allclose(found, same, rtol=2**-11)


def test_llama_cpp_computes_what_a_network_with_the_weights_of_the_file_does(core, tmp_path):  # noqa: F811
    """llama.cpp rounds what it multiplies such weights with to 8 bits, which makes 1.1% of the spread of logits here; 0.7% with Q8_0."""
    arguments = {**MLP, "n_embd": 256, "intermediate_size": 288, "n_head": 8}
    torch.manual_seed(0)
    network = Llama(**arguments)
    store(network, arguments, tmp_path / "a.ckpt")
    done = core("export", "--ckpt_path=a.ckpt", "--format=gguf", "--type=q4_k", "--output=a.gguf")
    assert done.code == 0, done.err
    assert (
        "3 are q8_0, not q4_k, as their rows are no multiple of 256: blk.0.ffn_down.weight, for one."
        in done.out
    )
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == "Q4_K"
    assert (kinds["blk.0.ffn_down.weight"], kinds["output_norm.weight"]) == ("Q8_0", "F32")

    InitialWeights(str(tmp_path / "a.gguf")).change_network(network)
    ids = tokens(1, 60, vocab_size=55)
    with torch.no_grad():
        ours = torch.log_softmax(network.logits(network({"input_ids": ids})), dim=-1)[0]
    theirs = log_probabilities(tmp_path / "a.gguf", ids[0].tolist())
    assert float((theirs - ours).square().mean().sqrt()) < 0.02 * float(ours.std(dim=-1).mean())
