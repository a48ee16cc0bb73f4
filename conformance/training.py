"""Proofs that run the tiny model: built, trained, killed and resumed, on two ranks, counted."""

from __future__ import annotations

import dis
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

from conformance.case import Case
from conformance.proof import NotProvable, proof, require
from conformance.runs import LEFT, Run, run
from conformance.workshop import workshop, write_config
from core.catalog import KINDS
from core.training.every_step import BATCH_HOOKS
from plugins.cli.configuration.config_files import merge

STEPS, SAVED, KILLED = 8, 4, 6
"""Steps of a run; after which the checkpoint is saved from which a run resumes; after which a kill would have ended it."""

WATCHED = (2, 7)
"""Steps in which nothing is logged, saved or validated."""

WEIGHED = (6, 7)
"""Steps after which objects are counted: before and after one in which nothing is logged, saved or validated."""

RUNNABLE = tuple(kind for kind in KINDS if kind not in ("commands", "evaluations", "rewards"))
"""Kinds that a run can select; rewards and evaluations, which keep no state, are called by those."""


@proof(*RUNNABLE)
def builds_from_yaml(case: Case) -> None:
    """A configuration that selects it is parsed, checked and built."""
    values = on_ranks(case.values, case.ranks)
    run(["check", f"--config={write_config(_label(case, 'built'), values)}"], workshop()).succeeded("`check`")


@proof(*RUNNABLE)
def config_round_trips(case: Case) -> None:
    """The configuration that a run records is read back as the same, so that a run can be repeated."""
    if reason := case.exempt.get("trains"):
        raise NotProvable(f"it takes a run that ends, and none does: {reason}")
    path = run_with(case).folder / "config.yaml"
    done = run(["fit", f"--config={path}", "--print_config=plain"], workshop())
    require(done.code == 0, f"what was recorded is refused:\n{done.error_text}")
    recorded = path.read_text(encoding="utf-8").splitlines()
    opaque = [line.strip() for line in recorded if re.search(r"<.+ (object )?at 0x[0-9a-f]+>", line)]
    require(not opaque, f"this value cannot be read back: {opaque and opaque[0]}")
    # The checkpoint that a run resumes from is not part of its record.
    found = [line for line in done.stdout.splitlines() if line != "ckpt_path: null"]
    changed = [
        f"{old.strip()} became {new.strip()}" for old, new in zip(recorded, found, strict=False) if old != new
    ]
    require(recorded == found, "\n".join(changed[:3]) or "there are other lines")


@proof(*RUNNABLE)
def trains(case: Case) -> None:
    """A tiny model trains with it, and the loss is finite in each step."""
    record = run_with(case).record
    require(
        record["steps"] == STEPS,
        f"the run ended after {record['steps']} of {STEPS} steps: try it with arguments that let it run",
    )
    wrong = [f"step {n}: {loss}" for n, loss in enumerate(record["losses"], 1) if not math.isfinite(loss)]
    require(not wrong, f"loss that is not finite, {', '.join(wrong)}")
    require(record["losses"] and record["figures"], "no loss was returned or logged")


@proof(*RUNNABLE)
def resumes_bitwise(case: Case) -> None:
    """A run that is cut off as by SIGKILL and resumed is bitwise the whole run: losses, figures, weights."""
    bitwise(case, resumed(case), run_with(case))


def bitwise(case: Case, found: Run, expected: Run) -> None:
    """Raises AssertionError unless a resumed run has each bit of the whole one."""
    for name in ("losses", "figures"):
        _none_of(case, found, expected, differences(found.record[name], expected.record[name], name))
    one, other = found.checkpoint(), expected.checkpoint()
    if one is not None and other is not None:
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            _none_of(case, found, expected, differences(one.get(part), other.get(part), part))


def _none_of(case: Case, found: Run, expected: Run, different: Iterator[str]) -> None:
    lines = list(islice(different, 4))
    require(not lines, "\n".join(["resumed, and without a stop:", *lines, *forgotten(case, found, expected)]))


def forgotten(case: Case, found: Run, expected: Run) -> list[str]:
    """Returns a line about the attributes that a callback did not get back when it was resumed, if there are any."""
    own = [name for name in expected.figures["attributes"] if name.partition("{")[0] == case.entry.name]
    one, other = ({k: run.figures["attributes"].get(k, {}) for k in own} for run in (found, expected))
    lost = list(islice(differences(one, other, ""), 3))
    cause = f"its attribute {', '.join(line.lstrip('.') for line in lost)}: save it in `state_dict`"
    return [f"Likely: {cause if lost else 'something that it counts or keeps is not in its `state_dict`'}."]


