"""A socket to listen on, and a server that signals end: what `serve`, `prefer` and `watch` have in common."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

from core.errors import ConfigError


def listen(host: str, port: int, option: str = "") -> socket.socket:
    """Returns a socket that listens.

    Args:
        host: Address or name.
        port: 0: any that is free.
        option: How a message names the host, such as "--host 127.0.0.1 "; empty where it cannot be chosen.

    Raises:
        ConfigError: If that is not possible.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port} must be 0 to 65535.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)
        except OSError:
            found.close()
            raise
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no address"
        raise ConfigError(f"{option}--port {port} cannot be listened on: {said}.") from error
    return found


def run(app: Any, listening: socket.socket, said: str, stop: Callable[[], None] = lambda: None) -> int:
    """Serves until a signal; returns the exit code.

    Args:
        app: The ASGI application.
        listening: The socket.
        said: What is printed once signals are handled and requests answered.
        stop: Ends what the application is doing; called at a signal.
    """
    import uvicorn

    class Stoppable(uvicorn.Server):
        ended_by = 0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            print(said, file=sys.stderr, flush=True)

        def handle_exit(self, sig: int, frame: Any) -> None:
            """Ends requests that run; the second signal does not wait for them."""
            self.force_exit = self.should_exit
            self.should_exit, self.ended_by = True, self.ended_by or sig
            stop()

    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
    )
    server = Stoppable(config)
    server.run(sockets=[listening])
    return 128 + server.ended_by if server.ended_by else 0
