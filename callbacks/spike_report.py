"""A report on a loss spike: the documents in its batch, the guilty one, the blocks that moved, and a picture."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from core import durable
from core.contracts import HasTokenizer, PausesClock
from core.data.token_datamodule import TokenDataModule
from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import technique
from toolkit import pictures
from toolkit.bounded import parse_json, read_inside
from toolkit.document_places import sources_of
from toolkit.hash_chains import group_of
from toolkit.outliers import OutlierWindow
from toolkit.replayed_steps import (
    Document,
    Measured,
    ReadAt,
    batches_of,
    documents_of,
    guilty,
    measure,
    update_norms,
)
from toolkit.trials import NOT_RESTORABLE, compatibility_errors, say
from toolkit.update_history import Departure, RecordsUpdates, departures, with_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

    from toolkit.selection import Run, Selected

ROLLBACKS = "spike_rollbacks.json"
"""What SpikeRollback writes into the run folder."""

SPIKE = ("loss", "gradient_norm", "loss_limit", "gradient_norm_limit")
"""What it says of a spike."""

REQUEST = "report-spike"
"""A file of this name in the run folder asks for a report on the last step."""

KEPT_STEPS = 256
"""Steps that a report may be on, and that its picture shows."""

LISTENERS = (
    "StepTime",
    "GradientNoiseScale",
    "ActivationMonitor",
    "AttentionMonitor",
    "LossBreakdown",
    "RoutingMonitor",
    "CollectiveMonitor",
    "Profile",
)
"""What listens to a step from the start of its batch on, which is when trial steps are made."""

CHARACTERS = 160
"""Shown of the text of a document."""


@technique(
    paper="PaLM, arXiv:2204.02311, section 5.1: spikes come from certain batches in a certain state; halving as in delta "
    "debugging, Zeller, FSE 1999",
    conflicts=NOT_RESTORABLE,
    after=("SpikeRollback",),
    before=LISTENERS,
    observer=True,
)
class SpikeReport(Callback):
    """Reports on a loss spike: which documents were in its batch, which of them is guilty, and which blocks it moves.

    A spike is what SpikeRollback takes for one, with the same defaults: a loss `sigma` deviations above the mean of its window,
    a gradient norm that is also `norm_factor` times its mean, or one that is not finite. It is judged on the device, and looked
    at where figures are logged. With SpikeRollback in the run, the report is written after the rollback, from the state before
    the spike; otherwise from the state that the run has. A file `report-spike` in the run folder asks for a report on the last
    logged step.

    For the report, trial steps are made on the batch: whole; and on halves of its documents, until one is left. It is named as
    guilty if without it the step loses at least half of what it is above the step before it. Then everything is
    restored: the run goes on as without the report. `spike_report/step-00000123.md` has the documents with source, place and
    the beginning of their text, a picture of loss and gradient norm, and, for each block, the norm of the
    update that the batch makes over that of the batch before, in trial steps. With WeightMonitor in the run, it also says from its record
    which block's update-to-weight ratio left its band first, and at which step; otherwise which block the trial step moves most.

    Which document a row is made of is known to Concatenate, BestFit and PaddedDocuments; of other packings, rows are cut
    at the ends of texts. Source and id are those of `documents.parquet`, where `prepare` has written one.

    Args:
        window: Steps of history; at least 2. No outlier is looked for until it is full.
        sigma: Standard deviations above the rolling mean that count as an outlier.
        norm_factor: How many times its rolling mean a gradient norm must be to count as an outlier.
        most: Reports that a run may write.

    Raises:
        ConfigError: If a value is out of range, or the data module is no TokenDataModule.

    Example:
        trainer:
          callbacks+:
            - class_path: SpikeReport
              init_args: {window: 64, sigma: 6.0}
    """

    def __init__(
        self, window: int = 64, sigma: float = 6.0, norm_factor: float = 10.0, most: int = 20
    ) -> None:
        if window < 2 or not sigma > 0 or norm_factor < 1 or most < 1:
            raise ConfigError(
                "SpikeReport takes window >= 2, sigma > 0, norm_factor >= 1 and most >= 1, not "
                f"{window}, {sigma}, {norm_factor} and {most}."
            )
        self.most = most
        self._window = OutlierWindow(2, window, sigma, rises=(0.0, norm_factor - 1))
        self._written = 0

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what trial steps do not work with."""
        yield from compatibility_errors(run)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Begins a history of figures and positions."""
        self._data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(self._data, TokenDataModule):
            raise ConfigError(
                f"SpikeReport: {type(self._data).__name__} does not record its position in the data."
            )
        self._window.to(pl_module.device)
        self._history = torch.full((5, KEPT_STEPS), torch.nan, device=pl_module.device)  # see `take`
        self._read: deque[ReadAt] = deque(maxlen=KEPT_STEPS * trainer.accumulate_grad_batches)
        self._cursor = self._batches.cursor
        self._step, self._looked = trainer.global_step, trainer.global_step
        self._due: dict[str, Any] | None = None
        self._seen = 0

    @property
    def _batches(self) -> Any:
        return self._data.training_loader.batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Writes a report that is due; notes where the batch was read."""
        if self._due is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            due, self._due = self._due, None
            self._report(trainer, pl_module, due)
        batches = self._batches
        at = ReadAt(trainer.global_step + 1, self._cursor, batches.sequence_length, batches.batch_size)
        self._read.append(at)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Judges the step, on the device."""
        outlier, figures, limits = self._window.take(pl_module.step_loss, pl_module.gradient_norm(optimizer))
        column = self._history[:, trainer.global_step % KEPT_STEPS]
        column[:2], column[2], column[3:] = figures, outlier, limits

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks for a spike where the host waits anyway, and for a rollback."""
        self._cursor = self._batches.cursor
        if is_accumulating(trainer):
            return
        step = trainer.global_step
        if step <= self._step:
            self._due, self._seen = self._of_rollback(trainer), self._step + 1
            self._looked = step
        elif pl_module.logging_step:
            self._due, self._seen = self._of_steps(trainer, step), step
            self._looked = step
        self._step = step
        if self._written >= self.most:
            self._due = None

    def _of_rollback(self, trainer: Trainer) -> dict[str, Any] | None:
        """Returns the spike that SpikeRollback has gone back from, on every rank."""
        spike = None
        if trainer.is_global_zero:
            try:
                last = parse_json(read_inside(Path(trainer.default_root_dir), ROLLBACKS))[-1]
                figures = [float(last[name]) for name in SPIKE]
                if int(last["rewound_to_step"]) == trainer.global_step:  # else something else went back now
                    spike = _spike(int(last["step"]), figures) | {"rewound": float(last["rewound_to_step"])}
            except (OSError, ValueError, KeyError, TypeError, IndexError):
                spike = None  # no rollback was recorded
        found: dict[str, Any] | None = trainer.strategy.broadcast(spike)
        return found

    def _of_steps(self, trainer: Trainer, step: int) -> dict[str, Any] | None:
        """Returns the first spike since the last look, or the step that was asked for; the same on every rank."""
        steps = range(max(self._looked, step - KEPT_STEPS) + 1, step + 1)
        table = self._history.cpu()
        spike = next((n for n in steps if table[2, (n - 1) % KEPT_STEPS] > 0), None)
        request = Path(trainer.default_root_dir, REQUEST)
        if trainer.is_global_zero and spike is None and request.is_file():
            request.unlink()
            spike = step
        if trainer.world_size > 1:
            spike = trainer.strategy.broadcast(spike)
        if spike is None:
            return None
        loss, norm, _, loss_limit, norm_limit = table[:, (spike - 1) % KEPT_STEPS].tolist()
        return _spike(spike, [loss, norm, loss_limit, norm_limit])

    def _report(self, trainer: Trainer, pl_module: Any, spike: dict[str, Any]) -> None:
        """Makes the trial steps and writes the report."""
        step = int(spike["step"])
        # the last reading of a step counts: after a rollback, steps come again
        last = max((i for i, at in enumerate(self._read) if at.step == step), default=-1)
        parts = [
            at for at in list(self._read)[: last + 1][-trainer.accumulate_grad_batches :] if at.step == step
        ]
        earlier = [at for at in list(self._read)[: last + 1 - len(parts)] if at.step == step - 1]
        earlier = earlier[-trainer.accumulate_grad_batches :]
        if len(parts) < trainer.accumulate_grad_batches or len(earlier) < len(parts):
            say(trainer, self, f"step {step:,} was read before this process began: there is no report.")
            return
        say(trainer, self, f"step {step:,}: trial steps on the documents of its batch ...")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PausesClock):
                callback.pause_clock()
        batch, before = batches_of(trainer, parts), batches_of(trainer, earlier)
        documents = documents_of(trainer, parts, batch)
        usual, whole = measure(trainer, before), measure(trainer, batch)
        found, trials = None, 0
        for by in spike["above"]:
            if found is None:
                found, more = guilty(trainer, batch, documents, usual, by)
                trials += more
        moved = _ratios(update_norms(trainer, batch, group_of), update_norms(trainer, before, group_of))
        texts = self._texts(batch, documents, trainer)
        self._written += 1
        if trainer.is_global_zero:
            rows = self._rows(documents, texts)
            named = (rows, found and documents.index(found), trials)
            self._write(trainer, spike, (usual, whole), named, (self._left(trainer, step), moved))

    def _left(self, trainer: Trainer, step: int) -> list[Departure] | None:
        """Returns the blocks that had left their band, by what was recorded; None if too little was."""
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        recorder = next((one for one in callbacks if isinstance(one, RecordsUpdates)), None)
        if recorder is None or recorder.update_history is None:
            return None
        history = recorder.update_history
        try:
            history = with_table(history, Path(trainer.default_root_dir, "metrics.csv"))
        except ConfigError as error:
            say(trainer, self, f"what the run recorded before it was resumed is left out: {error}")
        return departures(history, step)

    def _texts(self, batch: list[Any], documents: list[Document], trainer: Trainer) -> dict[int, str]:
        """Returns the beginning of the text of each document, of all ranks."""
        if not isinstance(self._data, HasTokenizer):
            return {}
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self._data.tokenizer_json)
        texts = {}
        for index, (part, *_) in enumerate(documents):
            if part.rank == self._batches.rank:
                row, begin, count = part.place[:3]
                ids = batch[part.micro_batch]["input_ids"][
                    row, begin : begin + min(count, CHARACTERS)
                ].tolist()
                text = " ".join(tokenizer.decode(ids).split())[:CHARACTERS]
                texts[index] = "".join(c if c.isprintable() else "?" for c in text)
        if trainer.world_size == 1:
            return texts
        gathered: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(gathered, texts)
        return {index: text for of_rank in gathered for index, text in of_rank.items()}

    def _rows(self, documents: list[Document], texts: dict[int, str]) -> list[tuple[str, ...]]:
        folder = getattr(self._data, "folder", None)
        numbers = [d[0].place.document for d in documents if d[0].place.document >= 0]
        sources = sources_of(Path(folder), "train", numbers) if folder is not None else {}
        rows: list[tuple[str, ...]] = []
        for index, parts in enumerate(documents):
            place = parts[0].place
            source, name = sources.get(place.document, ("", ""))
            number = f"{place.document:,}" if place.document >= 0 else "?"
            where = "; ".join(
                f"{p.rank}, {p.micro_batch}, {p.place.row}, {p.place.column}+{p.place.tokens}" for p in parts
            )
            rows.append(
                (where, number, f"{place.offset:,}", f"{source} {name}".strip(), texts.get(index, ""))
            )
        return rows

    def _write(
        self, trainer: Trainer, spike: dict[str, Any], figures: Any, documents: Any, blocks: Any
    ) -> None:
        step, folder = int(spike["step"]), Path(trainer.default_root_dir, "spike_report")
        (usual, whole), (rows, index, trials), (left, moved) = figures, documents, blocks
        name = f"step-{step:08d}"
        guilty_row = None if index is None else rows[index]
        text = as_markdown(spike, usual, whole, rows, guilty_row, trials, blocks, f"{name}.png")
        folder.mkdir(parents=True, exist_ok=True)
        pictures.save(draw(self._history.cpu().numpy(), step, self._seen, moved), folder / f"{name}.png")
        durable.write(folder / f"{name}.md", text)
        verdict = {"step": step, "guilty": guilty_row and list(guilty_row), "trials": trials, "blocks": moved}
        verdict["left_their_band"] = None if left is None else [one._asdict() for one in left]
        durable.write(folder / f"{name}.json", json.dumps(verdict, indent=1) + "\n")
        which = (
            f"guilty is document {guilty_row[1]} ({guilty_row[4][:60]!r})"
            if guilty_row
            else "no document is guilty alone"
        )
        say(trainer, self, f"step {step:,}: {which}; {folder / name}.md")