@proof(*RUNNABLE)
def agrees_on_two_ranks(case: Case) -> None:
    """Two processes that share each batch compute what one does with all of it."""
    if case.ranks > 2 or (case.ranks == 2 and case.entry.kind != "strategies"):
        raise NotProvable(f"it needs {case.ranks} processes: there is no run in one to compare with")
    reference = run_without(case) if case.entry.kind == "strategies" else run_with(case)
    if reference.record["random"]:
        raise NotProvable(
            "its training draws random numbers (dropout?), each rank its own: try it with a case without"
        )
    found = two_ranks(case)
    if case.entry.kind == "datamodules":
        _reads_different_rows(found)
        return
    apart = furthest(found, reference)
    require(
        apart[0] <= case.tolerance,
        f"{apart[1]} on two ranks and in one process (tolerance {case.tolerance:g}).\n"
        "Likely: something is computed from one rank's gradients or tokens before they are reduced, or on one rank "
        "alone.",
    )


def furthest(found: Run, expected: Run, common: bool = False) -> tuple[float, str]:
    """Returns the largest relative difference between the figures of two runs, and where it is.

    Args:
        found: The one run.
        expected: The other.
        common: Whether steps that only the other has figures of are left out.
    """
    apart = [(0.0, "no figure")]
    for step, figures in expected.record["figures"].items():
        for name, value in figures.items():
            if common and name not in found.record["figures"].get(step, {}):
                continue
            seen = found.record["figures"].get(step, {}).get(name, math.nan)
            distance = abs(seen - value) / max(abs(value), 1e-3)
            if not name.endswith("/perplexity"):  # of the loss, which is there: exp makes a difference larger
                apart.append(
                    (
                        math.inf if math.isnan(distance) else distance,
                        f"{name} after step {step} is {seen!r} and {value!r}",
                    )
                )
    return max(apart)


def _reads_different_rows(found: Run) -> None:
    one, other = (found.record_of(rank)["inputs"] for rank in range(2))
    same = [str(step) for step, (a, b) in enumerate(zip(one, other, strict=True), 1) if a == b]
    require(not same, f"both ranks were given the same rows in step {', '.join(same)}")


@proof(*RUNNABLE)
def idle_costs_nothing(case: Case) -> None:
    """Steps that are not logged make the host wait for the device no more often than without it."""
    waits = run_with(case).record["waits"]
    usual = len(run_without(case).record["waits"]) if waits else 0
    require(
        len(waits) <= usual,
        f"{len(waits)} waits in steps {' and '.join(map(str, WATCHED))}, {usual} without it; they came from\n"
        + "\n".join(sorted({f"{place} ({waits.count(place)} times)" for place in waits})[:5]),
    )
    hooks = [name for name in BATCH_HOOKS if name in vars(case.target)]
    idle = [name for name in hooks if _does_nothing(vars(case.target)[name])]
    require(
        not idle,
        f"of its {len(hooks)} hooks that are called in each step, {', '.join(idle)} does nothing: leave it out",
    )


def _does_nothing(function: Any) -> bool:
    names = {instruction.opname for instruction in dis.get_instructions(function)}
    return names <= {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}


@cache
def _whole(case: Case) -> Run:
    return fit(case, "whole", ranks=case.ranks, copy_at=KILLED)


def run_with(case: Case) -> Run:
    """Returns the run of all steps.

    Raises:
        AssertionError: If it failed.
    """
    done = _whole(case)
    hint = "\nIf it needs other arguments: see pytest_leyden_cases in conformance." if done.code == 2 else ""
    return done.succeeded("`fit`", hint)


@cache
def _plain(values: str, *words: str) -> Run:
    return run_fit(json.loads(values), f"plain-{abs(hash((values, *words))):x}", *words)


@cache
def _again(case: Case) -> Run:
    return fit(case, "again", ranks=case.ranks)


def again(case: Case) -> Run:
    """Returns a second run of all steps: what differs from the first is measured, such as a time."""
    return _again(case).succeeded("a second `fit`")


@cache
def _resumed(case: Case) -> Run:
    return go_on(case, run_with(case), "whole")


def go_on(case: Case, expected: Run, name: str, *words: str) -> Run:
    """Goes on, in the path of a whole run, with the files that were there after step `KILLED`.

    Args:
        case: What is tried.
        expected: The whole run.
        name: What :func:`fit` called it.
        words: Further arguments.
    """
    whole = expected.folder
    left, aside = (whole.with_name(whole.name + end) for end in (LEFT, "-aside"))
    require(left.is_dir(), f"the run has no step {KILLED + 1}, before which it could be killed")
    whole.rename(aside)
    left.rename(whole)
    try:
        found = fit(case, name, "--ckpt_path=last", *words, ranks=case.ranks)
    finally:
        whole.rename(left)
        aside.rename(whole)
    return replace(found, folder=left)


