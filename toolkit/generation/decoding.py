"""The decoding loop: one token after another for many prompts at once.

Shapes: B rows, V token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core.contracts import Network
from core.errors import ConfigError
from core.technique import declaration_of
from toolkit.generation.filters import Sampling, draw, next_token_probabilities, penalise_repetition
from toolkit.generation.rows import Rows, evaluating

__all__ = ["Decoding", "Token", "check_prompts", "finite", "seen_tokens"]


class Token(NamedTuple):
    """A token that was drawn.

    Attributes:
        row: Index of the text, from 0.
        id: Its id.
        log_probability: Natural logarithm of its probability by the network, before any filter; None: not asked for.
        likeliest: The ids that were likeliest in its place and their log-probabilities, as many as were asked for.
    """

    row: int
    id: int
    log_probability: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Decoding:
    """Continues prompts; iterating yields each :class:`Token` as soon as it is drawn, for one row after another.

    A row ends with `max_new_tokens`, with a token of `stop_ids`, which is not yielded, or by :meth:`finish`. What a row
    draws depends on its prompt and its seed alone, not on the rows beside it. While it is iterated the network is in
    eval mode; afterwards every module is in its own mode again. The global random state is not touched.

    Args:
        network: On any device.
        prompts: Token ids of each, at least one.
        max_new_tokens: The most tokens of a row.
        sampling: How tokens are chosen.
        seeds: For each row. The same seed draws the same from the same logits on every device, as it is used on the
            CPU; None takes one from the operating system. A generator is used, and advanced, as it is.
        samples: Rows of each prompt: row i continues prompt i // samples.
        stop_ids: Token ids that end a row.
        log_probabilities: Whether tokens have theirs.
        likeliest: How many of the likeliest ids tokens have, if `log_probabilities`.
        cached: False computes each text again for each token: slow, and the same.
        before: A decoding of one text that is over. One prompt that begins as that text did continues from its cache, if
            the network offers :class:`toolkit.generation.rows.KeepsPrefix`.
        inference_mode: False: `torch.no_grad` takes the place of `torch.inference_mode`, whose tensors cannot be trained on. For
            networks that keep tensors for training, such as weights that a strategy gathers.

    Raises:
        ConfigError: If a value is out of range; while iterating, if logits are not finite.

    Example:
        for token in Decoding(network, [[5, 7], [3]], max_new_tokens=20, seeds=[0, 1]):
            print(token.row, token.id)
    """

    def __init__(
        self,
        network: Network,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        seeds: Sequence[int | torch.Generator | None],
        samples: int = 1,
        stop_ids: Collection[int] = (),
        log_probabilities: bool = False,
        cached: bool = True,
        likeliest: int = 0,
        before: Decoding | None = None,
        inference_mode: bool = True,
    ):
        sampling = sampling or Sampling()
        check_prompts(network, prompts, max_new_tokens)
        if wrong := sampling.fault():
            raise ConfigError(f"generate: {wrong}")
        if samples < 1 or len(seeds) != len(prompts) * samples:
            raise ConfigError(
                f"generate: {len(seeds)} seeds for {len(prompts)} prompts of {samples} samples each."
            )
        self._network, self._prompts, self._samples = network, prompts, samples
        self._sampling, self._log_probabilities = sampling, log_probabilities
        self._likeliest = min(likeliest, network.vocab_size)
        self._max_new_tokens, self._stop_ids, self._cached = max_new_tokens, frozenset(stop_ids), cached
        self._without_gradients = torch.inference_mode if inference_mode else torch.no_grad
        self._generators = [_generator(seed) for seed in seeds]
        self._finished: set[int] = set()
        self._rows: Rows | None = None if before is None else before._rows

    def finish(self, row: int) -> None:
        """Ends a row: it gets no further token."""
        self._finished.add(row)

    def __iter__(self) -> Iterator[Token]:
        """Yields tokens; the caller's code runs outside of inference mode."""
        if not self._max_new_tokens or not self._prompts:
            return
        with evaluating(self._network):
            with self._without_gradients():
                rows = Rows(self._network, self._prompts, self._max_new_tokens, self._cached, self._rows)
            self._rows = rows
            active = [row for row in range(len(self._generators)) if row not in self._finished]
            parents = [row // self._samples for row in active]
            with self._without_gradients():
                logits = rows.first()[torch.tensor(parents, device=next(self._network.parameters()).device)]
                seen = self._seen([self._prompts[parent] for parent in parents], logits)
            for count in range(1, self._max_new_tokens + 1):
                with self._without_gradients():
                    drawn = self._draw(active, logits, seen)
                for token in drawn:
                    if token.id in self._stop_ids:
                        self._finished.add(token.row)
                    elif token.row not in self._finished:
                        yield token
                kept = [index for index, row in enumerate(active) if row not in self._finished]
                if not kept or count == self._max_new_tokens:
                    return
                with self._without_gradients():
                    new = [drawn[index].id for index in kept]
                    logits = rows.step([parents[index] for index in kept], new)
                    if seen is not None:
                        seen = seen[kept] if len(kept) < len(active) else seen
                        seen[range(len(kept)), new] = True
                active, parents = [active[index] for index in kept], list(range(len(kept)))

    def _seen(self, texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor | None:
        if self._sampling.repetition_penalty == 1:
            return None
        return seen_tokens(texts, logits)

    def _draw(self, active: Sequence[int], logits: Tensor, seen: Tensor | None) -> list[Token]:
        raw, sampling = logits, self._sampling
        if seen is not None:
            logits = penalise_repetition(raw.float(), seen, sampling.repetition_penalty)
        if sampling.temperature == 0:
            best = logits.argmax(-1)
            finite(logits.gather(-1, best[:, None]))  # without a second pass over all logits
            ids = best.tolist()
        else:
            finite(logits)
            generators = [self._generators[row] for row in active]
            kept = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
            # a generator of the CPU draws there, and the filters are computed where it draws
            ids = draw(next_token_probabilities(logits.to(generators[0].device), *kept), generators)
        if not self._log_probabilities:
            return [Token(row, id) for row, id in zip(active, ids, strict=True)]
        logs = raw.float().log_softmax(-1)
        top = logs.topk(self._likeliest)
        others = [
            tuple(zip(*pair, strict=True))
            for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        own = logs[range(len(ids)), ids].tolist()
        return [Token(*one) for one in zip(active, ids, own, others, strict=True)]


def finite(logits: Tensor) -> Tensor:
    """Returns the logits.

    Raises:
        ConfigError: If a row has no largest one.
    """
    if not logits.amax(-1).isfinite().all():
        raise ConfigError("generate: the network's logits are not finite: have its weights diverged?")
    return logits


def seen_tokens(texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """Returns which tokens are in each of B texts, as booleans shaped as the logits (B, V)."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(texts):
        seen[row, torch.tensor(ids, device=seen.device)] = True
    return seen


def check_prompts(network: Network, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises a ConfigError for an empty prompt, a token that is not the network's, or less than no new tokens.

    Also for a network that declares that it sees later tokens (`bidirectional`): it continues no text.
    """
    size, declared = network.vocab_size, declaration_of(type(network))
    if declared is not None and "bidirectional" in declared.offers:
        raise ConfigError(
            f"generate: {type(network).__name__} sees the tokens that follow: it continues no text. A decoder such as GPT does."
        )
    if max_new_tokens < 0:
        raise ConfigError(f"generate: max_new_tokens={max_new_tokens} must be at least 0.")
    for ids in prompts:
        if not ids:
            raise ConfigError("generate: the prompt is empty: give at least one token.")
        if outside := [token for token in ids if not 0 <= token < size]:
            raise ConfigError(f"generate: prompt token {outside[0]} is not in the vocabulary ({size}).")


def _generator(seed: int | torch.Generator | None) -> torch.Generator:
    if isinstance(seed, torch.Generator):
        return seed
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
