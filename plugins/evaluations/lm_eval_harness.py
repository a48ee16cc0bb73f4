"""Tasks of EleutherAI's lm-eval, on the network in training or of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from core.errors import ConfigError
from core.technique import Package, technique
from plugins.evaluations.counts import check_counts
from plugins.evaluations.harness_model import HarnessModel
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured
from toolkit.generation.decoding import check_prompts

if TYPE_CHECKING:
    from plugins.evaluations.harness_tasks import Tasks

MEAN, EXPONENTIAL, BITS = "mean", "exponential", "bits"
"""How a figure follows from a total and its weight."""


@technique(
    paper="lm-evaluation-harness, Gao et al., doi.org/10.5281/zenodo.12608602; arXiv:2405.14782",
    needs=(Package("lm_eval>=0.4.13,<0.5", extra="lm-eval"),),
)
class LMEvalHarness(Evaluation):
    """Runs tasks of lm-eval (`lm-evaluation-harness`) on the network as it is, without an export.

    Requests, few-shot examples, filters and metrics are lm-eval's; a network and the same one exported for transformers (`export
    --format hf`, then lm-eval's model `hf`) give the same log-probabilities up to rounding. Continuations that differ in their
    last token alone are computed once. Documents are shared among the ranks that have different data; ranks that share a model
    answer the same ones.

    A task is a YAML file, as lm-eval's documentation describes it, with `dataset_path: json` (csv, parquet, text) and
    `dataset_kwargs: {data_files: ...}`, relative to the file itself. A task folder is data here: its templates run in a sandbox, and
    `!function`, `class` and data sets with code are refused. For a folder of your own that has such, set `LEYDEN_TRUST` to the
    folder's name.

    Figures: those of the tasks (`acc`, `acc_norm`, `exact_match`, `word_perplexity`, `bits_per_byte`...), as means over all
    documents, and of each task as a group. A filter of the task is part of the name: `exact_match/strict-match`. Metrics that are
    no mean over documents, such as a corpus's `f1`, are left out, and a message says so.

    Args:
        folder: With the task files, in subfolders too; None: lm-eval's own tasks, whose data sets are where `datasets` finds them.
        tasks: Names of tasks, groups or tags; empty: all tasks of the folder.
        num_fewshot: Solved examples in front of each document; None: as each task says.
        limit: Documents of each task, from the first one; None: all.

    Raises:
        ConfigError: If there is no such task, a file of the folder cannot be used, or the tokenizer has no token that begins
            or ends a text.

    Example:
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                evaluations:
                  harness:
                    class_path: LMEvalHarness
                    init_args: {folder: tasks, limit: 500}
                every_n_steps: 1000
    """

    def __init__(
        self,
        folder: str | None = None,
        tasks: Sequence[str] = (),
        num_fewshot: int | None = None,
        limit: int | None = None,
    ) -> None:
        check_counts("LMEvalHarness", limit=limit)
        if num_fewshot is not None and num_fewshot < 0:
            raise ConfigError(f"LMEvalHarness.num_fewshot={num_fewshot} must be at least 0.")
        if folder is None and not tasks:
            raise ConfigError(
                "LMEvalHarness: give `folder`, a folder with task files, or `tasks` of lm-eval."
            )
        self.folder, self.tasks, self.num_fewshot, self.limit = folder, list(tasks), num_fewshot, limit

    @cached_property
    def _loaded(self) -> Tasks:
        from plugins.evaluations.harness_tasks import Tasks

        return Tasks(self.folder, self.tasks, self.num_fewshot, self.limit)

    def items(self, model: EvaluatedModel) -> list[Item]:
        """Returns the documents of all tasks, each with its requests."""
        check_prompts(model.network, [], 0)
        HarnessModel(model)
        found = []
        for name, task in self._loaded.tasks.items():
            kinds = _kinds(task)
            if left_out := [metric for metric, kind in kinds.items() if kind is None]:
                rank_zero_warn(
                    f"LMEvalHarness: {name}: {', '.join(left_out)} is no mean over documents: left out.",
                )
            if not any(kinds.values()):
                raise ConfigError(
                    f"LMEvalHarness: the task {name!r} has no metric that is a mean over documents."
                )
            for number, requests in _documents(task).items():
                content = [[one.request_type, *one.args] for one in requests]
                found.append(Item(f"{name}/{number}", content, name))
        return found

    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
        """Returns what the metrics of its task say of each document."""
        requests = {
            f"{name}/{number}": [replace(one, resps=[], filtered_resps={}) for one in ones]
            for name, task in self._loaded.tasks.items()
            for number, ones in _documents(task).items()
        }
        chosen = [requests[item.id] for item in items]
        _answer(HarnessModel(model), [one for ones in chosen for one in ones])
        with self._loaded.rendering():
            return [
                _measured(self._loaded.tasks[item.group], ones)
                for item, ones in zip(items, chosen, strict=True)
            ]

    @staticmethod
    def figures(sums: Mapping[str, float]) -> dict[str, float]:
        """Returns means over documents, and what lm-eval derives from them."""
        return dict(_figures(sums))


def _documents(task: Any) -> dict[int, list[Any]]:
    """Returns the requests of each document, in their order."""
    found: dict[int, list[Any]] = {}
    for request in task.instances:
        found.setdefault(request.doc_id, []).append(request)
    return {number: sorted(requests, key=lambda one: one.idx) for number, requests in found.items()}


def _kinds(task: Any) -> dict[str, str | None]:
    """Returns how each metric of a task follows from a total and a weight; None: it does not."""
    from lm_eval.api import metrics

    known = {
        metrics.mean: MEAN,
        metrics.nanmean: MEAN,
        metrics.perplexity: EXPONENTIAL,
        metrics.weighted_perplexity: EXPONENTIAL,
        metrics.bits_per_byte: BITS,
    }
    return {metric: known.get(function) for metric, function in task.aggregation().items()}


def _answer(model: HarnessModel, requests: Sequence[Any]) -> None:
    """Puts the responses into requests: as many into each as it says."""
    by_type: dict[str, list[Any]] = {}
    for request in requests:
        by_type.setdefault(request.request_type, []).append(request)
    for kind, some in by_type.items():
        repeated = [(one, number) for one in some for number in range(one.repeats or 1)]
        arguments = [one.args for one, _ in repeated]
        responses: Sequence[Any]
        if kind == "generate_until":
            responses = model.generate_until(arguments, [number for _, number in repeated])
        elif kind == "loglikelihood":
            responses = model.loglikelihood(arguments)
        else:
            responses = model.loglikelihood_rolling(arguments)
        for (one, _), response in zip(repeated, responses, strict=True):
            one.resps.append(response)


def _measured(task: Any, requests: Sequence[Any]) -> Measured:
    """Returns what the metrics of a task say of a document."""
    kinds, sums = _kinds(task), dict[str, float]()
    for pipeline in task._filters:
        pipeline.apply(requests)
        results = task.process_results(
            requests[0].doc, [one.filtered_resps[pipeline.name] for one in requests]
        )
        for metric, value in results.items():
            kind = kinds.get(metric, MEAN)
            total, weight = value if isinstance(value, tuple | list) else (value, 1)
            if kind is not None and not math.isnan(total):
                name = metric if pipeline.name == "none" else f"{metric}/{pipeline.name}"
                sums[f"{kind} {name}"], sums[f"weight {name}"] = float(total), float(weight)
    shown = (
        {"answers": [one.resps for one in requests]} if requests[0].request_type == "generate_until" else {}
    )
    return Measured(sums, shown)


def _figures(sums: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for key, total in sums.items():
        kind, _, name = key.partition(" ")
        if kind == "weight" or not sums.get(f"weight {name}"):
            continue
        mean = total / sums[f"weight {name}"]
        if kind == EXPONENTIAL:
            mean = math.exp(min(-mean, 700.0))
        elif kind == BITS:
            mean = -mean / math.log(2)
        yield name, mean