def resumed(case: Case) -> Run:
    """Returns the run that goes on with what a SIGKILL in the whole run would have left on disk.

    Raises:
        AssertionError: If it failed.
    """
    return _resumed(case).succeeded("the resumed run")


@cache
def _two_ranks(case: Case) -> Run:
    return fit(case, "ranks", ranks=2)


def two_ranks(case: Case) -> Run:
    """Returns the run on two ranks.

    Raises:
        AssertionError: If it failed.
    """
    return _two_ranks(case).succeeded("two ranks")


def run_without(case: Case, *words: str) -> Run:
    """Returns the run of all steps, in one process, without the technique; `words` are further arguments.

    Raises:
        AssertionError: If it failed.
    """
    return _plain(json.dumps(case.plain_values), *words).succeeded("without it, `fit`")


def fit(case: Case, name: str, *words: str, ranks: int = 1, copy_at: int | None = None) -> Run:
    """Trains with the technique; `words` are further arguments."""
    return run_fit(on_ranks(case.values, ranks), _label(case, name), *words, ranks=ranks, copy_at=copy_at)


def run_fit(
    values: Mapping[str, Any],
    label: str,
    *words: str,
    ranks: int = 1,
    copy_at: int | None = None,
    weigh: Sequence[int] = WEIGHED,
    enough: float | None = None,
    keep: bool = True,
) -> Run:
    """Trains between the recorder and the saver.

    Args:
        values: The configuration.
        label: Name of the run's folder.
        words: Further arguments.
        ranks: Number of processes.
        copy_at: See :class:`conformance.recorder.Recorder`, as of `weigh`, `enough` and `keep`.
        weigh: See there.
        enough: See there.
        keep: See there.
    """
    folder = workshop() / label
    watch = list(WATCHED) if keep else []
    noted = {"watch": watch, "copy_at": copy_at, "weigh": list(weigh), "enough": enough, "keep": keep}
    first = _callback("Recorder", folder=str(folder), **noted)
    last = _callback("Saver", folder=str(folder), save_at=SAVED)
    callbacks = [first, *_listed(values["trainer"].get("callbacks")), last]
    loggers = [*_listed(values["trainer"].get("logger")), _callback("Figures", folder=str(folder))]
    changed = {"trainer": {"default_root_dir": str(folder), "callbacks": callbacks, "logger": loggers}}
    path = write_config(label, merge(merge({}, values), changed))
    return run(["fit", f"--config={path}", *words], folder, ranks=ranks)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value and value is not True else []


def _callback(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"conformance.recorder.{name}", "init_args": init_args}


def on_ranks(values: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Returns the configuration for so many processes, each with its part of the rows."""
    changed = merge({}, values)
    if ranks > 1:
        merge(changed, {"trainer": {"devices": ranks, "strategy": values["trainer"].get("strategy", "ddp")}})
        if rows := values["data"].get("init_args", {}).get("batch_size"):
            merge(changed, {"data": {"init_args": {"batch_size": rows // ranks}}})
    return changed


def _label(case: Case, name: str) -> str:
    return f"{case.entry.name}-{id(case):x}-{name}"


def differences(found: Any, expected: Any, path: str, tolerance: float = 0.0) -> Iterator[str]:
    """Yields where two nested values are not the same: to the last bit, or, of floats, within a tolerance."""
    import torch

    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if found.dtype != expected.dtype or not _same_tensor(found, expected, tolerance):
            yield f"{path}: another tensor"
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found or key not in expected:
                yield f"{path}.{key}: only {'in the second' if key in expected else 'in the first'}"
            else:
                yield from differences(found[key], expected[key], f"{path}.{key}", tolerance)
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(found) != len(expected):
            yield f"{path}: {len(found)} values and {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            place = f"{path}.{index + 1 if path == 'losses' else index}"
            yield from differences(one, other, place, tolerance)
    elif not _same_value(found, expected, tolerance):
        yield f"{path}: {found!r} and {expected!r}"


def _same_value(found: Any, expected: Any, tolerance: float) -> bool:
    if tolerance and isinstance(found, float) and isinstance(expected, float):
        return found == expected or abs(found - expected) <= tolerance * max(abs(expected), 1e-3)
    return repr(found) == repr(expected)


def _same_tensor(found: Any, expected: Any, tolerance: float) -> bool:
    import torch

    if tolerance and found.shape == expected.shape and found.is_floating_point():
        largest = float(expected.abs().nan_to_num(posinf=0.0).max()) if expected.numel() else 0.0
        return torch.allclose(
            found, expected, rtol=tolerance, atol=tolerance * max(largest, 1e-3), equal_nan=True
        )
    return _same_bits(found, expected)


def _same_bits(one: Any, other: Any) -> bool:
    import torch

    return one.shape == other.shape and torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )
