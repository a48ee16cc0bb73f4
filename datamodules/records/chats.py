"""Conversations: found in records of common formats, rendered by a chat template, with what of them is trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from core.errors import ConfigError, nearest
from toolkit.chat_template import ChatTemplate
from toolkit.generation.prompts import PromptEncoder

Messages = list[dict[str, Any]]
Span = tuple[int, int]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The format of OpenAI's Chat Markup Language, as SmolLM2 and Qwen have it."""

FORMS = ("messages", "conversations", "prompt", "instruction")
"""The field that tells how a record is written."""

SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
            "tool": "tool", "function": "tool", "observation": "tool"}  # fmt: skip
"""Who speaks in a list of ShareGPT -> role."""

ALPACA = (
    "Below is an instruction that describes a task{0}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{1}\n\n{2}### Response:\n"
)
"""The prompt of Stanford Alpaca."""


class WrongRecord(Exception):
    """A record that cannot be used.

    Args:
        reason: One of few, to count by.
        details: What was found.
    """

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason, details)
        self.reason, self.details = reason, details


class Rendered(NamedTuple):
    """A text, where in it is what is trained on, and whether the tokens that begin and end a text stand around it."""

    text: str
    spans: list[Span]
    whole: bool = False


def field(record: Mapping[str, Any], name: str, kind: Any = str) -> Any:
    """Returns a field of a record.

    Raises:
        WrongRecord: If it is missing or of another type.
    """
    if record.get(name) is None:
        shown = ", ".join(map(repr, record))[:300] or "none"
        raise WrongRecord(
            f'the object has no field "{name}"', f"its fields: {shown}.{nearest(name, set(record))}"
        )
    if not isinstance(record[name], kind) or (kind is not bool and isinstance(record[name], bool)):
        names = {str: "a text", list: "a list", bool: "true or false", dict: "an object"}
        raise WrongRecord(
            f'the field "{name}" is not {names.get(kind, "a number")}', f"it is {_shown(record[name])}"
        )
    return record[name]


def form_of(record: Mapping[str, Any], forms: Sequence[str] = FORMS) -> str:
    """Returns which of the fields that tell the format a record has.

    Raises:
        WrongRecord: If it has none of them.
    """
    found = next((form for form in forms if record.get(form) is not None), None)
    if found is None:
        close = next(filter(None, (nearest(name, set(forms)) for name in record)), "")
        fields = ", ".join(map(repr, record))[:300] or "none"
        raise WrongRecord(
            f"the object has none of the fields {', '.join(forms)}", f"its fields: {fields}.{close}"
        )
    return found


def messages_of(record: Mapping[str, Any]) -> Messages:
    """Returns the messages of a record: a prompt and its answer as two.

    Raises:
        WrongRecord: If it is in none of the formats.
    """
    form = form_of(record)
    if form == "messages":
        return checked_messages(record, form)
    if form == "conversations":
        return [_sharegpt(one) for one in field(record, form, list)]
    if form == "instruction":
        given = record.get("input")
        more = f"\n\n{field(record, 'input')}" if given else ""
        return [_message("user", field(record, form) + more), _message("assistant", field(record, "output"))]
    return [*side_of(record, "prompt", "user"), *side_of(record, "completion", "assistant")]


def check_answers(messages: Messages, roles: Sequence[str]) -> None:
    """Raises a WrongRecord if a message of these roles says nothing: a network would learn to answer so."""
    for number, message in enumerate(messages, start=1):
        said = (value for key, value in message.items() if key != "role")
        if message["role"] in roles and not any(v.strip() if isinstance(v, str) else v for v in said):
            raise WrongRecord("an answer is empty", f"message {number}, of {message['role']}, has no text")


def side_of(record: Mapping[str, Any], name: str, role: str) -> Messages:
    """Returns the messages of a field that holds messages, or a text by this role."""
    if isinstance(record.get(name), list):
        return checked_messages(record, name)
    return [_message(role, field(record, name))]


def checked_messages(record: Mapping[str, Any], name: str) -> Messages:
    """Returns the messages of a field; fields that are null, as Parquet has them, are left out.

    Raises:
        WrongRecord: If one is no message.
    """
    found = []
    for message in field(record, name, list):
        if not isinstance(message, dict):
            raise WrongRecord("a message is not an object", f"it is {_shown(message)}")
        message = {key: value for key, value in message.items() if value is not None}
        field(message, "role")
        if not message.get("tool_calls"):
            field(message, "content")
        found.append(message)
    if not found:
        raise WrongRecord(f'the field "{name}" is empty')
    return found


def _sharegpt(one: Any) -> dict[str, Any]:
    if not isinstance(one, dict):
        raise WrongRecord("a message is not an object", f"it is {_shown(one)}")
    who = field(one, "from")
    if who not in SHAREGPT:
        raise WrongRecord(
            "an unknown speaker", f"{who!r}; known are {', '.join(SHAREGPT)}.{nearest(who, set(SHAREGPT))}"
        )
    return _message(SHAREGPT[who], field(one, "value"))


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _shown(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False, default=str)[:80]} ({type(value).__name__})"


def plain_sides(record: Mapping[str, Any]) -> tuple[str, str]:
    """Returns prompt and answer of a record as texts, for networks without a chat template.

    Raises:
        WrongRecord: If it is a conversation.
    """
    form = form_of(record)
    if form == "prompt":
        return field(record, form), field(record, "completion")
    if form == "instruction":
        given = field(record, "input") if record.get("input") else ""
        further = ", paired with an input that provides further context" if given else ""
        more = f"### Input:\n{given}\n\n" if given else ""
        return ALPACA.format(further, field(record, form), more), field(record, "output")
    raise WrongRecord(
        "a conversation needs a chat template",
        "template: plain takes prompt and completion, or instruction and output",
    )


