"""The command `serve`: a checkpoint behind OpenAI's endpoints."""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.technique import Package, technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, take_option, trusting
from plugins.commands.generate_options import add_model_options


@technique(
    paper="OpenAI's API: completions, chat completions, models",
    needs=[Package("starlette>=0.47"), Package("uvicorn>=0.35")],
)
def serve(arguments: list[str]) -> int:
    """Serves a checkpoint at /v1/completions, /v1/chat/completions and /v1/models, for clients of OpenAI's API.

    It listens on this machine alone unless --host says otherwise. It knows no keys: whoever reaches it can use it. Ctrl-C
    and SIGTERM end it with exit code 130 and 143; requests that run then get an error.

    Example:
        python -m core serve --ckpt_path smollm2.ckpt --port 8000
    """
    trusted, arguments = take_option(arguments)
    options = _options(arguments)
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"serve needs {' and '.join(missing)}: pip install 'leyden[serve]'")
    from plugins.checkpoints.finding import resolve
    from plugins.commands.chat_prompts import find_template
    from plugins.commands.generate_network import prepare
    from plugins.commands.serve_app import Server
    from plugins.commands.serve_jobs import Jobs
    from plugins.commands.serve_requests import Limits
    from toolkit.generation.single_rows import store_for_single_rows

    path = resolve(options.ckpt_path, Path(options.root))
    listening = _listen(options.host, options.port)
    with listening:
        with trusting(Trust(trusted)):
            model = prepare(path, options)
        if options.concurrency == 1:
            store_for_single_rows(model.network)
        template = find_template(model, options.template)
        jobs = Jobs(options.concurrency, options.waiting, options.timeout)
        limits = Limits(options.max_new_tokens, options.max_texts)
        server = Server(model, options.name or path.stem, template, limits, jobs, options.special_tokens)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        said = [f"# {path}, {'chat and completions' if template else 'completions; no chat template'}"]
        local = ipaddress.ip_address(host).is_loopback
        if not local:
            said.append("# Everybody who reaches this address can use it: it asks for no key.")
        said.append(f"# {server.name} at http://{shown}:{port}/v1")
        hosts = ["localhost", "127.0.0.1", "[::1]", options.host] if local else ["*"]
        return _run(server.app(hosts), jobs, listening, "\n".join(said))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m core serve", description=serve.__doc__)
    add_model_options(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of this machine"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--name", help="what clients call the model; default: the checkpoint's name")
    parser.add_argument(
        "--template", metavar="FILE", help="chat template in Jinja2; default: the checkpoint's"
    )
    parser.add_argument(
        "--special_tokens",
        action="store_true",
        help="read special tokens such as <|im_end|> in prompts of completions; else they are text",
    )
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="most tokens of a text")
    parser.add_argument("--max_texts", type=int, default=16, help="most texts of a request: prompts times n")
    parser.add_argument("--concurrency", type=int, default=1, help="requests that are computed at once")
    parser.add_argument(
        "--waiting", type=int, default=16, help="requests that may wait; others get the status 429"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a request may take")
    options = parser.parse_args(arguments)
    for name, least in (("max_new_tokens", 1), ("max_texts", 1), ("concurrency", 1), ("waiting", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)} must be at least {least}.")
    if not 0 < options.timeout < float("inf"):
        raise ConfigError(f"--timeout {options.timeout} must be above 0.")
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port} must be 0 to 65535.")
    return options


def _listen(host: str, port: int) -> socket.socket:
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
        raise ConfigError(f"--host {host[:80]} --port {port} cannot be listened on: {said}.") from error
    return found


def _run(app: Any, jobs: Any, listening: socket.socket, said: str) -> int:
    """Serves until a signal; returns the exit code.

    Args:
        app: The ASGI application.
        jobs: What computes answers.
        listening: The socket.
        said: What is printed once signals are handled and requests answered.
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
            jobs.stop()

    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
    )
    server = Stoppable(config)
    server.run(sockets=[listening])
    return 128 + server.ended_by if server.ended_by else 0
