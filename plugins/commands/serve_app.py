"""The endpoints of `serve`, as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from core.errors import ConfigError
from plugins.commands.generate_network import Loaded
from plugins.commands.serve_jobs import ClientGone, Event, Jobs, events
from plugins.commands.serve_requests import Limits, RequestError, Wanted, understood
from toolkit.bounded import parse_json
from toolkit.chat_template import ChatTemplate

MOST_BYTES = 4 << 20
"""Limit of a request's body."""

FOR_THE_LAST = 2.0
"""Seconds in which a client takes the error that its request took too long."""


class Server:
    """Answers requests with one model.

    Args:
        model: Network and tokenizer.
        name: What clients call it.
        template: Of chats; None: they are refused.
        limits: Of a request.
        jobs: Of all requests.
        special_tokens: Whether special tokens are read in the prompts of completions.
    """

    def __init__(
        self,
        model: Loaded,
        name: str,
        template: ChatTemplate | None,
        limits: Limits,
        jobs: Jobs,
        special_tokens: bool,
    ) -> None:
        self.model, self.name, self.template, self.jobs = model, name, template, jobs
        self._limits, self._special_tokens = limits, special_tokens
        self._created = int(time.time())

    def app(self, hosts: list[str]) -> Starlette:
        """Returns the ASGI application, which answers under these host names: a page of another site's name, in a
        browser on this machine, cannot reach it.
        """
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/completions", partial(self._generate, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._generate, chat=True), methods=["POST"]),
        ]
        handlers: Any = {HTTPException: _no_route}
        return Starlette(
            routes=routes,
            exception_handlers=handlers,
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        )

    def _described(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "leyden"}

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            return _refused(RequestError("The model does not exist.", "model", "model_not_found", 404))
        return JSONResponse(self._described())

    async def _generate(self, request: Request, chat: bool) -> Response:
        try:
            self.jobs.admit()
        except RequestError as error:
            return _refused(error)
        try:
            body = await _body(request, self.jobs.timeout)
            wanted = await asyncio.to_thread(
                understood,
                body,
                self.model,
                self.name,
                self.template,
                self._limits,
                self._special_tokens,
                chat,
            )
            answer = Answer(self.model, self.name, wanted, chat)
            found = self.jobs.run(partial(events, self.model, wanted), partial(_gone, request))
            if wanted.stream:
                stream = _streamed(found, answer, self.jobs.leave)
                first = await anext(stream)  # what fails before the first token has a status of its own
                return _Stream(_chained(first, stream), self.jobs.timeout + FOR_THE_LAST)
            async with aclosing(found):
                async for event in found:
                    answer.add(event)
            self.jobs.leave()
            return JSONResponse(answer.whole())
        except (ClientGone, ClientDisconnect):
            refusal = RequestError("The client is gone.", status=499)
        except asyncio.CancelledError:  # the server does not wait any longer for what still comes
            refusal = RequestError("The server is shutting down.", None, "server_busy", 503, "server_error")
        except Exception as other:
            refusal = _as_request_error(other)
        self.jobs.leave()
        return _refused(refusal)


