"""The command `serve`: a checkpoint behind OpenAI's endpoints."""

from __future__ import annotations

import argparse
import ipaddress
from pathlib import Path

from core.errors import ConfigError
from core.technique import Package, technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, take_option, trusting
from plugins.commands.generate_options import add_model_options
from plugins.commands.local_page import require_packages
from plugins.commands.serve_socket import listen, run


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
    require_packages("serve")
    from plugins.checkpoints.finding import resolve
    from plugins.commands.chat_prompts import find_template
    from plugins.commands.generate_network import prepare
    from plugins.commands.serve_app import Server
    from plugins.commands.serve_jobs import Jobs
    from plugins.commands.serve_requests import Limits
    from toolkit.generation.single_rows import store_for_single_rows

    path = resolve(options.ckpt_path, Path(options.root))
    listening = listen(options.host, options.port, f"--host {options.host[:80]} ")
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
        return run(server.app(hosts), listening, "\n".join(said), jobs.stop)


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
    return options
