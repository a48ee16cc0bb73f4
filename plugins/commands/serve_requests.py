"""Requests of OpenAI's completions and chat endpoints: what they may ask for, checked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import ConfigError, nearest
from plugins.commands.chat_prompts import encode_messages
from plugins.commands.generate_network import Loaded
from toolkit.chat_template import ChatTemplate
from toolkit.generation.filters import Sampling
from toolkit.generation.texts import split_stops

IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that change no text."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are taken with values that change nothing, or null."""

COMMON = {
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stream",
    "stream_options",
    "stop",
    "seed",
    "logprobs",
}
OWN = {"top_k", "min_p", "repetition_penalty"}
"""What `generate` has and OpenAI has not."""

KNOWN = {
    "prompt": COMMON | OWN | {"prompt", "best_of"},
    "messages": COMMON | OWN | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"},
}
ROLES = ("system", "developer", "user", "assistant", "tool")

MOST_TOKENS = 1 << 17
"""Limit of a prompt in tokens, where the network has no largest sequence: a body of 4 MiB would fill the memory."""


class RequestError(Exception):
    """A request that is refused.

    Args:
        message: For its author.
        param: The field at fault.
        code: A word for programs.
        status: Of HTTP.
        kind: The `type` of the error.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Limits:
    """The most that a request may ask for: tokens of a text, and texts."""

    max_new_tokens: int
    max_texts: int


@dataclass(frozen=True)
class Wanted:
    """What a request asks for; prompts are token ids, `stops` strings and `stop_ids` tokens that end a text."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampling: Sampling
    samples: int
    seed: int
    stops: Sequence[str]
    stop_ids: Sequence[int]
    log_probabilities: bool
    likeliest: int
    stream: bool
    include_usage: bool


def understood(
    body: Any,
    model: Loaded,
    name: str,
    template: ChatTemplate | None,
    limits: Limits,
    special_tokens: bool,
    chat: bool,
) -> Wanted:
    """Returns what the body of a request asks for.

    Raises:
        RequestError: If it cannot be had; says which field is at fault.
    """
    _check_fields(body, "messages" if chat else "prompt")
    if body.get("model") not in (None, name):
        raise RequestError(
            f"The model {str(body['model'])[:80]!r} does not exist: this is {name!r}.",
            "model",
            "model_not_found",
            404,
        )
    stream = _value(body, "stream", bool, False)
    samples = _value(body, "n", int, 1, 1)
    if body.get("best_of") not in (None, samples):
        raise RequestError("best_of must be n: texts are not chosen among more.", "best_of")
    try:
        count = 1 if chat else len(_given_prompts(body))
        if count * samples > limits.max_texts:
            text = f"{count * samples} texts are asked for; this server gives {limits.max_texts} at once."
            raise RequestError(text, "n")
        prompts = _messages(body, model, template) if chat else _prompts(body, model, special_tokens)
        stops, stop_ids = split_stops(model.tokenizer, _stops(body))
    except ConfigError as error:
        raise RequestError(str(error), "messages" if chat else None) from error
    likeliest = (
        _value(body, "top_logprobs", int, 0, 0, 20) if chat else _value(body, "logprobs", int, 0, 0, 5)
    )
    return Wanted(
        prompts=prompts,
        max_new_tokens=_length(body, model, prompts, limits, chat),
        sampling=_sampling(body),
        samples=samples,
        seed=_value(body, "seed", int, secrets.randbits(63), -(2**63), 2**63 - 1),
        stops=stops,
        stop_ids=[*stop_ids, *model.stop_ids],
        log_probabilities=_value(body, "logprobs", bool, False) if chat else body.get("logprobs") is not None,
        likeliest=likeliest,
        stream=stream,
        include_usage=_value(_value(body, "stream_options", dict, {}), "include_usage", bool, False),
    )


def _check_fields(body: Any, needed: str) -> None:
    if not isinstance(body, dict):
        raise RequestError("The body is no JSON object.")
    known = KNOWN[needed] | IGNORED | set(NEUTRAL)
    if unknown := next((key for key in body if key not in known), None):
        raise RequestError(
            f"Unrecognized request argument: {unknown[:80]}.{nearest(unknown, known)}", unknown[:80]
        )
    if body.get(needed) is None and needed == "messages":
        raise RequestError("Missing required parameter: 'messages'.", "messages")
    for key, allowed in NEUTRAL.items():
        if body.get(key) is not None and body[key] not in allowed:
            raise RequestError(f"{key} is not supported.", key, "unsupported_parameter")