def _spike(step: int, figures: list[float]) -> dict[str, Any]:
    """Returns a spike, given loss, norm, and the limits of both; `above`: which of them make it one."""
    loss, norm, loss_limit, norm_limit = figures
    above = [
        name
        for name, value, limit in (("loss", loss, loss_limit), ("norm", norm, norm_limit))
        if not value <= limit
    ]
    return {"step": step, "loss": loss, "gradient_norm": norm, "above": above}


def _ratios(batch: dict[str, float], usual: dict[str, float]) -> dict[str, float]:
    ratios = {name: batch[name] / max(usual[name], 1e-30) for name in batch}
    return dict(sorted(ratios.items(), key=lambda item: -item[1]))


def as_markdown(
    spike: dict[str, Any],
    usual: Measured,
    whole: Measured,
    rows: list[tuple[str, ...]],
    guilty_row: tuple[str, ...] | None,
    trials: int,
    blocks: tuple[list[Departure] | None, dict[str, float]],
    picture: str,
) -> str:
    """Returns the report; `blocks` are those that left their band, and the ratios of updates in trial steps."""
    left, moved = blocks

    def cell(value: str) -> str:
        return value.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")

    rewound = f" Training went back to step {spike['rewound']:,.0f}." if "rewound" in spike else ""
    lines = [
        f"# Spike at step {spike['step']:,.0f}",
        "",
        f"Loss {spike['loss']:.4g}, gradient norm {spike['gradient_norm']:.4g}.{rewound}",
        f"Trial steps from the state of the report: this batch has loss {whole.loss:.4g} and gradient norm {whole.norm:.4g}, "
        f"the batch before loss {usual.loss:.4g} and gradient norm {usual.norm:.4g}.",
        "",
    ]
    if guilty_row:
        lines += [
            f"**Guilty: document {guilty_row[1]}** ({cell(guilty_row[3]) or 'source not recorded'}), found by {trials} trial steps:"
        ]
        lines += ["", f"> {cell(guilty_row[4])}", ""]
    else:
        lines += [
            f"No single document accounts for it ({trials} trial steps): look at rate, precision and the optimizer.",
            "",
        ]
    lines += [f"![Loss, gradient norm and updates]({picture})", "", *_moved_first(left, moved)]
    lines += ["", "## Updates by block, in trial steps", ""]
    lines += ["| block | update of this batch over that of the batch before |", "| --- | --- |"]
    lines += [f"| {name} | {ratio:.3g} |" for name, ratio in moved.items()]
    lines += [
        "",
        "## Documents",
        "",
        "| rank, micro-batch, row, place | document | from token | source | text |",
    ]
    lines += ["| --- | --- | --- | --- | --- |", *(f"| {' | '.join(map(cell, row))} |" for row in rows)]
    return "\n".join(lines) + "\n"


