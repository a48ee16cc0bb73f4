"""The command `chat`: a conversation with a trained checkpoint, in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, take_option, trusting
from plugins.commands.generate_options import (
    add_model_options,
    add_sampling_options,
    check_seed,
    sampling_faults,
)
from toolkit.generation.texts import printable

HELP = """/reset  forget the conversation
/exit   leave, as Ctrl-D does
/help   this
//...   a message that begins with a slash
Ctrl-C ends an answer; at the prompt it leaves."""


@technique(paper="chat templates in Jinja2 as transformers has them")
def chat(arguments: list[str]) -> int:
    """Talks with a checkpoint: one line is a message, the answer comes token by token.

    Messages become a text by the chat template that an import kept, or that of --template. Messages that no longer fit
    into the network's context are left out, the oldest first. Lines may come from a pipe; only answers are printed to
    standard output then.

    Example:
        python -m core chat --ckpt_path smollm2.ckpt --system "Answer in one sentence." --temperature 0.6
    """
    trusted, arguments = take_option(arguments)
    options = _options(arguments)
    from plugins.checkpoints.finding import resolve
    from plugins.commands.chat_prompts import require_template
    from plugins.commands.generate_network import prepare
    from toolkit.generation.single_rows import store_for_single_rows
    from toolkit.generation.texts import split_stops

    path = resolve(options.ckpt_path, Path(options.root))
    with trusting(Trust(trusted)):
        model = prepare(path, options)
    store_for_single_rows(model.network)
    template = require_template(model, options.template, path)
    stops, stop_ids = split_stops(model.tokenizer, options.stop)
    talk = Conversation(options, model, template, stops, [*stop_ids, *model.stop_ids])
    talk.reset()
    talk.ids()  # an unusable template is reported before the first message
    print(f"# {path}, seed {options.seed}; /help", file=sys.stderr)
    for message in _lines():
        _handle(talk, message)
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m core chat", description=chat.__doc__)
    add_model_options(parser)
    parser.add_argument(
        "--template", metavar="FILE", help="chat template in Jinja2; default: the checkpoint's"
    )
    parser.add_argument("--system", metavar="TEXT", help="the first message, of the role `system`")
    parser.add_argument(
        "--special_tokens",
        action="store_true",
        help="read special tokens such as <|im_end|> in messages; else they are text",
    )
    add_sampling_options(parser)
    options = parser.parse_args(arguments)
    check_seed(options.seed)
    if options.max_new_tokens < 1:
        raise ConfigError(f"--max_new_tokens {options.max_new_tokens} must be at least 1.")
    if problem := next(sampling_faults(options), None):
        raise ConfigError(problem)
    if options.temperature is None:
        options.temperature = 0.8
    from toolkit.generation.filters import Sampling

    filters = options.top_k, options.top_p, options.min_p, options.repetition_penalty
    options.sampling = Sampling(options.temperature, *filters)
    if wrong := options.sampling.fault():
        raise ConfigError(f"--{wrong}")
    return options


@dataclass
class Conversation:
    """The messages so far, and how answers are drawn."""

    options: argparse.Namespace
    model: Any
    template: Any
    stops: list[str]
    stop_ids: list[int]
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: int = 0
    last: Any = None

    def reset(self) -> None:
        """Forgets all but the system's message."""
        text = self.options.system
        self.messages = [{"role": "system", "content": text}] if text else []

    def ids(self) -> list[int]:
        """Returns the ids of the conversation, or of a greeting where there is none yet."""
        from plugins.commands.chat_prompts import encode_messages

        messages = self.messages
        if not any(one["role"] == "user" for one in messages):
            messages = [*messages, {"role": "user", "content": "Hello"}]
        return encode_messages(self.model, self.template, messages, self.options.special_tokens)

    def answer(self, message: str) -> Generator[str, None, None]:
        """Adds a message, and yields its answer piece by piece, which is a message then.

        Raises:
            ConfigError: If the template refuses the message, or it is too long.
        """
        from toolkit.generation.decoding import Decoding
        from toolkit.generation.texts import TextStream

        before = list(self.messages)
        self.messages.append({"role": "user", "content": message})
        try:
            ids, room = self._fitted()
        except BaseException:  # Ctrl-C, too: two messages of the user in a row are refused by many templates
            self.messages = before
            raise
        decoding = Decoding(
            self.model.network,
            [ids],
            max_new_tokens=room,
            sampling=self.options.sampling,
            seeds=[(self.options.seed + self.answers) % 2**64],
            stop_ids=self.stop_ids,
            before=self.last,  # most of the conversation is in its cache
        )
        self.last, self.answers = decoding, self.answers + 1
        stream = TextStream(self.model.tokenizer, ids[-8:], self.stops)
        try:
            for token in decoding:
                yield stream.add(token.id)
                if stream.stopped:
                    decoding.finish(token.row)
            yield stream.end()
        finally:
            self.messages.append({"role": "assistant", "content": stream.text})

    def _fitted(self) -> tuple[list[int], int]:
        """Returns the ids of what fits into the network's context, and how many tokens an answer may have."""
        window, most = self.model.network.max_sequence_length, self.options.max_new_tokens
        ids, left_out = self.ids(), 0
        while window and len(ids) + min(most, window // 2) > window:
            first = next((n for n, one in enumerate(self.messages[:-1]) if one["role"] != "system"), None)
            if first is None:
                raise ConfigError(
                    f"The message has {len(ids):,} tokens, the network sees {window:,} at most."
                )
            answered = self.messages[first + 1]["role"] == "assistant"
            del self.messages[first : first + 1 + answered]
            left_out += 1 + answered
            ids = self.ids()
        if left_out:
            print(f"# {left_out} messages no longer fit and are forgotten.", file=sys.stderr)
        return ids, min(most, window - len(ids)) if window else most


def _handle(talk: Conversation, message: str) -> None:
    """Prints the answer to a message, or does what a command says."""
    if message.startswith("/") and not message.startswith("//"):
        if message == "/reset":
            talk.reset()
        print(
            {"/reset": "# forgotten", "/help": HELP}.get(message, f"# no command: {message[:40]}; /help"),
            file=sys.stderr,
        )
        return
    answer = talk.answer(message.removeprefix("/"))
    try:
        for piece in answer:
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        answer.close()  # what came so far is the answer
        print(" [ended]", end="", file=sys.stderr)
    except ConfigError as error:
        if not sys.stdin.isatty():
            raise
        print(f"# {error}", file=sys.stderr)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _lines() -> Iterator[str]:
    """Yields what is typed, or the lines of a pipe, up to its end or `/exit`."""
    from rich.console import Console

    typed = sys.stdin.isatty()
    if not typed and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    console = Console(stderr=True, highlight=False)
    while True:
        try:
            if typed:
                console.print("[bold green]you>[/] ", end="")
            line = input() if typed else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        message = line.strip().encode("utf-8", "replace").decode()
        if message == "/exit":
            return
        if message:
            yield message