def _value(
    body: Mapping[str, Any],
    key: str,
    kind: type,
    default: Any,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Returns a field's value, or the default for none; its type and range are checked."""
    value: Any = body.get(key)
    if value is None:
        return default
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 60 else float("inf")
    if type(value) is not kind:
        raise RequestError(f"{key} must be of the type {kind.__name__}, not {type(value).__name__}.", key)
    number: Any = value
    if (least is not None and not number >= least) or (most is not None and not number <= most):
        raise RequestError(
            f"{key} is {value}; it must be {'at least' if most is None else 'between'} {least}{'' if most is None else f' and {most}'}.",
            key,
        )
    return value


def _sampling(body: Mapping[str, Any]) -> Sampling:
    sampling = Sampling(
        _value(body, "temperature", float, 1.0),
        _value(body, "top_k", int, None),
        None if body.get("top_p") == 1 else _value(body, "top_p", float, None),
        _value(body, "min_p", float, None),
        _value(body, "repetition_penalty", float, 1.0),
    )
    if wrong := sampling.fault():
        raise RequestError(wrong, wrong.partition("=")[0])
    return sampling


def _stops(body: Mapping[str, Any]) -> list[str]:
    found = body.get("stop")
    found = [found] if isinstance(found, str) else found or []
    if not isinstance(found, list) or len(found) > 16 or not all(isinstance(one, str) for one in found):
        raise RequestError("stop must be a string, or up to 16 strings.", "stop")
    return found


def _given_prompts(body: Mapping[str, Any]) -> list[Any]:
    found = body.get("prompt")
    found = "" if found is None else found
    return found if isinstance(found, list) and found and type(found[0]) is not int else [found]


def _prompts(body: Mapping[str, Any], model: Loaded, special_tokens: bool) -> list[list[int]]:
    """Returns the ids of a string, strings, token ids, or lists of these."""
    prompts = many = _given_prompts(body)
    if all(isinstance(one, str) for one in many):
        prompts = model.encoder.encode_prompts(many, special_tokens)
    else:
        size = model.network.vocab_size
        for ids in prompts:
            if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < size for id in ids):
                raise RequestError(f"prompt must be text, or token ids below {size}.", "prompt")
    begin = [] if model.end is None else [model.end]
    if any(not ids for ids in prompts) and not begin:
        raise RequestError("The prompt is empty, and there is no token to begin a text with.", "prompt")
    return [ids or begin for ids in prompts]


def _messages(body: Mapping[str, Any], model: Loaded, template: ChatTemplate | None) -> list[list[int]]:
    if template is None:
        raise RequestError(
            "This model has no chat template: use /v1/completions, or serve with --template FILE.", "messages"
        )
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message.", "messages")
    further = _value(body, "chat_template_kwargs", dict, {})
    if odd := {"self", "messages", "tools", "add_generation_prompt", "documents"} & set(further):
        raise RequestError(f"chat_template_kwargs cannot set {min(odd)}.", "chat_template_kwargs")
    return [encode_messages(model, template, [_message(one) for one in messages], further=further)]


def _message(message: Any) -> dict[str, str]:
    """Returns role and text of a message, whose content may be in parts."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise RequestError(f"A message must be an object with a role: {', '.join(ROLES)}.", "messages")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if any(
        not isinstance(one, dict) or one.get("type") != "text" or not isinstance(one.get("text"), str)
        for one in parts
    ):
        raise RequestError("The content of a message must be text.", "messages")
    return {"role": role, "content": "".join(one["text"] for one in parts)}


def _length(
    body: Mapping[str, Any], model: Loaded, prompts: Sequence[Sequence[int]], limits: Limits, chat: bool
) -> int:
    """Returns how many tokens a text may have."""
    longest, most = max(map(len, prompts)), limits.max_new_tokens
    window = model.network.max_sequence_length or MOST_TOKENS + most
    room = min(most, window - longest)
    default = room if chat else min(room, 16)
    key = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    asked = _value(body, key, int, max(default, 1), 1)
    if longest + asked > window:
        raise RequestError(
            f"This model's maximum context length is {window} tokens; {longest + asked} are asked for ({longest} in the "
            f"prompt, {asked} in the completion).",
            "messages" if chat else "prompt",
            "context_length_exceeded",
        )
    if asked > most:
        raise RequestError(f"{key} is {asked}; this server gives {most} at most.", key)
    return asked
