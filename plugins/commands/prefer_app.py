"""The page of `prefer` and what it asks: the next two answers, and what was chosen."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from core import durable
from plugins.commands.prefer_tasks import SKIP, TIE, UNDONE, Task
from plugins.commands.prefer_votes import Votes
from toolkit.bounded import parse_json

FOLDER = Path(__file__).parent / "templates" / "prefer"
FILES = {"": ("page.html", "text/html"), "page.js": ("page.js", "text/javascript"), "page.css": ("page.css", "text/css")}  # fmt: skip
"""Path below the token -> file of the page and its type."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Of each answer. Answers of networks are untrusted: the page may load and run its own files alone, and sets texts as text."""

MOST_BYTES = 1 << 12
"""Limit of a request's body."""


class Refused(Exception):
    """A request that is refused; holds the status and the reason."""


class Comparison:
    """Answers the page's requests.

    Args:
        tasks: In the order in which they are shown.
        votes: Where choices are stored.
        seed: Of the sides.
    """

    def __init__(self, tasks: Sequence[Task], votes: Votes, seed: int) -> None:
        self.tasks = {task.id: task for task in tasks}
        self.votes, self.seed = votes, seed
        self.token = secrets.token_urlsafe(24)

    def app(self) -> Starlette:
        """Returns the ASGI application.

        All is below a path that is secret: no page of another site, and no other user of this machine, can guess it.
        """
        start = f"/{self.token}"
        routes = [Route(f"{start}/{path}", _file(*file)) for path, file in FILES.items()]
        routes += [
            Route(f"{start}/task", self._task),
            Route(f"{start}/choice", self._choice, methods=["POST"]),
            Route(f"{start}/undo", self._undo, methods=["POST"]),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1"])
        handlers: Any = {Refused: _refused, 404: _nothing, 405: _nothing}
        return Starlette(routes=routes, middleware=[hosts], exception_handlers=handlers)

    def state(self) -> dict[str, Any]:
        """Returns the next task as the page sees it, without names of models, and how many are done."""
        left = [task for task in self.tasks.values() if task.id not in self.votes.last]
        state = {"total": len(self.tasks), "done": len(self.tasks) - len(left), "undo": bool(self._done())}
        if not left:
            return state
        task = left[0]
        side = task.left(self.seed)
        shown = {"task": task.id, "prompt": task.prompt}
        return state | shown | {"left": task.answers[side], "right": task.answers[1 - side]}

    def _done(self) -> list[str]:
        return [id for id in self.votes.last if id in self.tasks]

    async def _task(self, request: Request) -> Response:
        return JSONResponse(self.state(), headers=HEADERS)

    async def _choice(self, request: Request) -> Response:
        body = await _body(request)
        task, choice = self.tasks.get(body.get("task", "")), body.get("choice")
        if task is None:
            raise Refused(404, "There is no such task: reload the page.")
        side = task.left(self.seed)
        named = {"left": task.models[side], "right": task.models[1 - side], TIE: TIE, SKIP: SKIP}
        if choice not in named:
            raise Refused(400, f"The choice is one of {', '.join(named)}.")
        return await self._store(task, named[choice])

    async def _undo(self, request: Request) -> Response:
        await _body(request)
        if not (done := self._done()):
            raise Refused(409, "There is nothing to undo.")
        task = self.tasks.pop(done[-1])
        self.tasks = {task.id: task} | self.tasks  # it is shown next
        return await self._store(task, UNDONE)

    async def _store(self, task: Task, choice: str) -> Response:
        try:
            await run_in_threadpool(self.votes.add, task, choice, task.models[task.left(self.seed)])
        except OSError as error:
            reason = f"The choice could not be stored: {durable.write_error(error)}."
            print(f"# {reason}", file=sys.stderr, flush=True)
            raise Refused(507, reason) from error
        return JSONResponse(self.state(), headers=HEADERS)


def _file(name: str, kind: str) -> Any:
    content = (FOLDER / f"{name}.template").read_text(encoding="utf-8")

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return answer


async def _body(request: Request) -> Mapping[str, Any]:
    """Returns the JSON object of a request; its type has to be named, which pages of other sites may not without asking."""
    if request.headers.get("content-type") != "application/json":
        raise Refused(415, "The header Content-Type must be application/json.")
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MOST_BYTES:
            raise Refused(413, "The body is too large.")
    try:
        value = parse_json(bytes(content))
    except ValueError as error:
        raise Refused(400, f"The body is no JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise Refused(400, "The body is no object of texts.")
    return value


async def _refused(request: Request, error: Exception) -> Response:
    status, reason = error.args
    return JSONResponse({"error": reason}, status, HEADERS)


async def _nothing(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "Nothing is here."}, getattr(error, "status_code", 404), HEADERS)
