"""Tokens per second of generation on the CPU, beside `generate` of transformers with the same weights.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.generation

A Llama of SmolLM2-135M's sizes with random weights, float32 and bfloat16, batches of 1 and 16 prompts of 16 tokens each,
32 new tokens, greedy. The two take turns; of each the fastest of the rounds counts, as other load only slows; CPU time is
less changed by it. For one prompt our weights are stored as the command stores them for one text. The share
of memory bandwidth is the bytes of the weights per step and second, beside those of a sum over as large a tensor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from plugins.networks.llama import Llama
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling
from toolkit.generation.single_rows import store_for_single_rows

SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "n_layer": 30,
    "n_embd": 576,
    "n_head": 9,
    "n_kv_head": 3,
    "intermediate_size": 1536,
    "max_sequence_length": 2048,
    "rope_theta": 100000.0,
    "tie_embeddings": True,
}
PROMPT, NEW, ROUNDS = 16, 32, 5


def pair(dtype: torch.dtype) -> tuple[Llama, LlamaForCausalLM]:
    """Returns our network and transformers' model with the same weights."""
    values = Llama.hugging_face.config(Llama, SIZES)
    del values["architectures"], values["model_type"]
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**values)).eval()
    ours = Llama(**SIZES).eval()
    weights = theirs.state_dict()
    names = Llama.hugging_face.tensors(ours.state_dict())
    ours.load_state_dict({stored.ours[0]: weights[stored.theirs] for stored in names})
    for module in (ours, theirs):
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    return ours, theirs


def bandwidth(dtype: torch.dtype, elements: int) -> float:
    """Returns bytes per second of reading a tensor once, the best of several times."""
    tensor, best = torch.ones(elements, dtype=dtype).view(torch.int32), 0.0
    for _ in range(10):
        start = time.perf_counter()
        tensor.amax()
        best = max(best, tensor.nbytes / (time.perf_counter() - start))
    return best


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Returns how long a call takes, and how long this thread computes."""
    start, computed = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - start, time.thread_time() - computed


def generate(ours: Llama, prompts: torch.Tensor) -> list[list[int]]:
    """Returns our new tokens."""
    found: list[list[int]] = [[] for _ in prompts]
    seeds = [0] * len(prompts)
    for token in Decoding(ours, prompts.tolist(), max_new_tokens=NEW, sampling=Sampling(0), seeds=seeds):
        found[token.row].append(token.id)
    return found


def measure(dtype: torch.dtype) -> None:
    """Prints the rows of a data type."""
    ours, theirs = pair(dtype)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    size = sum(parameter.nbytes for parameter in ours.parameters())
    single = 0.0
    store_for_single_rows(ours)  # as the command does for one text
    for batch in (1, 16):
        if batch > 1:
            for parameter in ours.parameters():
                parameter.data = parameter.data.contiguous()
        prompts = torch.randint(49152, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
        options = {"attention_mask": torch.ones_like(prompts), "generation_config": config}
        times: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
        reads = 0.0
        for _ in range(ROUNDS):
            times[0].append(seconds(partial(generate, ours, prompts)))
            times[1].append(seconds(partial(theirs.generate, prompts, **options)))
            reads = max(reads, bandwidth(dtype, size // dtype.itemsize))
        ratios = sorted(other[0] / own[0] for own, other in zip(*times, strict=True))
        (own, own_computed), (other, other_computed) = (
            tuple(map(min, zip(*side, strict=True))) for side in times
        )
        single = single or NEW / own
        print(
            f"| {str(dtype)[6:]} | {batch} | {batch * NEW / own:.0f} | {batch * NEW / other:.0f} "
            f"| {other / own:.2f} | {ratios[len(ratios) // 2]:.2f} | {other_computed / own_computed:.2f} | {batch * NEW / own / single:.1f} "
            f"| {NEW / own * size / reads:.0%} of {reads / 1e9:.1f} GB/s |",
            flush=True,
        )


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(
        "| | batch | tokens/s | transformers | fastest / fastest | median of turns | CPU time | batch 1 = 1 | bandwidth |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in (torch.float32, torch.bfloat16):
        measure(kind)
