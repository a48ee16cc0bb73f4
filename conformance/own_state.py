"""Proofs about what a technique keeps and logs of its own: resumed, on two ranks, under accumulation, step by step."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from conformance.case import Case
from conformance.proof import NotProvable, proof, require
from conformance.runs import LEFT, Run
from conformance.training import (
    SAVED,
    WEIGHED,
    again,
    differences,
    fit,
    forgotten,
    furthest,
    resumed,
    run_fit,
    run_with,
    run_without,
    two_ranks,
)
from core.technique import declaration_of
from plugins.cli.configuration.config_files import merge

STATEFUL = ("callbacks", "loggers", "objectives", "optimizers", "precision", "schedules", "strategies")
"""Kinds that may keep or log something of their own; what a data module keeps is its position."""

TRAINED_ON_RANKS = ("callbacks", "objectives", "optimizers", "precision", "schedules")
"""Those of them whose figures are of all ranks, and that may be wrong under accumulation."""

LONG, LATE, LOGGED = 364, tuple(range(40, 361, 40)), 40
"""Steps of a run that fills any usual window, those after which objects are counted, and how often it logs.

There are as many logged steps between any two neighbours of `LATE`. The run ends behind the first two between which
nothing is left: what fills a window or a cache does so later, what leaks never.
"""

LEAST_LEAK = 0.5
"""Objects and elements of lists per step: what is kept in each step is one or more."""

OURS = ("Recorder", "Saver")
Figures = dict[str, dict[int, float]]

MEASURED = re.compile(
    r"(_(us|ms|s|seconds|bytes|kib|mib|gib|watts|joules|celsius)|_per_second|/utilization)$"
)
"""How names of figures end that are measured in time, memory, energy or heat: those are never the same."""


def figures_of(run: Run) -> Figures:
    """Returns what a run logged and left in `callback_metrics`, but for what it measured: name -> step -> value."""
    found: Figures = {}
    for part in run.figures["metrics"], run.figures["logged"]:
        for step, figures in part.items():
            for name, value in figures.items():
                # the perplexity is of the loss, which is there: exp makes a difference larger
                if not name.endswith("/perplexity") and not MEASURED.search(name):
                    found.setdefault(name, {})[int(step)] = value
    return found


def state_of(run: Run, case: Case, data: bool = True) -> dict[str, Any]:
    """Returns what callbacks, precision and data module have in a run's last checkpoint, without the run's folder."""
    checkpoint = run.checkpoint() or {}
    common = ["state_dict", "optimizer_states", "lr_schedulers", "loops", "leyden", "language_module"]
    if not data:  # a position, which counts batches
        common.append(case.values["data"]["class_path"].rpartition(".")[2])
    parts = {k: v for k, v in checkpoint.items() if isinstance(v, Mapping) and k not in common}
    parts["callbacks"] = {k: v for k, v in parts.get("callbacks", {}).items() if k not in OURS}
    return dict(_without_folder(parts, str(run.folder).removesuffix(LEFT)))


def _without_folder(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace(folder, "")
    if isinstance(value, Mapping):
        return {key: _without_folder(one, folder) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folder(one, folder) for one in value]
    return value


def _measured(case: Case) -> set[str]:
    """Returns what differs between two runs of the same: times, memory. Called where something differs at all."""
    one, other = run_with(case), again(case)
    names = {
        line.partition(":")[0] for line in differences(state_of(one, case), state_of(other, case), "state")
    }
    first, second = figures_of(one), figures_of(other)
    return names | {name for name in {*first, *second} if first.get(name) != second.get(name)}


@proof(*STATEFUL, "datamodules")
def resumes_its_own_state(case: Case) -> None:
    """Killed and resumed, what it logs and what it has in the last checkpoint is what it is without a stop."""
    expected, found = run_with(case), resumed(case)
    lines = list(_state_lines(case, found, expected))
    one, other = figures_of(found), figures_of(expected)
    since = max(SAVED + 1, min((step for steps in one.values() for step in steps), default=0))
    for name in [*other, *(name for name in one if name not in other)]:
        a, b = ({s: v for s, v in run.get(name, {}).items() if s >= since} for run in (one, other))
        lines += [f"{name}: {line}" for line in differences(a, b, "")]
    if lines:
        measured = _measured(case)
        lines = [line for line in lines if line.partition(":")[0] not in measured]
    require(
        not lines,
        "\n".join(["resumed, and without a stop:", *lines[:4], *forgotten(case, found, expected)]),
    )


def _state_lines(case: Case, found: Run, expected: Run, tolerance: float = 0.0) -> Iterator[str]:
    one, other = (state_of(run, case, data=not tolerance) for run in (found, expected))
    if expected.checkpoint() is not None and found.checkpoint() is not None:
        yield from differences(one, other, "state", tolerance)


@proof(*TRAINED_ON_RANKS)
def its_figures_agree_on_two_ranks(case: Case) -> None:
    """What it logs, and its state, is the same on two ranks as in one process."""
    if case.ranks > 1:
        raise NotProvable(f"it needs {case.ranks} processes: there is no run in one to compare with")
    expected = run_with(case)
    if expected.record["random"]:
        raise NotProvable("its training draws random numbers (dropout?), each rank its own")
    _agree(
        case,
        two_ranks(case),
        expected,
        "on two ranks, and in one process",
        "a figure is of one rank's tokens or gradients: sum it over the ranks, with "
        "`trainer.strategy.reduce(value, reduce_op='sum')`, in steps that are logged",
    )


@proof(*TRAINED_ON_RANKS, "strategies")
def accumulation_changes_nothing(case: Case) -> None:
    """Two micro-batches of half the rows make the step that one batch makes: figures, state and what it logs."""
    declared = declaration_of(case.target)
    if declared and {"gradient_accumulation", "batch_size"} & set(declared.owns):
        raise NotProvable("it decides itself about the rows of a micro-batch")
    expected = run_with(case)
    if expected.record["random"]:
        raise NotProvable("its training draws random numbers (dropout?), each micro-batch its own")
    found = accumulated(case)
    cause = (
        "a hook of each micro-batch (on_train_batch_*, on_after_backward) does what belongs to a step: "
        "on_before_optimizer_step is called once a step, with the gradients of all its tokens; a figure is logged "
        "under `trainer.global_step`, not under `batch_idx`"
    )
    apart = furthest(found, expected, common=True)
    require(
        apart[0] <= case.tolerance,
        f"{apart[1]} in two micro-batches and in one (tolerance {case.tolerance:g}).\nLikely: {cause}.",
    )
    _agree(case, found, expected, "in two micro-batches, and in one", cause)


@cache
def _accumulated(case: Case) -> Run:
    trainer, data = case.values["trainer"], case.values["data"].get("init_args", {})
    times, rows = trainer.get("accumulate_grad_batches", 1), data.get("batch_size", 1)
    if not isinstance(times, int) or not isinstance(rows, int) or rows % (2 * case.ranks):
        raise NotProvable(f"a batch of {rows} rows cannot be halved")
    changed: dict[str, Any] = {"accumulate_grad_batches": 2 * times}
    for name in ("limit_train_batches", "limit_val_batches"):  # validations are counted in optimizer steps
        if isinstance(trainer.get(name), int):
            changed[name] = 2 * trainer[name]
    overlay = {"trainer": changed, "data": {"init_args": {"batch_size": rows // 2}}}
    halved = Case(case.entry, case.init_args, config=merge(merge({}, case.config), overlay))
    return fit(halved, "accumulated", ranks=case.ranks)


def accumulated(case: Case) -> Run:
    """Returns the run whose batches are cut in two.

    Raises:
        AssertionError: If it failed.
    """
    return _accumulated(case).succeeded("with two micro-batches, `fit`")


def _agree(case: Case, found: Run, expected: Run, where: str, cause: str) -> None:
    """Requires that two runs log the same, and have the same state, as far as rounding goes."""
    lines: list[str] = []
    declared = declaration_of(case.target)
    if not (declared and "batch_size" in declared.owns):  # else its state is the rows of a rank
        lines += _state_lines(case, found, expected, max(case.tolerance, 1e-5))
    one, other = figures_of(found), figures_of(expected)
    for name in other:  # there may be figures of ranks besides
        lines += _figure_lines(case, name, one.get(name, {}), other[name])
    if lines:
        measured = _measured(case)
        lines = [line for line in lines if line.partition(":")[0] not in measured]
    require(not lines, "\n".join([f"{where}:", *lines[:4], f"Likely: {cause}."]))


def _figure_lines(
    case: Case, name: str, found: Mapping[int, float], expected: Mapping[int, float]
) -> Iterator[str]:
    if more := sorted(found.keys() - expected.keys()):
        yield f"{name}: it is logged in step {more[0]}, and otherwise in {sorted(expected) or 'none'}"
    if not found:
        yield f"{name}: it is not logged, and otherwise in step {min(expected)}"
    for step in sorted(found.keys() & expected.keys()):
        one, other = found[step], expected[step]
        same = math.isclose(one, other, rel_tol=max(case.tolerance, 1e-5), abs_tol=1e-9)
        if not same and not (math.isnan(one) and math.isnan(other)):
            yield f"{name}: {one!r} and {other!r} in step {step}"
            return


@proof("callbacks")
def its_state_is_plain(case: Case) -> None:
    """Its state in a checkpoint is plain values, and tensors that later steps do not change."""
    done = run_with(case)
    own = {
        k: v for k, v in state_of(done, case)["callbacks"].items() if k.partition("{")[0] == case.entry.name
    }
    problems = [line for key, value in own.items() for line in _not_plain(value, key)]
    live = [path.removeprefix("callbacks.") for path in done.record["live"]]
    problems += [
        f"{path}: this tensor changed after `state_dict` had returned it: return a copy (.cpu().clone())"
        for path in live
        if path.split(".")[0] in own
    ]
    require(not problems, "\n".join(problems[:4]))


def _not_plain(value: Any, path: str) -> Iterator[str]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            yield f"{path}: a tensor for a single value: return float(...) or int(...)"
        elif value.device.type != "cpu":
            yield f"{path}: a tensor on {value.device}: return it on the CPU"
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in items:
            yield from _not_plain(one, f"{path}.{key}")
    elif not isinstance(value, str | int | float | bool | None):
        yield f"{path}: a {type(value).__name__}: return numbers, strings, lists and mappings"


@proof("callbacks")
def watching_changes_nothing(case: Case) -> None:
    """Declared `observer=True`, it leaves losses and weights as they are without it, to the last bit."""
    declared = declaration_of(case.target)
    if declared is None or not declared.observer:
        raise NotProvable("it is not declared as watching")
    found, expected = run_with(case), run_without(case)
    lines = list(differences(found.record["losses"], expected.record["losses"], "losses"))
    one, other = ((run.checkpoint() or {}).get("state_dict") for run in (found, expected))
    if one is not None and other is not None:
        lines += differences(one, other, "state_dict")
    require(
        not lines,
        "\n".join(
            [
                "with it, and without:",
                *lines[:4],
                "Likely: a hook changes weights, gradients or the optimizer's settings: then observer=False, so that it "
                "takes part in trial steps and is wound back with the training.",
            ]
        ),
    )


@proof(*STATEFUL)
def leaks_nothing(case: Case) -> None:
    """A step that is not logged leaves no objects behind, and no longer lists."""
    if case.ranks > 1:
        raise NotProvable("it needs several processes: there is no run without it to compare with")
    if steady_growth(run_with(case), WEIGHED) == steady_growth(run_without(case), WEIGHED):
        return
    # a window that is being filled, a cache: growth over hundreds of steps is neither
    growth = _late_growth(case.values, LEAST_LEAK)
    if growth < LEAST_LEAK:
        return
    growth -= max(0.0, _late_growth(case.plain_values, 0.0))
    require(
        growth < LEAST_LEAK,
        f"each of the steps from {LATE[0]} to {LATE[-1]} leaves {growth:.1f} objects or elements of lists behind.\n"
        "Likely: a list of losses, outputs or batches grows for ever: keep a window, a sum, or what was logged.",
    )


def steady_growth(run: Run, steps: Sequence[int]) -> float:
    """Returns how many objects a step adds at least, of all intervals between these steps.

    A leak adds to each interval. A cache that is filled once, or what a progress bar keeps until its next
    drawing (of the run without the technique too: Lightning's bar adds and frees about 120), adds to some.
    """
    counted = run.record["objects"]
    if missing := [step for step in steps if str(step) not in counted]:
        raise NotProvable(f"no step {missing[0]} was reached")
    pairs = pairwise(steps)
    return min((counted[str(last)] - counted[str(first)]) / (last - first) for first, last in pairs)


def _lengthened(values: Mapping[str, Any]) -> dict[str, Any]:
    trainer = {
        "max_steps": LONG,
        "log_every_n_steps": LOGGED,
        "limit_val_batches": 0,
        "val_check_interval": None,
        "limit_train_batches": 10 * LONG,
    }
    return merge(merge({}, values), {"trainer": trainer})


def _late_growth(values: Mapping[str, Any], enough: float) -> float:
    """Returns :func:`steady_growth` of a long run, which ends where this is less than `enough`."""
    done = _long(json.dumps(_lengthened(values)), enough).succeeded(f"a run of {LONG} steps")
    counted = [step for step in LATE if str(step) in done.record["objects"]]
    return steady_growth(done, counted if len(counted) > 1 else LATE)


@cache
def _long(values: str, enough: float) -> Run:
    return run_fit(json.loads(values), f"long-{abs(hash(values)):x}", weigh=LATE, enough=enough, keep=False)
