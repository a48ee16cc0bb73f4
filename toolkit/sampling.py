"""Text generation in one call: streams token ids drawn from a network. `toolkit.generation` has its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import torch

from core.contracts import Network
from toolkit.generation.decoding import Decoding, Token
from toolkit.generation.filters import Sampling, next_token_probabilities

__all__ = ["fault", "generate", "next_token_probabilities"]


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
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
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
        temperature: As for :class:`toolkit.generation.filters.Sampling`, like the other filters.
        top_k: At least 1, or None.
        top_p: Above 0, at most 1, or None.
        seed: Draws the same from the same logits on every device, being used on the CPU; None takes
            one from the operating system. A generator is used, and advanced, as it is.
        stop_id: Ends the stream without being yielded.
        min_p: 0 to 1, or None.
        repetition_penalty: Above 0; 1: none.

    Raises:
        ConfigError: At the call, if a value is out of range; later, if logits are not finite.
    """
    decoding = Decoding(
        network,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        seeds=[seed],
        stop_ids=() if stop_id is None else (stop_id,),
    )
    return _ids(iter(decoding))


def _ids(tokens: Iterator[Token]) -> Iterator[int]:
    with closing(tokens):  # type: ignore[type-var]  # a generator
        for token in tokens:
            yield token.id


def fault(
    max_new_tokens: int, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> str | None:
    """Returns which option of :func:`generate` is out of its range, or None."""
    if max_new_tokens < 0:
        return f"max_new_tokens={max_new_tokens} must be at least 0."
    return Sampling(temperature, top_k, top_p).fault()
