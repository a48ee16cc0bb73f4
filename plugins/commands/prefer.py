"""The command `prefer`: people compare answers of models in a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from core.errors import ConfigError
from core.technique import Package, technique
from plugins.cli.configuration.command_parser import Parser
from plugins.commands.local_page import require_packages


@technique(
    paper="blind pairwise comparison: Chatbot Arena, arXiv:2403.04132; intervals: Wilson (1927); Bradley and Terry (1952)",
    needs=[Package("starlette>=0.47"), Package("uvicorn>=0.35")],
)
def prefer(arguments: list[str]) -> int:
    """Shows two answers to a prompt side by side in a browser, stores which is better, and computes win rates.

    Answers are files of `python -m core generate --prompts FILE --output ANSWERS.jsonl`, one for each model. Which model is on
    which side is drawn, and the page does not say. Each choice is stored at once, in votes.jsonl of the output folder; started
    again with the same folder, it goes on. preferences.jsonl there is data for PreferenceDataModule. --report prints win
    rates with intervals of 95%, and for more than two models their Bradley-Terry strengths.

    The server listens on this machine alone, under a secret address that it prints. Over ssh:
    `ssh -L 8765:127.0.0.1:8765 HOST`, then open the address as it is. Ctrl-C ends it with exit code 130.

    Example:
        python -m core prefer --answers base=base.jsonl tuned=tuned.jsonl --output compared
        python -m core prefer --output compared --report
    """
    options = _options(arguments)
    folder = Path(options.output).expanduser()
    if options.report:
        from plugins.commands.prefer_report import report
        from plugins.commands.prefer_votes import read_votes

        print(report(list(read_votes(folder).values())), end="")
        return 0
    require_packages("prefer")
    return _serve(options, folder)


def _serve(options: argparse.Namespace, folder: Path) -> int:
    from plugins.commands.prefer_app import Comparison
    from plugins.commands.prefer_tasks import read_tasks
    from plugins.commands.prefer_votes import Votes
    from plugins.commands.serve_socket import listen, run

    tasks, same = read_tasks(options.answers, options.seed)
    with listen("127.0.0.1", options.port) as listening:
        votes = Votes(folder)
        try:
            comparison = Comparison(tasks, votes, options.seed)
            state = comparison.state()
            left_out = f", {same} of equal answers left out" if same else ""
            said = f"# {state['total']} pairs, {state['done']} of them compared{left_out}\n"
            said += f"# open http://127.0.0.1:{listening.getsockname()[1]}/{comparison.token}/"
            return run(comparison.app(), listening, said)
        finally:
            votes.close()


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m core prefer", description=prefer.__doc__)
    parser.add_argument(
        "--answers", metavar="NAME=FILE", nargs="+", help="a name for each model, and its answers"
    )
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="where choices are stored; made if missing"
    )
    parser.add_argument("--report", action="store_true", help="print win rates of the folder, and end")
    parser.add_argument("--seed", type=int, default=0, help="of order and sides (%(default)s)")
    parser.add_argument("--port", type=int, default=8765, help="0: any that is free (%(default)s)")
    options = parser.parse_args(arguments)
    if options.report and options.answers:
        raise ConfigError("--report reads the folder alone: leave --answers out.")
    if not options.report and not options.answers:
        raise ConfigError("Give --answers NAME=FILE for two models or more, or --report.")
    return options
