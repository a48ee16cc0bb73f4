"""A summary at the end of a run: losses, speed, files, and commands to continue with."""

from __future__ import annotations

import math
import os
import shlex
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from callbacks.periodic_checkpoint import PeriodicCheckpoint
from core.contracts import HasUnigramLoss, KnowsCheckpoints
from core.technique import declaration_of, technique
from toolkit.local_paths import is_url

PRODUCTS = {
    "loss curve": "loss_curve.png",
    "samples": "samples.txt",
    "metrics": "metrics.csv",
    "configuration": "config.yaml",
}
"""Files of a run folder that are listed, if they exist."""


@technique(
    paper="perplexity beside the unigram entropy: Shannon, Prediction and Entropy of Printed English (1951)",
    after=("LossCurve", "ProgressBar", "TextSamples", "Throughput"),
    maturity="stable",
    observer=True,
)
class RunSummary(Callback):
    """Prints at the end of `fit`: losses, speed, where the files are, and two commands to continue with.

    The validation loss is shown with the entropy of the same text under token frequencies alone (`unigram_loss` of
    the data module): a model below it has learned something from context. Both are in nats per token; a loss in another
    `loss_unit`, such as that of preferences, is shown with its unit alone. If the loss is not of the last step, the step is named. A run that an exception ends gets one line instead: its
    folder and how to resume it.

    Example:
        trainer:
          callbacks+:
            - class_path: RunSummary
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._first_step = 0
        self._validated_step: int | None = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes which step's weights the validation loss is of."""
        if not trainer.sanity_checking:
            self._validated_step = trainer.global_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._began = time.monotonic()
        self._first_step = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the summary."""
        if not trainer.is_global_zero:
            return
        lines = [
            "",
            self._run_line(trainer, pl_module),
            *_loss_lines(trainer, pl_module, self._validated_step),
            "",
            *_product_lines(trainer),
            "",
            *_command_lines(trainer),
        ]
        console = Console(highlight=False, markup=False)
        for line in lines:
            console.print(line, soft_wrap=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Prints where the run folder is and how to resume the run."""
        if not trainer.is_global_zero or self._began is None:
            return
        folder = _shown(Path(trainer.default_root_dir))
        found, saver = _checkpoint(trainer), trainer.checkpoint_callback
        signalled = isinstance(exception, SIGTERMException)
        if signalled and trainer.global_step and isinstance(saver, PeriodicCheckpoint):
            found = saver.path_of(trainer.global_step)  # which it saves after this hook
        resume = f"resume it with: {_resume(trainer, found)}" if found else "it has no checkpoint yet"
        print(f"Stopped at step {trainer.global_step:,}. The run folder is {folder}; {resume}", flush=True)

    def _run_line(self, trainer: Trainer, pl_module: LightningModule) -> str:
        step = trainer.global_step
        if self._began is None:
            return f"Nothing was left to train: the run is at step {step:,}."
        seconds = timedelta(seconds=round(time.monotonic() - self._began))
        line = f"Trained to step {step:,}{_tokens(trainer, pl_module)}, in {seconds}"
        if self._first_step:
            line += f" since it was resumed at step {self._first_step:,}"
        speed = trainer.callback_metrics.get("throughput/median_tokens_per_second")
        return f"{line}." if speed is None else f"{line}; median {float(speed):,.0f} tokens/s."


def _tokens(trainer: Trainer, pl_module: LightningModule) -> str:
    """Returns the tokens seen, which the module counts at logged steps only; nothing before the first."""
    seen, logged = pl_module.tokens_seen, trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
    return f", {seen:,} tokens{'' if logged else ' by the last logged step'}" if seen else ""


