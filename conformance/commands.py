"""Proofs for commands: quick to answer, and short about mistakes."""

from __future__ import annotations

import subprocess
import sys

from conformance.case import Case
from conformance.proof import proof, require
from conformance.runs import run
from conformance.workshop import workshop
from plugins.cli.configuration.docstrings import sections
from plugins.cli.error_messages import MESSAGE_LINES

HEAVY = ("torch", "lightning", "transformers", "matplotlib", "pandas")
NO_ARGUMENT = "--no-command-has-this"
NOISE = b"\x00\xff{[:\n- \x80"


@proof("commands")
def imports_nothing_heavy(case: Case) -> None:
    """Importing it imports neither torch nor another library that takes seconds."""
    code = (
        "import sys; sys.path[:] = sys.argv[2:]; from importlib import import_module; "
        "import_module(sys.argv[1]); print(*sys.modules)"
    )
    # not the forked process of other proofs, which has imported all of it
    words = [sys.executable, "-c", code, case.entry.module, *sys.path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=workshop(), check=False)
    require(done.returncode == 0, f"importing it ends with {done.returncode}: {done.stderr[-500:]}")
    found = [name for name in HEAVY if name in done.stdout.split()]
    require(not found, f"{case.entry.module} imports {', '.join(found)}")


@proof("commands")
def refuses_an_unknown_argument(case: Case) -> None:
    """An unknown argument ends with exit code 2 and at most 10 lines, none of a traceback."""
    done = run([case.entry.name, NO_ARGUMENT], workshop())
    lines = len(done.error_text.splitlines())
    require(
        done.code == 2 and 1 <= lines <= MESSAGE_LINES and "Traceback" not in done.error_text,
        f"exit code {done.code}, {lines} lines{' or more' if lines > MESSAGE_LINES else ''}:\n{done.error_text}",
    )


@proof("commands")
def answers_a_mistake_in_short(case: Case) -> None:
    """Without arguments, and with a path to nothing, to bytes or to an empty folder: exit code 0 or 2, no traceback."""
    nothing, noise, empty = (workshop() / name for name in ("no-such-file", "noise", "empty-folder"))
    noise.write_bytes(NOISE)
    empty.mkdir(exist_ok=True)
    given: dict[str, list[str]] = {
        "without arguments": [],
        "with a path to nothing": [str(nothing)],
        "with a file that is no text": [str(noise)],
        "with an empty folder": [str(empty)],
        "with a configuration that is no text": [f"--config={noise}"],
        "with --help": ["--help"],
    }
    for what, words in given.items():
        done = run([case.entry.name, *words], workshop())
        lines = len(done.stderr.splitlines())
        require(
            done.code in (0, 2) and "Traceback" not in done.stderr + done.stdout,
            f"{what} it ends with exit code {done.code}:\n{done.error_text}\n"
            "Likely: a mistake of the user's is raised as what a library raises: make it a core.errors.ConfigError.",
        )
        require(
            done.code == 0 or 1 <= lines <= MESSAGE_LINES,
            f"{what} it says {lines} lines, of at most {MESSAGE_LINES}:\n{done.error_text}",
        )


@proof("commands")
def has_a_summary(case: Case) -> None:
    """The first line of its docstring is a sentence that `--help` and `plugins list` can show."""
    prose = sections(case.target.__doc__)[""]
    summary = case.entry.summary()
    require(summary, "there is none")
    require(summary.endswith("."), f"it does not end with a full stop: {summary!r}")
    followed = prose.removeprefix(summary).lstrip(" ")
    require(
        not followed or followed.startswith("\n\n"), f"the sentence continues on a second line: {summary!r}"
    )
