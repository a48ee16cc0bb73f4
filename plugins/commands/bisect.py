"""The command `bisect`: where two runs that should be the same begin to differ, and why."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser

if TYPE_CHECKING:
    from plugins.commands.bisect_cause import Difference
    from plugins.commands.bisect_runs import Launch, Place, Recorded, Replays


@technique(paper="own work; halving as in git bisect and in delta debugging, Zeller, FSE 1999")
def bisect(arguments: list[str]) -> int:
    """Finds the first step, tensor and cause by which two runs differ that should be the same: bisect RUN_A RUN_B.

    The records of HashChain say in which step batch, loss or weights differ first; without them the checkpoints of both
    runs say between which two. The steps from the last common checkpoint on are replayed for both runs, in a scratch
    folder, from their configurations, until one tensor is found: of the weights before the step, of the batch, an output of
    a module, a gradient, or the weights after it. If the configurations differ, halves of what differs are tried until one
    setting is left. Both run folders are left as they are. Run it where the runs were started: relative paths are the same, and a
    run of several ranks needs as many devices of this machine again. Runs on several machines are refused.

    Example:
        python -m core bisect runs/quickstart runs/quickstart-2
    """
    parser = Parser(prog="python -m core bisect", description=bisect.__doc__)
    parser.add_argument("A", help="a run folder")
    parser.add_argument("B", help="the folder of a run that should have been the same")
    parser.add_argument(
        "--scratch", metavar="DIR", help="where to keep the replays; by default they are removed"
    )
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    options = parser.parse_args(arguments)
    from plugins.commands.bisect_runs import in_subprocess, read_run

    a, b = read_run(options.A), read_run(options.B)
    if options.scratch:
        Path(options.scratch).mkdir(parents=True, exist_ok=True)
        found = find(a, b, Path(options.scratch), in_subprocess)
    else:
        with tempfile.TemporaryDirectory(prefix="leyden-bisect-") as folder:
            found = find(a, b, Path(folder), in_subprocess)
    print(json.dumps(found.as_json(), indent=1) if options.json else found.as_text())
    return 0


@dataclass
class Verdict:
    """What was found.

    Attributes:
        cause: "none", "weight", "token", "setting", "reduction order", "optimizer state", "not reproducible" or "unknown".
        text: It in one sentence.
        step: The first optimizer step that differs; None: none does.
        stage: What of the step differs first: "before" (the weights before it), "batch", "outputs", "gradients", "after".
        names: The tensors or modules, the first one first.
        evidence: Further lines.
        replays: Runs of some steps that it took.
    """

    cause: str
    text: str
    step: int | None = None
    stage: str = ""
    names: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    replays: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return vars(self)

    def as_text(self) -> str:
        """Returns it as lines for a terminal."""
        lines = [self.text, *(f"  {line}" for line in self.evidence)]
        if self.replays:
            lines.append(f"Replays: {self.replays}.")
        return "\n".join(lines)


STAGES = {
    "before": "the weights before the step",
    "batch": "the batch",
    "outputs": "the output of a module",
    "gradients": "gradients, although all outputs are the same",
    "after": "the weights after the step, although all gradients are the same",
}


def find(a: Recorded, b: Recorded, scratch: Path, launch: Launch) -> Verdict:
    """Finds the first difference of two runs, and its cause.

    Args:
        a: The one run.
        b: The other.
        scratch: A folder for replays.
        launch: Runs `fit`.

    Raises:
        ConfigError: If the runs recorded too little, or a replay fails.
    """
    from plugins.commands.bisect_cause import compare_tensors, first_in_detail, first_recorded
    from plugins.commands.bisect_runs import Replays, read_chains

    replays = Replays(scratch, launch)
    if a.chains and b.chains:
        recorded, equal = first_recorded(a.chains, b.chains)
    else:
        recorded, equal = _by_checkpoints(a, b)
    if recorded is None:
        return Verdict("none", _no_difference(a, b))
    begin = max((step for step in a.checkpoints.keys() & b.checkpoints.keys() if step <= equal), default=0)
    end = max(recorded.step, begin + 1)
    folders = [replays.run(side, run.config, run, begin, end) for side, run in (("a", a), ("b", b))]
    chains = [read_chains(folder) for folder in folders]
    found = first_in_detail(*chains)
    if found is None:
        verdict = _not_reproduced(a, b, chains, recorded)
    else:
        if found.step != end:
            folders = [
                replays.run(side, run.config, run, begin, found.step) for side, run in (("a", a), ("b", b))
            ]
        compare_tensors(found, *folders)
        verdict = _cause(a, b, found, (begin, folders[0]), replays)
    verdict.replays = replays.count
    return verdict


def _no_difference(a: Recorded, b: Recorded) -> str:
    from plugins.commands.bisect_cause import common_steps

    if steps := common_steps(a.chains, b.chains):
        return f"There is no difference in the {steps:,} steps that both runs recorded."
    steps = len(a.checkpoints.keys() & b.checkpoints.keys())
    return f"The weights in the checkpoints of {steps:,} steps, which both runs have, are the same."


def _by_checkpoints(a: Recorded, b: Recorded) -> tuple[Difference | None, int]:
    """Returns the first common checkpoint whose weights differ, and the step of the last one before."""
    from plugins.commands.bisect_cause import Difference, same_weights

    steps = sorted(a.checkpoints.keys() & b.checkpoints.keys())
    if not steps:
        raise ConfigError(
            f"{a.folder} and {b.folder} have neither records of HashChain nor checkpoints of the same step.\n"
            "Switch it on in both runs: --config techniques/hash_chain, or --trainer.callbacks+=HashChain."
        )
    low, high = -1, len(steps)  # same at low, different at high
    while high - low > 1:
        middle = (low + high) // 2
        if same_weights(a.checkpoints[steps[middle]], b.checkpoints[steps[middle]]):
            low = middle
        else:
            high = middle
    equal = steps[low] if low >= 0 else 0
    return (None if high == len(steps) else Difference(steps[high], "weights")), equal


def _cause(
    a: Recorded, b: Recorded, found: Difference, replayed: tuple[int, Path], replays: Replays
) -> Verdict:
    """Says why the replays of both runs differ; `replayed`: the step from which, and the folder of A's replay."""
    from plugins.commands.bisect_cause import FEW, ROUNDING
    from plugins.commands.bisect_runs import differing_settings, spelled, value_at

    begin, where = replayed[0], f"step {found.step:,}"
    # of sharded tensors, places in its shards
    seen = f", as rank {found.rank} has it" if len(a.chains) > 1 else ""
    evidence = [
        f"First difference{seen}: {STAGES[found.stage]} ({', '.join(found.names[:3])}).",
        *found.lines[:4],
    ]
    verdict = Verdict("unknown", "", found.step, found.stage, found.names, evidence)
    few = 0 < found.elements <= FEW
    if found.stage == "batch" and few:
        verdict.cause = "token"
        verdict.text = f"A token of the batch of {where} is another one: {found.lines[0]}."
        return verdict
    if found.stage in ("before", "after") and few:
        first = found.step == 1 and found.stage == "before"
        verdict.cause = "weight"
        verdict.text = (
            f"A weight is another one {'at the start' if first else f'in {where}'}: {found.lines[0]}."
        )
        return verdict
    paths = list(differing_settings(a.config, b.config))
    if guilty := _guilty_settings(a, b, paths, found.step, replayed, replays):
        names = [
            f"{spelled(path, a.config)} is {value_at(path, a.config)!r} in A and {value_at(path, b.config)!r} in B"
            for path in guilty
        ]
        verdict.cause, verdict.text = (
            "setting",
            f"A setting is another one, from {where} on: {'; '.join(names)}.",
        )
        return verdict
    if begin and (parts := _state_differences(a.checkpoints[begin], b.checkpoints[begin])):
        verdict.cause = "optimizer state"
        verdict.text = f"The state in the checkpoints of step {begin:,} is another one: {parts[0]}."
    elif found.stage in ("outputs", "gradients") and found.relative <= ROUNDING:
        verdict.cause = "reduction order"
        verdict.text = (
            f"{found.names[0]} sums in another order in {where}: from equal weights and an equal batch, gradients differ by "
            f"{found.relative:.1e} of their norm."
        )
    else:
        verdict.text = f"The runs compute something else in {where}, from equal settings: data files, code or environment differ."
    evidence += _environments(a, b)
    return verdict


