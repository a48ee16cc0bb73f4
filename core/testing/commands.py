"""Proofs for commands: quick to answer, and short about mistakes."""

from __future__ import annotations

import subprocess
import sys

from core.__main__ import MESSAGE_LINES
from core.configuration.docstrings import sections
from core.testing.case import Case
from core.testing.proof import proof, require
from core.testing.runs import run
from core.testing.workshop import workshop

HEAVY = ("torch", "lightning", "transformers", "matplotlib", "pandas")
NO_ARGUMENT = "--no-command-has-this"


@proof("commands")
def imports_nothing_heavy(case: Case) -> None:
    """Importing it imports neither torch nor another library that takes seconds."""
    code = (
        "import sys; sys.path[:] = sys.argv[2:]; from importlib import import_module; "
        "import_module(sys.argv[1]); print(*sys.modules)"
    )
    # not the forked process of other proofs, which has imported all of it
    words = [sys.executable, "-c", code, case.entry.module, *sys.path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=workshop(), check=False)
    require(done.returncode == 0, f"importing it ends with {done.returncode}: {done.stderr[-500:]}")
    found = [name for name in HEAVY if name in done.stdout.split()]
    require(not found, f"{case.entry.module} imports {', '.join(found)}")


@proof("commands")
def refuses_an_unknown_argument(case: Case) -> None:
    """An argument that it does not know ends with exit code 2 and at most 10 lines, none of a traceback."""
    done = run([case.entry.name, NO_ARGUMENT], workshop())
    lines = len(done.complaint.splitlines())
    require(
        done.code == 2 and 1 <= lines <= MESSAGE_LINES and "Traceback" not in done.complaint,
        f"exit code {done.code}, {lines} lines{' or more' if lines > MESSAGE_LINES else ''}:\n{done.complaint}",
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
        not followed or followed.startswith("\n\n"), f"the sentence goes on in a second line: {summary!r}"
    )
