"""The queue of requests: each generates in a thread, and stops when its client has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from plugins.commands.generate_network import Loaded
from plugins.commands.serve_requests import RequestError, Wanted
from toolkit.generation.decoding import Decoding, Token
from toolkit.generation.texts import TextStream


class Event(NamedTuple):
    """A piece of a text: what a token completes, or the rest at its end.

    Attributes:
        row: Of which text.
        text: May be empty.
        token: None at the end.
        finish_reason: `stop` or `length`, at the end.
    """

    row: int
    text: str
    token: Token | None = None
    finish_reason: str | None = None


def events(model: Loaded, wanted: Wanted, cancelled: threading.Event) -> Iterator[Event]:
    """Yields the pieces of all texts, and at the end how each ended."""
    rows = len(wanted.prompts) * wanted.samples
    decoding = Decoding(
        model.network,
        wanted.prompts,
        max_new_tokens=wanted.max_new_tokens,
        sampling=wanted.sampling,
        seeds=[(wanted.seed + row) % 2**64 for row in range(rows)],
        samples=wanted.samples,
        stop_ids=wanted.stop_ids,
        log_probabilities=wanted.log_probabilities,
        likeliest=wanted.likeliest,
    )
    before = [wanted.prompts[row // wanted.samples][-8:] for row in range(rows)]
    streams = [TextStream(model.tokenizer, ids, wanted.stops) for ids in before]
    counts = [0] * rows
    for token in decoding:
        if cancelled.is_set():
            return
        stream = streams[token.row]
        yield Event(token.row, stream.add(token.id), token)
        counts[token.row] += 1
        if stream.stopped:
            decoding.finish(token.row)
    for row, stream in enumerate(streams):
        rest = stream.end()
        whole = counts[row] == wanted.max_new_tokens and not stream.stopped
        yield Event(row, rest, None, "length" if whole else "stop")


class Jobs:
    """Runs so many requests at once, lets so many wait, and refuses others.

    Args:
        running: Requests that generate at once.
        waiting: Requests that may wait for their turn.
        timeout: Seconds that a request may take, waiting included.
    """

    def __init__(self, running: int, waiting: int, timeout: float) -> None:
        self.most, self.timeout, self.count, self.stopping = running + waiting, timeout, 0, False
        self._threads = ThreadPoolExecutor(running, thread_name_prefix="generate")
        self._open: set[threading.Event] = set()

    def admit(self) -> None:
        """Takes a place for a request, which `leave` gives back.

        Raises:
            RequestError: If there is none.
        """
        if self.stopping or self.count >= self.most:
            text = (
                "The server is shutting down."
                if self.stopping
                else "Too many requests wait already: try again later."
            )
            status, kind = (503, "server_error") if self.stopping else (429, "rate_limit_error")
            raise RequestError(text, None, "server_busy", status, kind)
        self.count += 1

    def leave(self) -> None:
        """Gives a place back."""
        self.count -= 1

    def stop(self) -> None:
        """Ends all requests."""
        self.stopping = True
        for cancelled in list(self._open):
            cancelled.set()

    async def run(
        self, work: Callable[[threading.Event], Iterator[Event]], gone: Callable[[], Any]
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of work in a thread; ends it when the client is gone or this is closed.

        Args:
            work: Called in a thread, with what says that it is to end.
            gone: A coroutine function that returns when the client is gone.

        Raises:
            RequestError: If it takes too long or the server ends.
            Exception: What the work raises.
        """
        loop, queue, cancelled = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()
        self._open.add(cancelled)
        watch = asyncio.ensure_future(gone())
        future = loop.run_in_executor(self._threads, _pump, work, cancelled, loop, queue)
        deadline = loop.time() + self.timeout
        try:
            while True:
                item = asyncio.ensure_future(queue.get())
                done, _ = await asyncio.wait(
                    {item, watch},
                    timeout=max(0.0, deadline - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if item not in done:
                    item.cancel()
                    if watch in done:
                        raise ClientGone
                    raise RequestError(
                        f"The request took longer than {self.timeout:g} s.",
                        None,
                        "timeout",
                        408,
                        "timeout_error",
                    )
                found = item.result()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    if self.stopping and cancelled.is_set():
                        raise RequestError(
                            "The server is shutting down.", None, "server_busy", 503, "server_error"
                        )
                    return
                yield found
        finally:
            cancelled.set()
            future.cancel()  # where it waits for a thread
            watch.cancel()
            self._open.discard(cancelled)


class ClientGone(Exception):
    """The client has left before its answer was complete."""


def _pump(
    work: Callable[[threading.Event], Iterator[Event]],
    cancelled: threading.Event,
    loop: asyncio.AbstractEventLoop,
    queue: asyncio.Queue[Any],
) -> None:
    """Puts the events of work into a queue, then its error, or None."""
    last: Exception | None = None
    try:
        for event in () if cancelled.is_set() else work(cancelled):
            loop.call_soon_threadsafe(queue.put_nowait, event)
    except Exception as error:
        last = error
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, last)
