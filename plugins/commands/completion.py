"""The command `completion`: a script with which a shell completes command lines on TAB.

Kept after a measurement (`python -m tests.benchmarks.completion`). A TAB costs 0.10 to 0.16 s of CPU here, because arguments
are read from source and nothing is imported. With jsonargparse 4.53.0 and argcomplete 3.7.2 it costs 4.3 to 6.5 s,
because torch, Lightning and all techniques are imported first; they offer no arguments of the class that a config or the line
names, no shipped configs and no callbacks by name, and fail for `--trainer.callbacks+=` and after LightningCLI's
subcommands. shtab 1.13.0 was not done with its script after 114 s, at 1.8 GiB. typer 0.29.2 asks a function of the program
for the candidates, in 0.2 s: it could replace the scripts, if it also replaced the parsers of all commands.

The scripts are in `templates/completion`. Each asks `leyden completion words -- WORD...` for what may come next: the words
after `leyden` or `python -m core`, the last one as far as it is typed. A line of the answer is a candidate, a tab, and
what it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from core.technique import technique
from plugins.cli.configuration.command_parser import Parser

SHELLS = ("bash", "zsh", "fish")


@technique(paper="the completion interfaces of bash 4.4, zsh 5 and fish 3")
def completion(arguments: list[str]) -> int:
    """Prints a script with which bash, zsh or fish completes commands, options, techniques and configs.

    It works for `leyden` and for `python -m core`; the program `leyden` must be on the PATH, or beside the
    Python that is called. In ~/.bashrc, ~/.zshrc (after compinit) or ~/.config/fish/config.fish:

    Example:
        source <(python -m core completion bash)
        source <(python -m core completion zsh)
        python -m core completion fish | source
    """
    if arguments[:2] == ["words", "--"]:  # what the scripts call
        from plugins.commands.completion_candidates import candidates

        sys.stdout.writelines(f"{word}\t{text}\n" for word, text in candidates(arguments[2:]))
        return 0
    parser = Parser(prog="python -m core completion", description=completion.__doc__)
    parser.add_argument("shell", choices=SHELLS, help="whose language the script is in")
    print(script(parser.parse_args(arguments).shell), end="")
    return 0


def script(shell: str) -> str:
    """Returns what the shell has to read."""
    path = Path(__file__).parent / "templates" / "completion" / f"{shell}.template"
    return path.read_text(encoding="utf-8")