async def _body(request: Request, seconds: float) -> Any:
    """Returns the JSON of a request.

    Its type has to be named: without asking, a browser sends what a page of another site says as any type but this one.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("The header Content-Type must be application/json.", status=415)
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise RequestError(f"The body has more than {MOST_BYTES >> 20} MiB.", status=413)
    except TimeoutError:
        text = f"The body did not come within {seconds:g} s."
        raise RequestError(text, None, "timeout", 408, "timeout_error") from None
    try:
        value = parse_json(bytes(content))
        json.dumps(value, ensure_ascii=False).encode()  # halves of surrogate pairs, which are no text
        return value
    except ValueError as error:
        raise RequestError(f"The body is no JSON: {str(error)[:200]}") from error


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """Server-sent events, which end where they take too long: a client that stops reading would hold its place.

    Args:
        pieces: Closed when it ends.
        seconds: The most that it may take.
    """

    def __init__(self, pieces: AsyncGenerator[str, None], seconds: float) -> None:
        super().__init__(pieces, media_type="text/event-stream")
        self._pieces, self._seconds = pieces, seconds

    async def stream_response(self, send: Send) -> None:
        """Sends them."""
        try:
            async with asyncio.timeout(self._seconds):
                await super().stream_response(send)
        except TimeoutError:
            print("# A client did not read its answer.", file=sys.stderr, flush=True)
            await self._pieces.aclose()


async def _chained(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


async def _streamed(
    found: AsyncGenerator[Event, None], answer: Answer, leave: Callable[[], None]
) -> AsyncGenerator[str, None]:
    """Yields the server-sent events of an answer; gives its place back at the end."""
    started = False
    try:
        async with aclosing(found):
            async for event in found:
                if not started:
                    started = True
                    for row in range(answer.rows):
                        yield _sent(answer.chunk(Event(row, ""), begins=True)) if answer.chat else ": \n\n"
                answer.add(event)
                yield _sent(answer.chunk(event))
        if answer.wanted.include_usage:
            yield _sent(answer.head() | {"choices": [], "usage": answer.usage()})
        yield "data: [DONE]\n\n"
    except (ClientGone, GeneratorExit):
        raise
    except Exception as error:
        if not started:
            raise
        yield _sent(_as_request_error(error).body)
    finally:
        if started:  # otherwise who waits for the first event gives it back
            leave()


def _sent(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, ConfigError):
        said = (str(error).splitlines() or [""])[0]
        print(f"# error: {type(error).__name__}: {said[:300]}", file=sys.stderr, flush=True)
    text = (
        str(error) if isinstance(error, ConfigError) else f"An error of the server: {type(error).__name__}."
    )
    return RequestError(text, None, None, 500, "server_error")


def _refused(error: RequestError) -> Response:
    headers = (
        {"x-should-retry": "false"}
        if error.status == 408
        else {"retry-after": "1"}
        if error.status == 429
        else {}
    )
    return JSONResponse(error.body, error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return _refused(
        RequestError(
            f"{request.method} {request.url.path[:100]} is not served here.", None, "not_found", status
        )
    )


class Answer:
    """The texts of a request, in the form of OpenAI's responses."""

    def __init__(self, model: Loaded, name: str, wanted: Wanted, chat: bool) -> None:
        self.wanted, self.chat, self.rows = wanted, chat, len(wanted.prompts) * wanted.samples
        self._tokenizer, self._name = model.tokenizer, name
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self._created = int(time.time())
        self._texts, self._reasons = [""] * self.rows, [""] * self.rows
        self._tokens: list[list[Any]] = [[] for _ in range(self.rows)]

    def add(self, event: Event) -> None:
        """Adds a piece of a text."""
        self._texts[event.row] += event.text
        if event.token is not None:
            self._tokens[event.row].append(event.token)
        self._reasons[event.row] = event.finish_reason or ""

    def head(self, chunk: bool = True) -> dict[str, Any]:
        """Returns what a response and each of its chunks begin with."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._name}

    def usage(self) -> dict[str, int]:
        """Returns the numbers of tokens."""
        read, written = sum(map(len, self.wanted.prompts)), sum(map(len, self._tokens))
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def whole(self) -> dict[str, Any]:
        """Returns the response."""
        choices = []
        for row, text in enumerate(self._texts):
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append(self._choice(row, content, self._tokens[row], self._reasons[row] or None))
        return self.head(chunk=False) | {"choices": choices, "usage": self.usage()}

    def chunk(self, event: Event, begins: bool = False) -> dict[str, Any]:
        """Returns the chunk of an event."""
        delta = {"content": event.text} if event.text or event.token else {}
        content: dict[str, Any] = {"delta": delta} if self.chat else {"text": event.text}
        if begins:
            content = {"delta": {"role": "assistant", "content": ""}}
        tokens = [] if event.token is None else [event.token]
        return self.head() | {"choices": [self._choice(event.row, content, tokens, event.finish_reason)]}

    def _choice(
        self, row: int, content: dict[str, Any], tokens: list[Any], reason: str | None
    ) -> dict[str, Any]:
        logs = self._logs(tokens) if self.wanted.log_probabilities and tokens else None
        return {"index": row, **content, "logprobs": logs, "finish_reason": reason}

    def _logs(self, tokens: list[Any]) -> dict[str, Any]:
        if self.chat:
            content = [
                self._log(one.id, one.log_probability)
                | {"top_logprobs": [self._log(*pair) for pair in one.likeliest]}
                for one in tokens
            ]
            return {"content": content, "refusal": None}
        spelt = [self._spelt(one.id) for one in tokens]
        return {
            "tokens": spelt,
            "token_logprobs": [one.log_probability for one in tokens],
            "top_logprobs": [{self._spelt(id): log for id, log in reversed(one.likeliest)} for one in tokens],
            "text_offset": [sum(map(len, spelt[:number])) for number in range(len(spelt))],
        }

    def _log(self, id: int, log: float) -> dict[str, Any]:
        text = self._spelt(id)
        known = "\N{REPLACEMENT CHARACTER}" not in text  # otherwise a part of a character
        return {"token": text, "logprob": log, "bytes": list(text.encode()) if known else None}

    def _spelt(self, id: int) -> str:
        return self._tokenizer.decode([id], skip_special_tokens=False)
