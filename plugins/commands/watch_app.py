"""The page of `watch` and what it asks: which runs there are, their curves, their texts."""

from __future__ import annotations

import threading
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plugins.commands.local_page import HEADERS, Refused, new_token, page_app
from plugins.commands.watch_runs import Runs, WatchedRun


class Watching:
    """Answers the page's requests; nothing that it asks for changes anything.

    Args:
        runs: The runs.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.token = new_token()
        self._one_at_a_time = threading.Lock()

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        routes = [
            Route("/runs", self._summaries),
            Route("/figures", self._figures),
            Route("/texts", self._texts),
            Route("/picture", self._picture),
        ]
        return page_app("watch", self.token, routes)

    async def _summaries(self, request: Request) -> Response:
        return await self._answer(lambda: {"runs": [run.summary() for run in self.runs.all()]})

    async def _figures(self, request: Request) -> Response:
        run, groups = self._run(request), request.query_params.get("groups", "")[:10_000].split(",")
        return await self._answer(lambda: {"version": run.table.changes, "figures": run.figures(groups)})

    async def _texts(self, request: Request) -> Response:
        return await self._answer(self._run(request).texts)

    async def _picture(self, request: Request) -> Response:
        run, name = self._run(request), request.query_params.get("name", "")
        content = await self._alone(lambda: run.picture(name))
        if content is None:
            raise Refused(404, "There is no such picture: reload the page.")
        return Response(content, media_type="image/png", headers=HEADERS)

    def _run(self, request: Request) -> WatchedRun:
        number, runs = request.query_params.get("run", ""), self.runs.all()
        if not (number.isascii() and number.isdecimal() and len(number) < 6 and int(number) < len(runs)):
            raise Refused(404, "There is no such run: reload the page.")
        return runs[int(number)]

    async def _answer(self, read: Any) -> Response:
        return JSONResponse(await self._alone(read), headers=HEADERS)

    async def _alone(self, read: Any) -> Any:
        def alone() -> Any:
            with self._one_at_a_time:
                return read()

        return await run_in_threadpool(alone)
