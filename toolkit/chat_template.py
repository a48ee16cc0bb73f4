"""Chat templates: messages to the text that a network was trained on, by a template in Jinja2.

The text is that of `apply_chat_template` of transformers. A template comes with weights from anywhere: it runs in a sandbox,
and sees plain JSON values alone, for a limited time.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from core.errors import ConfigError

__all__ = [
    "CONFIG",
    "FILES",
    "TEMPLATE",
    "ChatTemplate",
    "EndsAnswers",
    "HasTemplate",
    "special_tokens",
    "stored_template",
]

FILES = TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""Where a Hugging Face folder has its template."""

MOST_SECONDS = 10.0
"""Time limit of rendering one conversation."""

LARGEST = 1 << 20
"""Largest result of a product: a number, or characters of a repeated text."""

OPEN, CLOSE = "\ufdd1", "\ufdd2"
"""Noncharacters of Unicode, for internal use, around what a block `generation` holds."""

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@runtime_checkable
class HasTemplate(Protocol):
    """A data module of conversations.

    Attributes:
        template: Renders them; None: texts follow each other without one.
    """

    template: ChatTemplate | None


@runtime_checkable
class EndsAnswers(HasTemplate, Protocol):
    """A data module of conversations that knows what ends an answer, after `setup`.

    Attributes:
        stop_ids: The ids of such tokens.
    """

    stop_ids: Sequence[int]


class ChatTemplate:
    r"""Renders messages.

    Args:
        source: The template.
        special: Names of special tokens that templates use, such as `bos_token`, and their spelling.

    Raises:
        ConfigError: If the source is no template.

    Example:
        template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}", {})
        template.render([{"role": "user", "content": "Hello"}])
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self.source, self.special = source, dict(special)
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._generation: Any = environment.extensions[_Generation.identifier]
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(f"The chat template{line}: {_short(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **further: Any,
    ) -> str:
        """Returns the text of a conversation.

        Args:
            messages: Each with `role` and `content`; plain JSON values.
            add_generation_prompt: Whether the text ends where an answer begins.
            tools: JSON schemas of functions that the network may call; None: none.
            further: What else a template asks for, such as `enable_thinking`.

        Raises:
            ConfigError: If the template refuses the messages, or takes longer than `MOST_SECONDS`.
        """
        try:
            with _time_limit(MOST_SECONDS):
                return self._template.render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **{**self.special, **further},
                )
        except _TooLongError as error:
            raise ConfigError(
                f"The chat template takes longer than {MOST_SECONDS:g} s for these messages."
            ) from error
        except Exception as error:  # a template is a program: it may raise anything
            raise ConfigError(f"The chat template refuses these messages: {_short(error)}") from error

    @property
    def marks_answers(self) -> bool:
        """Whether the template says by blocks `generation` what of a conversation is trained on."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def render_answers(
        self, messages: Sequence[Mapping[str, Any]], **further: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and where each block `generation` begins and ends in it.

        Args:
            messages: As for :meth:`render`.
            further: As for :meth:`render`.

        Raises:
            ConfigError: If the template refuses the messages, or blocks lie in each other.
        """
        self._generation.marking = True
        try:
            marked = self.render(messages, add_generation_prompt=False, **further)
        finally:
            self._generation.marking = False
        text, spans = "", list[tuple[int, int]]()
        for piece in re.split(f"({OPEN}[^{OPEN}{CLOSE}]*{CLOSE})", marked):
            inside = piece[1:-1] if piece[:1] == OPEN else piece
            if inside != piece:
                spans.append((len(text), len(text) + len(inside)))
            text += inside
        if OPEN in text or CLOSE in text:
            raise ConfigError("The chat template has a block `generation` inside of another.")
        return text, spans


def stored_template(files: Mapping[str, str]) -> ChatTemplate | None:
    """Returns the template of a Hugging Face folder, or None if it has none.

    Args:
        files: File name -> text, of :data:`FILES` those that are there.

    Raises:
        ConfigError: If it is damaged.
    """
    try:
        config = json.loads(files.get(CONFIG, "{}"))
    except ValueError as error:
        raise ConfigError(f"{CONFIG} is no JSON: {_short(error)}") from error
    config = config if isinstance(config, dict) else {}
    found = files[TEMPLATE] if TEMPLATE in files else config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return ChatTemplate(found, special_tokens(config)) if isinstance(found, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns role and spelling of the special tokens that a tokenizer_config.json names."""
    found = {role: config.get(role) for role in ROLES}
    spelt = {role: one.get("content") if isinstance(one, dict) else one for role, one in found.items()}
    return {role: one for role, one in spelt.items() if isinstance(one, str)}


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own filter would escape characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Sandbox(ImmutableSandboxedEnvironment):
    """Computes no product or power that would take all time or memory in a single step, which no limit could interrupt."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Returns left * right or left ** right."""
        one, other = (
            len(value) if isinstance(value, Sized) else abs(value) if isinstance(value, int | float) else 0
            for value in (left, right)
        )
        if max(one, other) > 64 if operator == "**" else one * other > LARGEST:
            raise jinja2.exceptions.SecurityError(f"a result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class _TooLongError(BaseException):
    """No Exception: what a template calls may catch those."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises a _TooLongError in the body, at the next line of Python in this thread, when its time is over."""
    end, before = time.monotonic() + seconds, sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise _TooLongError
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class _Generation(Extension):
    """The block `generation`, which marks answers for training; it changes no text."""

    tags = {"generation"}
    marking = False

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}" if self.marking else caller()


class _Dict:
    """`dict` without the attributes of the class."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _Namespace(Namespace):
    """A namespace without attributes that begin with an underscore, which lead to the interpreter."""

    def __init__(*given: Any, **named: Any) -> None:
        own, values = given[0], dict(*given[1:], **named)
        for name in values:
            _check(name)
        Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name such as {name[:40]!r}")