def _guilty_settings(
    a: Recorded, b: Recorded, paths: list[Place], step: int, replayed: tuple[int, Path], replays: Replays
) -> list[Place]:
    """Returns the settings of B that make A differ by a step, fewer and fewer by halves; none: settings do not."""
    from plugins.commands.bisect_cause import first_in_detail
    from plugins.commands.bisect_runs import mixed, read_chains

    if not paths:
        return []
    begin, plain = replayed[0], read_chains(replayed[1])

    def differs(chosen: Sequence[Place]) -> bool:
        other = read_chains(replays.run("a", mixed(a.config, b.config, chosen), a, begin, step))
        return first_in_detail(plain, other) is not None

    if not differs(paths):
        return []
    together = paths  # the fewest that were tried and act
    while len(paths) > 1:
        half = paths[: len(paths) // 2]
        if differs(half):
            paths = together = half
        else:
            paths = paths[len(half) :]
    if paths != together and not differs(paths):
        return together  # no half of them acts alone
    return paths


def _not_reproduced(a: Recorded, b: Recorded, chains: Sequence[Any], recorded: Difference) -> Verdict:
    """Says which of the runs did not do what its replay does."""
    from plugins.commands.bisect_cause import first_recorded

    verdict = Verdict("not reproducible", "", recorded.step, recorded.stage, recorded.names)
    deviating = []
    for side, run, replayed in (("A", a, chains[0]), ("B", b, chains[1])):
        own, _ = first_recorded(run.chains, replayed) if run.chains else (None, 0)
        if own is not None:
            names = f" ({', '.join(own.names[:3])})" if own.names else ""
            deviating.append(side)
            verdict.evidence.append(
                f"Run {side} recorded another {own.stage} in step {own.step:,} than its replay{names}."
            )
    which = " and ".join(deviating) or "one of them"
    verdict.text = (
        f"From step {recorded.step:,} on the runs differ, but their replays are the same: what {which} did, its configuration "
        "does not do again. Memory, device, code or environment were others."
    )
    verdict.evidence += _environments(a, b)
    return verdict


def _environments(a: Recorded, b: Recorded) -> list[str]:
    if 0 not in a.chains or 0 not in b.chains:
        return []
    one, other = a.chains[0].environment, b.chains[0].environment
    return [
        f"{name}: {one.get(name)} in A, {other.get(name)} in B"
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    ]


def _state_differences(a: Path, b: Path) -> list[str]:
    """Returns where the states of training in two checkpoints differ, beside the weights."""
    from plugins.checkpoints.checkpoint import read_checkpoint
    from plugins.commands.bisect_cause import differing_entries

    one, other = read_checkpoint(a), read_checkpoint(b)
    parts = ("optimizer_states", "lr_schedulers", "loops")
    return [place for part in parts for place in differing_entries(one.get(part), other.get(part), part)]