def _moved_first(left: list[Departure] | None, moved: dict[str, float]) -> list[str]:
    """Returns the part on the block that moved first, and where that is known from."""
    lines = ["## Which block moved first", ""]
    if left is None:
        most = next(iter(moved), "none")
        return [*lines, f"Not recorded (WeightMonitor records it). By the trial step: {most} moves most."]
    if not left:
        return [
            *lines,
            "Recorded by WeightMonitor: up to the spike, no block's update ratio had left its band.",
        ]
    lines += [f"Recorded by WeightMonitor: **{left[0].block}**, from step {left[0].step:,} on.", ""]
    lines += [
        "| block | outside since step | update over weight there | its band |",
        "| --- | --- | --- | --- |",
    ]
    return lines + [
        f"| {b} | {step:,} | {ratio:.3g} | {low:.3g} to {high:.3g} |" for b, step, ratio, low, high in left
    ]


def draw(history: np.ndarray, step: int, seen: int, moved: dict[str, float]) -> Figure:
    """Draws loss and gradient norm of the n steps up to `seen`, (3, n), the spike marked, and the updates by block."""
    figure = pictures.new_figure(9, 7)
    loss_axes, norm_axes, block_axes = figure.subplots(3, 1)
    width = history.shape[1]
    steps = np.arange(max(1, seen - width + 1), seen + 1)
    steps = steps[np.isfinite(history[2, (steps - 1) % width])]
    for axes, row, name in ((loss_axes, 0, "loss"), (norm_axes, 1, "gradient norm")):
        axes.plot(steps, history[row, (steps - 1) % width], color="tab:blue", linewidth=1.2)
        axes.axvline(step, color="tab:red", linewidth=1, linestyle="--", label="the spike")
        axes.set_ylabel(name)
        pictures.tidy(axes)
    norm_axes.set_yscale("log")
    norm_axes.set_xlabel("optimizer steps")
    loss_axes.set_title(f"Around step {step:,}", loc="left")
    loss_axes.legend(frameon=False)
    shown = dict(list(moved.items())[:12])
    names = [name.removeprefix("network.") for name in shown]
    block_axes.barh(names[::-1], [*shown.values()][::-1], color="tab:orange")
    block_axes.axvline(1.0, color="0.4", linewidth=1)
    block_axes.set_xlabel("update of this batch over that of the batch before")
    pictures.tidy(block_axes, grid=False)
    return figure