def plain(encoder: PromptEncoder, prompt: str, answer: str) -> Rendered:
    """Returns a prompt with its answer, without a template; special tokens spelt in them are marked as text."""
    prompt, answer = encoder.as_text(prompt), encoder.as_text(answer)
    return Rendered(prompt + answer, [(len(prompt), len(prompt) + len(answer))], whole=True)


def tools_of(record: Mapping[str, Any]) -> Any:
    """Returns the schemas of the functions that a record lets the network call; some data sets have them as text."""
    tools = record.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools else None
    except (ValueError, RecursionError) as error:
        raise WrongRecord('the field "tools" is no JSON', str(error)) from error


class Renderer:
    """Renders conversations.

    Args:
        template: Of the conversations.
        encoder: Says which texts are special tokens.
        roles: Whose messages are trained on.
        last_only: Whether the last message alone is.
    """

    def __init__(
        self, template: ChatTemplate, encoder: PromptEncoder, roles: Sequence[str], last_only: bool
    ) -> None:
        self.template, self.encoder = template, encoder
        self.roles, self.last_only = tuple(roles), last_only
        special = sorted(encoder.special, key=len, reverse=True)
        self._end = re.compile(f"(?:{'|'.join(map(re.escape, special)) or '(?!)'})+(\\s*)\\Z")
        self.by_blocks = template.marks_answers and self.roles == ("assistant",)

    def render(self, messages: Messages, tools: Any = None, first: int = 0) -> Rendered:
        """Returns the text of messages, with special tokens spelt in them marked as text, and the spans trained on.

        Args:
            messages: The conversation.
            tools: JSON schemas of functions; None: none.
            first: Number of the first message that may be trained on.

        Raises:
            WrongRecord: If the template refuses them, or does not show where a message is.
        """
        given: Any = self.encoder.as_text(messages)
        further = {"tools": self.encoder.as_text(tools)} if tools else {}
        try:
            if self.by_blocks:
                text, spans = self.template.render_answers(given, **further)
                if first:
                    least = len(self.template.render(given[:first], add_generation_prompt=False, **further))
                    spans = [span for span in spans if span[0] >= least]
                return Rendered(text, spans[-1:] if self.last_only else spans)
            return self._compared(given, first, further)
        except ConfigError as error:
            raise WrongRecord("the chat template refuses these messages", str(error)) from error

    def _compared(self, messages: Messages, first: int, further: dict[str, Any]) -> Rendered:
        text = self.template.render(messages, add_generation_prompt=False, **further)
        last = len(messages) - 1
        least = last if self.last_only else first
        trained = [n for n, one in enumerate(messages) if one["role"] in self.roles and n >= least]
        return Rendered(text, [self._span(text, messages, number, further) for number in trained])

    def _span(self, text: str, messages: Messages, number: int, further: dict[str, Any]) -> Span:
        """Returns where a message is: behind what the messages before it and the generation prompt make."""
        end = len(text)
        if number < len(messages) - 1:
            until = self.template.render(messages[: number + 1], add_generation_prompt=False, **further)
            if not text.startswith(until):
                raise WrongRecord(
                    "the chat template changes earlier turns",
                    "train on the last turn alone: data.last_turn_only=true",
                )
            end = len(until)
        begin = self._begin(text, end, messages, number, further)
        if ending := self._end.search(text, begin, end):  # what follows the end of the turn is not generated
            end = ending.start(1)
        return begin, end

    def _begin(self, text: str, end: int, messages: Messages, number: int, further: dict[str, Any]) -> int:
        message, before = messages[number], messages[:number]
        if message["role"] == "assistant" and before:
            prompt = self.template.render(before, add_generation_prompt=True, **further)
            if text.startswith(prompt) and len(prompt) <= end:
                return len(prompt)
        least = len(self.template.render(before, add_generation_prompt=False, **further)) if before else 0
        content = str(message.get("content", "")).strip()
        ending = self._end.search(text, least, end)
        found = text.rfind(content, least, ending.start() if ending else end) if content else -1
        if found < 0:
            raise WrongRecord("the chat template does not show a message as it is", content[:80])
        return found


def check_special_tokens(template: ChatTemplate, encoder: PromptEncoder) -> None:
    """Raises a ConfigError if the special tokens of ChatML, which a template has, are none of the tokenizer's."""
    missing = [
        one for one in ("<|im_start|>", "<|im_end|>") if one in template.source and one not in encoder.special
    ]
    if missing:
        raise ConfigError(
            f"The chat template has {missing[0]}, which is no special token of the tokenizer.\nTake another template "
            f"(data.template), or give a tokenizer that is trained special_tokens={['<|im_start|>', '<|im_end|>']}."
        )


def renderer_of(
    template: ChatTemplate, encoder: PromptEncoder, roles: Sequence[str], last_only: bool
) -> Renderer:
    """Returns what renders conversations.

    Raises:
        ConfigError: As :func:`check_special_tokens`.
    """
    check_special_tokens(template, encoder)
    return Renderer(template, encoder, roles, last_only)


def texts_of(record: Mapping[str, Any]) -> Iterator[str]:
    """Yields all texts in a record, in its order, for training a tokenizer."""
    for value in record.values() if isinstance(record, Mapping) else record:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list):
            yield from texts_of(value)  # type: ignore[arg-type]