def _loss_lines(trainer: Trainer, pl_module: Any, validated_step: int | None) -> list[str]:
    found = trainer.callback_metrics.get("val/loss")
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    unigram = data.unigram_loss if isinstance(data, HasUnigramLoss) else None
    if found is None:
        return ["Validation: none was run."]
    loss, unit = float(found), pl_module.objective.loss_unit
    perplexity = f", perplexity {math.exp(min(loss, 700.0)):,.1f}" if unit == "nats/token" else ""
    late = validated_step is not None and validated_step != trainer.global_step
    where = f", of step {validated_step:,}: none was run since" if late else ""
    lines = [f"Validation loss             {loss:.3f} {unit}{perplexity}{where}"]
    if unigram is None or not perplexity:
        return lines
    lines.append(f"Unigram entropy, same text  {unigram:.3f} nats/token, perplexity {math.exp(unigram):,.1f}")
    if loss < unigram:
        gain = f"{unigram - loss:.3f} nats per token"
        lines.append(f"The model uses context: it is {gain} better than token frequencies alone.")
    else:
        lines.append("The model is not better than token frequencies alone yet: train it longer.")
    return lines


def _product_lines(trainer: Trainer) -> list[str]:
    folder = Path(trainer.default_root_dir)
    products: dict[str, Path | str] = {
        name: folder / file for name, file in PRODUCTS.items() if (folder / file).exists()
    }
    if checkpoint := _checkpoint(trainer):
        products = {"checkpoint": checkpoint, **products}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            products["TensorBoard"] = Path(logger.log_dir)
    width = max(map(len, [*products, "run folder"]))
    rows = {"run folder": folder, **products}
    return [f"{name:<{width}}  {_shown(path)}" for name, path in rows.items()]


def _command_lines(trainer: Trainer) -> list[str]:
    checkpoint = _checkpoint(trainer)
    if checkpoint is None:
        return ["No checkpoint was saved: there is nothing to generate from or to resume."]
    network = getattr(trainer.lightning_module, "network", None)
    path, declared = shlex.quote(_shown(checkpoint)), declaration_of(type(network))
    what = f'generate --ckpt_path {path} --prompt "The"'
    if declared is not None and "bidirectional" in declared.offers:  # it continues no text
        what = f"export --ckpt_path {path} --output exported"
    return ["Next:", f"  python -m core {what}", f"  {_resume(trainer, checkpoint)} {_longer(trainer)}"]


def _resume(trainer: Trainer, checkpoint: Path | str) -> str:
    if isinstance(checkpoint, str):  # a URL, which a checkpoint alone does not have a run write to
        folder = shlex.quote(checkpoint.rpartition("/")[0])
        return f"python -m core fit --ckpt_path {folder} --callbacks.PeriodicCheckpoint.dirpath={folder}"
    place = Path(trainer.default_root_dir)
    if place.resolve() not in checkpoint.resolve().parents:  # `dirpath` of PeriodicCheckpoint
        place = checkpoint
    return f"python -m core fit --ckpt_path {shlex.quote(_shown(place))}"


def _longer(trainer: Trainer) -> str:
    """Returns the option that doubles the limit which ended the run."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if epochs is not None and epochs > 0 and (steps < 0 or trainer.global_step < steps):
        return f"--trainer.max_epochs {2 * epochs}"
    return f"--trainer.max_steps {2 * max(steps, trainer.global_step, 1)}"


def _checkpoint(trainer: Trainer) -> Path | str | None:
    """Returns the newest checkpoint of this run that is still there: a path, or a URL."""
    callback: Any = trainer.checkpoint_callback
    knows = isinstance(callback, KnowsCheckpoints)
    names = [callback.last_model_path, callback.best_model_path] if knows else []
    names.append(str(trainer.ckpt_path or ""))  # a finished run that was resumed wrote none itself
    if is_url(names[0]):
        return str(names[0])
    found = [Path(name) for name in names if name and Path(name).exists()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _shown(path: Path | str) -> str:
    """Returns the shortest form of a path: relative, if it is below the working directory; a URL as it is."""
    if is_url(str(path)):
        return str(path)
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
