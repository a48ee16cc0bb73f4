"""The page of `prefer` and what it asks: the next two answers, and what was chosen."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from core import durable
from plugins.commands.local_page import HEADERS, Refused, new_token, page_app
from plugins.commands.prefer_tasks import SKIP, TIE, UNDONE, Task
from plugins.commands.prefer_votes import Votes
from toolkit.bounded import parse_json

MOST_BYTES = 1 << 12
"""Limit of a request's body."""


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
        self.token = new_token()

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        routes = [
            Route("/task", self._task),
            Route("/choice", self._choice, methods=["POST"]),
            Route("/undo", self._undo, methods=["POST"]),
        ]
        return page_app("prefer", self.token, routes)

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
