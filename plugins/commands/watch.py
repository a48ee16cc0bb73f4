"""The command `watch`: runs as they go, in a browser."""

from __future__ import annotations

from core.errors import ConfigError
from core.technique import Package, technique
from plugins.cli.configuration.command_parser import Parser
from plugins.commands.local_page import require_packages


@technique(
    paper="curves of several runs over steps, tokens and time, smoothed: TensorBoard",
    needs=[Package("starlette>=0.47"), Package("uvicorn>=0.35")],
)
def watch(arguments: list[str]) -> int:
    """Shows runs in a browser while they train: curves, text samples, findings of the doctor, memory, slow ranks.

    It reads run folders, also those of finished runs, and writes nothing. Of a folder of runs it shows all, and those that
    appear later. Curves need the logger MetricsCSV, which configs based on `defaults` have.

    The server listens on this machine alone, under a secret address that it prints. Over ssh:
    `ssh -L 8766:127.0.0.1:8766 HOST`, then open the address as it is. Ctrl-C ends it with exit code 130.

    Example:
        python -m core watch runs
        python -m core watch runs/quickstart runs/quickstart-2 --port 8770
    """
    parser = Parser(prog="python -m core watch", description=watch.__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder, or a folder of run folders")
    parser.add_argument("--port", type=int, default=8766, help="0: any that is free (%(default)s)")
    options = parser.parse_args(arguments)
    require_packages("watch")
    from plugins.commands.serve_socket import listen, run
    from plugins.commands.watch_app import Watching
    from plugins.commands.watch_runs import Runs

    runs = Runs(options.runs)
    if not runs.all():
        raise ConfigError(
            f"There is no run in {' or '.join(options.runs)} yet: start one, or name the folder of one."
        )
    with listen("127.0.0.1", options.port) as listening:
        watching = Watching(runs)
        said = f"# {len(runs.all())} runs\n"
        said += f"# open http://127.0.0.1:{listening.getsockname()[1]}/{watching.token}/"
        return run(watching.app(), listening, said)
