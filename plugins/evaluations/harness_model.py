"""Answers the requests of lm-eval with a network, as lm-eval's own HFLM does with an exported one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import ConfigError
from toolkit.continuations import WINDOW, Continuation, encode_pair, score
from toolkit.evaluation import EvaluatedModel
from toolkit.generation.filters import Sampling

MOST_NEW_TOKENS = 256
"""The most tokens of a text whose task does not say it, as in HFLM."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = {"until", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", *_LENGTHS}


class HarnessModel:
    """Has the three methods of `lm_eval.api.model.LM` that answer requests, for the arguments of each.

    Texts are encoded as HFLM does: the tokenizer's own special tokens in front, unless the text begins with such a token
    already, and special tokens that a text spells are read as such.

    Args:
        model: The network, and its tokenizer.

    Raises:
        ConfigError: If the tokenizer has no token to begin a text with.
    """

    def __init__(self, model: EvaluatedModel) -> None:
        if not model.beginning:
            raise ConfigError("LMEvalHarness: the tokenizer has no token that begins or ends a text.")
        self._model, self._prefix = model, model.beginning[0]
        self.window = model.network.max_sequence_length or WINDOW
        self._begin = model.tokenizer.decode([self._prefix], skip_special_tokens=False)

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation behind its context, and whether it is the greedy one."""
        found = score(self._model, [self._pair(*request) for request in requests])
        return [(one.log_probability, one.greedy) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[tuple[str]]) -> list[float]:
        """Returns the log-probability of each whole text."""
        rows = [Continuation([self._prefix], self._encode(text)) for (text,) in requests]
        return [one.log_probability for one in score(self._model, rows)]

    def generate_until(
        self, requests: Sequence[tuple[str, Mapping[str, Any]]], seeds: Sequence[int]
    ) -> list[str]:
        """Returns a continuation of each context, up to the first of its stop strings.

        Args:
            requests: Context, and how it is continued: `until`, `max_gen_toks`, `do_sample`, `temperature` and so on.
            seeds: Of each request.
        """
        found = [""] * len(requests)
        kinds: dict[tuple[str, int], list[int]] = {}
        for number, ((_, given), seed) in enumerate(zip(requests, seeds, strict=True)):
            kinds.setdefault((repr(sorted(given.items())), seed), []).append(number)
        for (_, seed), numbers in kinds.items():
            options = _Options(requests[numbers[0]][1], self.window)
            prompts = [
                self._encode(requests[number][0])[-(self.window - options.length) :] for number in numbers
            ]
            continued = self._model.generate(
                [prompt or [self._prefix] for prompt in prompts],
                max_new_tokens=options.length,
                sampling=options.sampling,
                seed=seed,
                stops=options.stops,
            )
            for number, [one] in zip(numbers, continued, strict=True):
                found[number] = self._text(one.ids, options.stops)
        return found

    def _text(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        """Returns the text of ids, decoded without what is before them, as HFLM does, up to the first stop string."""
        text = self._model.tokenizer.decode(ids, skip_special_tokens=True)
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        return text[: min(places, default=len(text))]

    def _pair(self, context: str, continuation: str) -> Continuation:
        """Returns the ids of both; behind no context, those of the continuation alone."""
        if context == "":
            ids = self._encode(continuation, leading=False)
            return Continuation([self._prefix], ids[1:] if ids[:1] == [self._prefix] else ids)
        return encode_pair(self._encode, context, continuation, [self._prefix])

    def _encode(self, text: str, leading: bool = True) -> list[int]:
        return self._model.encoder.encode(text, leading and not text.startswith(self._begin))


class _Options:
    """How a text is continued.

    Args:
        given: As a task says it.
        window: Tokens that the network sees at once.

    Raises:
        ConfigError: If an option is not known, or leaves no room for a prompt.
    """

    def __init__(self, given: Mapping[str, Any], window: int) -> None:
        if other := sorted(set(given) - _KNOWN):
            raise ConfigError(
                f"LMEvalHarness: generation_kwargs of a task has {other[0]!r}, which is not known."
            )
        lengths = [given[name] for name in _LENGTHS if given.get(name) is not None]
        self.length = int(lengths[0]) if lengths else MOST_NEW_TOKENS
        if not 0 < self.length < window:
            raise ConfigError(
                f"LMEvalHarness: a task generates {self.length} tokens, and the network sees {window} at once: there is no "
                "room for its prompts. Lower max_gen_toks of its generation_kwargs."
            )
        until = given.get("until") or []
        self.stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        temperature = float(given.get("temperature") or 0.0)
        if given.get("do_sample") and not temperature:
            temperature = 1.0
        filters = {name: given.get(name) for name in ("top_k", "top_p", "min_p")} if temperature else {}
        penalty = float(given.get("repetition_penalty") or 1.0)
        sampled = given.get("do_sample", temperature > 0)
        self.sampling = Sampling(temperature if sampled else 0.0, **filters, repetition_penalty=penalty)
        if wrong := self.sampling.fault():
            raise ConfigError(f"LMEvalHarness: generation_kwargs of a task: {wrong}")
