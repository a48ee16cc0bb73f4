"""Evaluates the network during a run and at its end, with a report in the run folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from core.contracts import HasTokenizer, MarksEndOfText, PausesClock
from core.errors import ConfigError
from core.lightning_compat import collect_rng_states, set_rng_states
from core.technique import technique
from core.training.figures import log_figures
from toolkit.chat_template import EndsAnswers, HasTemplate
from toolkit.class_labels import Predicts
from toolkit.evaluation import EvaluatedModel, Evaluation
from toolkit.evaluation_report import write_report
from toolkit.evaluation_results import (
    FOLDER,
    Results,
    SetResult,
    check_items,
    check_names,
    digest,
    evaluate,
    flat_figures,
    write_results,
)
from toolkit.generation.rows import evaluating
from toolkit.whole_networks import as_forward, gathered, ranks_of, sharding_faults

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="evaluation in training, as OLMo-core's EvaluatorCallback; intervals: Efron 1979, Koehn 2004",
    after=("Throughput",),
    observer=True,
)
class Evaluate(Callback):
    """Evaluates the network every so many steps and at the end of the run, and writes a report with intervals.

    Each evaluation logs its figures as `eval/NAME/FIGURE`, those of groups (domains, sources) as `eval/NAME/GROUP/FIGURE`. The
    folder `evaluation` of the run has `report.md`, `report.html` with pictures inside, `results.csv` with the figures of all
    steps, and for each step `results.json` and what was measured of each item; `python -m core compare` tests runs against each
    other with these. `python -m core evaluate` does the same for a checkpoint.

    Training stays as it is to the last bit. Data-parallel ranks share the items. Each needs all weights, which FSDP gathers for an
    evaluation, or computes the same items with others that have the rest: under tensor, sequence, context, pipeline and expert
    parallelism and ZeRO's stage 3. The weights are those that validation sees: of a schedule-free optimizer the average.

    A mistake in an evaluation's arguments shows before training. An evaluation that fails during training, such as of a network that
    has diverged, is left out with a message, and the run goes on.

    Args:
        evaluations: Name -> evaluation.
        every_n_steps: Optimizer steps from one to the next; None: only at the end.
        batch_size: Rows that a rank computes at once.

    Raises:
        ConfigError: If a number or name is out of range, or the data module has no tokenizer.

    Example:
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                every_n_steps: 1000
                evaluations:
                  books:
                    class_path: Perplexity
                    init_args:
                      documents: {class_path: TextDocuments, init_args: {source: books}}
    """

    def __init__(
        self, evaluations: dict[str, Evaluation], every_n_steps: int | None = None, batch_size: int = 16
    ) -> None:
        check_names(evaluations, "Evaluate")
        for name, value in {"every_n_steps": every_n_steps, "batch_size": batch_size}.items():
            if value is not None and value < 1:
                raise ConfigError(f"Evaluate: {name} must be at least 1, not {value}.")
        self.evaluations, self.batch_size = evaluations, batch_size
        self.every_n_steps = every_n_steps
        self._done_at = -1

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error for strategies under which ranks cannot run the whole network."""
        yield from sharding_faults(run, together=True)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Reads what will be evaluated, so that mistakes show now."""
        check_items(self.evaluations, self._model(trainer, pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Notes the first step of the run: it was evaluated before, or has random weights."""
        self._done_at = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluates at multiples of `every_n_steps`."""
        if self.every_n_steps is None:
            return
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._done_at:
            self._evaluate(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Evaluates the final weights."""
        if trainer.global_step != self._done_at:
            self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: Trainer, pl_module: Any) -> None:
        self._done_at = trainer.global_step
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PausesClock):
                callback.pause_clock()
        model = self._model(trainer, pl_module)
        states = collect_rng_states(include_cuda=True)
        pl_module.on_validation_start()  # puts averaged weights into the network
        try:
            with evaluating(model.network), evaluating(pl_module.objective):
                found = as_forward(
                    trainer, pl_module, "evaluate_items", lambda: self._results(trainer, model)
                )
        finally:
            pl_module.on_validation_end()
            set_rng_states(states)
        if found:
            log_figures(trainer, flat_figures(found))
        if found and trainer.is_global_zero:
            tokens = pl_module.tokens_seen if pl_module.logging_step else None
            tokenizer = digest(model.tokenizer_json)
            results = Results(trainer.global_step, tokens, tokenizer, "", found)
            folder = Path(trainer.default_root_dir) / FOLDER
            try:
                write_results(results, folder)
                write_report(folder, results)
            except ConfigError as error:  # a full disk must not end the run
                print(f"Evaluate, step {trainer.global_step:,}: {error}", file=sys.stderr)

    def _results(self, trainer: Trainer, model: EvaluatedModel) -> dict[str, SetResult]:
        found = {}
        ranks = ranks_of(trainer)
        with gathered(trainer, model.network):
            for name, evaluation in self.evaluations.items():
                try:
                    found[name] = evaluate(name, evaluation, model, ranks)
                except ConfigError as error:  # the same on every rank
                    if trainer.is_global_zero:
                        print(f"Evaluate, step {trainer.global_step:,}: {error}", file=sys.stderr)
        return found

    def _model(self, trainer: Trainer, pl_module: Any) -> EvaluatedModel:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, HasTokenizer):
            raise ConfigError(
                f"Evaluate reads text, and {type(data).__name__} has no tokenizer (tokenizer_json). Take a data module of text."
            )
        end = data.end_of_text_id if isinstance(data, MarksEndOfText) else None
        stops = data.stop_ids if isinstance(data, EndsAnswers) else () if end is None else (end,)
        learns_labels = isinstance(pl_module.objective, Predicts)
        state: Mapping[str, Any] = data.state_dict() if learns_labels else {}
        return EvaluatedModel(
            pl_module.network,
            data.tokenizer_json,
            end,
            stops,
            self.batch_size,
            pl_module.objective,
            state,
            data.template if isinstance(data, HasTemplate) else None,
        )
