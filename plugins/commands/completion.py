"""The command `completion`: a script with which a shell completes command lines on TAB."""

from __future__ import annotations

import sys

from core.configuration.command_parser import Parser
from core.technique import technique
from plugins.commands.completion_scripts import SCRIPTS

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
    print(SCRIPTS[parser.parse_args(arguments).shell], end="")
    return 0
