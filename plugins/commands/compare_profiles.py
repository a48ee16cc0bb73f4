"""The command `compare-profiles`: two traces of the callback Profile, operator by operator."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.commands.plugins_terminal import print_table
from toolkit.traces import Operator, Trace, read_trace

NONE = Operator(0.0, 0.0)


@technique(paper="trace comparison as in Holistic Trace Analysis")
def compare_profiles(arguments: list[str]) -> int:
    """Compares two profiles: time of each operator in a step, those first that differ most, and idle time.

    Example:
        python -m core compare-profiles runs/a/profile_step_10.rank0.json.gz runs/b/profile_step_10.rank0.json.gz
    """
    parser = Parser(prog="python -m core compare-profiles", description=compare_profiles.__doc__)
    parser.add_argument("profiles", metavar="TRACE", nargs=2, help="a .json or .json.gz that Profile wrote")
    parser.add_argument("--rows", type=int, default=20, help="operators that are shown: %(default)s")
    options = parser.parse_args(arguments)
    if options.rows < 1:
        raise ConfigError(f"--rows is {options.rows}; at least 1 operator is shown.")
    one, other = (_read(Path(path)) for path in options.profiles)
    print_table(operator_rows(one, other, options.rows))
    print()
    print_table(idle_rows(one, other))
    return 0


def _read(path: Path) -> Trace:
    trace = read_trace(path)
    if not trace.operators():
        raise ConfigError(f"{path} has no operators: take a trace that the callback Profile wrote.")
    return trace


def operator_rows(one: Trace, other: Trace, rows: int) -> list[tuple[str, ...]]:
    """Returns the operators whose time differs most, their sum, and a header."""
    before, after = one.operators(), other.operators()
    names = sorted(
        {*before, *after},
        key=lambda name: (-abs(after.get(name, NONE).self_ms - before.get(name, NONE).self_ms), name),
    )
    found: list[tuple[str, ...]] = [("A ms a step", "B ms a step", "B - A", "A calls", "B calls", "operator")]
    for name in names[:rows]:
        found.append(_row(before.get(name, NONE), after.get(name, NONE), name[:80]))
    return [*found, _row(_sum(before), _sum(after), f"all {len(names)} operators")]


def _sum(operators: dict[str, Operator]) -> Operator:
    return Operator(
        sum(each.calls for each in operators.values()), sum(each.self_ms for each in operators.values())
    )


def _row(a: Operator, b: Operator, name: str) -> tuple[str, ...]:
    times = f"{a.self_ms:,.3f}", f"{b.self_ms:,.3f}", f"{b.self_ms - a.self_ms:+,.3f}"
    return (*times, f"{a.calls:,.1f}", f"{b.calls:,.1f}", name)


def idle_rows(one: Trace, other: Trace) -> list[tuple[str, ...]]:
    """Returns the idle shares of each thread and stream, and a header."""
    before, after = one.idle(), other.idle()
    shares = [
        (*(f"{idle[lane]:.1%}" if lane in idle else "-" for idle in (before, after)), lane)
        for lane in dict.fromkeys([*before, *after])
    ]
    return [("A idle", "B idle", "where"), *shares]
