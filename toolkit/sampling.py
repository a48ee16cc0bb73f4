"""Text generation: streams token ids drawn from a network, with a key-value cache where it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from core.contracts import Network
from core.errors import ConfigError


def next_token_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Returns the distribution (V,) from which the next token is drawn, given its `logits` (V,).

    Args:
        logits: Of any floating type and device.
        temperature: Divides the logits; 0 puts all probability on the largest (greedy).
        top_k: Keeps the k most probable tokens.
        top_p: Of these, keeps the fewest most probable that together reach p: nucleus sampling,
            arXiv:1904.09751.
    """
    # below 1e-38 the divisor would be 0 in float32
    scaled = (logits.float() - logits.max()) / (max(temperature, 1e-30) if temperature else 1.0)
    if temperature > 0 and top_k is None and top_p is None:
        return torch.softmax(scaled, dim=0)  # without the sort, which costs most of a draw
    kept, ids = torch.topk(scaled, 1 if temperature == 0 else min(top_k or len(scaled), len(scaled)))
    kept = torch.softmax(kept, dim=0)
    if top_p is not None:
        kept[kept.cumsum(0) - kept >= top_p] = 0
    return torch.zeros_like(scaled).scatter(0, ids, kept / kept.sum())


def generate(
    network: Network,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | torch.Generator | None = None,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Yields token ids that continue the prompt, each as soon as it is drawn.

    Each depends on the last `max_sequence_length` ids before it. Once there are more, positions shift
    with every token and cached keys are not valid: the cache is dropped and the full window is computed again.
    From the first token until the iterator ends or is closed the network is in eval mode; afterwards
    every module is in its own mode again. The global random state is not touched.

    Args:
        network: On any device.
        prompt_ids: At least one id.
        max_new_tokens: The most ids to yield.
        temperature: As for :func:`next_token_probabilities`, like `top_k` and `top_p`.
        top_k: At least 1, or None.
        top_p: Above 0, at most 1, or None.
        seed: Draws the same from the same logits on every device, being used on the CPU; None takes
            one from the operating system. A generator is used, and advanced, as it is.
        stop_id: Ends the stream without being yielded.

    Raises:
        ConfigError: At the call, if a value is out of range; later, if logits are not finite.
    """
    _check(network, prompt_ids, max_new_tokens, temperature, top_k, top_p)
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator()
    if seed is None:
        generator.seed()
    elif isinstance(seed, int):
        generator.manual_seed(seed)

    def draw(logits: Tensor) -> int:
        logits = logits.to(generator.device)
        if not logits.max().isfinite():
            raise ConfigError("generate: the network's logits are not finite: have its weights diverged?")
        probabilities = next_token_probabilities(logits, temperature, top_k, top_p)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    return _stream(network, list(prompt_ids), max_new_tokens, draw, stop_id)


def _stream(
    network: Network, ids: list[int], max_new_tokens: int, draw: Callable[[Tensor], int], stop_id: int | None
) -> Iterator[int]:
    device = next(network.parameters()).device
    length = len(ids) + max_new_tokens
    window = network.max_sequence_length or length
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        cache, new = network.new_cache(1, min(length, window)), ids[-window:]
        for _ in range(max_new_tokens):
            with torch.inference_mode():  # not around the yield, where the caller's code runs
                hidden = network({"input_ids": torch.tensor([new], device=device)}, cache)
                token = draw(network.logits(hidden[0, -1]))
            if token == stop_id:
                return
            ids.append(token)
            yield token
            if cache is not None and len(ids) <= window:
                new = [token]
            else:
                cache, new = None, ids[-window:]
    finally:
        for module, training in modes:
            module.training = training


def fault(
    max_new_tokens: int, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> str | None:
    """Returns which option of :func:`generate` is out of its range, or None."""
    problems = {
        f"max_new_tokens={max_new_tokens} must be at least 0.": max_new_tokens < 0,
        f"temperature={temperature} must be 0 (greedy) or above.": not 0 <= temperature < float("inf"),
        f"top_k={top_k} must be at least 1.": top_k is not None and top_k < 1,
        f"top_p={top_p} must be above 0 and at most 1.": top_p is not None and not 0 < top_p <= 1,
    }
    return next((message for message, applies in problems.items() if applies), None)


def _check(
    network: Network,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    size = network.vocab_size
    outside = [token for token in prompt_ids if not 0 <= token < size]
    problems = {
        "the prompt is empty: give at least one token.": not prompt_ids,
        f"prompt token {outside and outside[0]} is not in the vocabulary ({size}).": bool(outside),
    }
    wrong = fault(max_new_tokens, temperature, top_k, top_p)
    if message := wrong or next((text for text, applies in problems.items() if applies), None):
        raise ConfigError(f"generate: {message}")
