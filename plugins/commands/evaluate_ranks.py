"""Evaluations of a checkpoint with the Trainer: on several processes, under the strategy that its options name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, IterableDataset

from core import catalog
from core.contracts import ChangesNetwork
from core.errors import ConfigError
from core.technique import technique
from plugins.checkpoints.checkpoint import stored_config
from plugins.checkpoints.kept_files import KEPT
from plugins.checkpoints.matching import stored_data
from plugins.checkpoints.stored_network import described
from plugins.cli.configuration.request import of_checkpoint
from plugins.cli.run_commands import quieten, started
from plugins.cli.runs.built_run import BuiltRun
from plugins.commands.chat_prompts import find_template
from plugins.commands.generate_network import Loaded
from plugins.commands.generate_shards import read_shards
from toolkit.class_labels import give_labels
from toolkit.evaluation import EvaluatedModel, Evaluation
from toolkit.evaluation_results import SetResult, check_items, evaluate
from toolkit.generation.prompts import PromptEncoder
from toolkit.generation.rows import evaluating
from toolkit.whole_networks import as_forward, gathered, ranks_of, sharding_faults

PLACES = ("accelerator", "devices", "num_nodes", "strategy")
"""What is taken of the Trainer's options in the checkpoint's configuration."""

SWITCHED_OFF = (
    "logger",
    "inference_mode",  # in which weights cannot be gathered for later
    "enable_checkpointing",
    "enable_model_summary",
    "enable_progress_bar",
)

VALIDATES = "--trainer.limit_val_batches=1"
"""Behind the user's options: Lightning skips a validation of 0 batches, in which evaluations are measured."""

READER = "plugins.checkpoints.atomic_checkpoint.AtomicCheckpoint"
"""Reads files and folders, as tensors and plain values only."""


OFFERS = (
    "answer_labels",
    "corrupted_spans",
    "labels",
    "masked_tokens",
    "preference_pairs",
    "reference_log_probabilities",
    "rollouts",
)
"""What objectives need of data and callbacks to train. Here they are built for their weights and predictions alone."""


@technique(paper="stands in for data in the selection of a run", offers=OFFERS)
class _NoBatches(LightningDataModule):
    """Stands in for the data of the run, which may be gone: a validation that has no batches.

    Args:
        path: The checkpoint, which knows the names of classes.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def setup(self, stage: str) -> None:
        """Gives the names of classes to the objective, as the run's data module did."""
        if names := stored_data(Path(self.path)).get("label_names"):
            give_labels(self.trainer.lightning_module, names)  # type: ignore[union-attr]

    def val_dataloader(self) -> DataLoader[Any]:
        """Returns a loader without batches and without a length: Lightning skips a validation of length 0."""
        return DataLoader(_Nothing(), batch_size=None)


class _Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Measuring(Callback):
    """Measures evaluations once, as the callback Evaluate does.

    Args:
        evaluations: By name.
        path: The checkpoint.
        batch_size: Rows that a rank computes at once.

    Attributes:
        found: Name -> result.
        model: What was measured, on this rank.
        writes: Whether this is the rank that writes the results.
    """

    found: Mapping[str, SetResult]
    model: EvaluatedModel
    writes: bool

    def __init__(self, evaluations: Mapping[str, Evaluation], path: Path, batch_size: int) -> None:
        self.evaluations, self.path, self.batch_size = evaluations, path, batch_size

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Measures; weights are on their ranks now."""
        self.writes = trainer.is_global_zero
        self.model = _model(pl_module, self.path, self.batch_size)
        check_items(self.evaluations, self.model)
        with evaluating(pl_module.network), evaluating(pl_module.objective):
            self.found = as_forward(trainer, pl_module, "evaluate_items", lambda: self._results(trainer))

    def _results(self, trainer: Trainer) -> dict[str, SetResult]:
        found, ranks = {}, ranks_of(trainer)
        with gathered(trainer, self.model.network):
            for name, one in self.evaluations.items():
                if trainer.is_global_zero:
                    print(f"# {name} ({type(one).__name__})", file=sys.stderr)
                found[name] = evaluate(name, one, self.model, ranks)
        return found


def measured(
    evaluations: Mapping[str, Evaluation], path: Path, words: Sequence[str], batch_size: int
) -> tuple[dict[str, SetResult], str, bool]:
    """Measures evaluations of a checkpoint with a Trainer.

    Args:
        evaluations: By name.
        path: The checkpoint, as `resolve` found it.
        words: The Trainer's options, `--trainer.devices=2` and so on.
        batch_size: Rows that a rank computes at once.

    Returns:
        The results by name, the tokenizer, and whether this is the rank that writes.

    Raises:
        ConfigError: If the selection does not fit, or an evaluation cannot be measured.
    """
    measuring = _Measuring(evaluations, path, batch_size)

    def make() -> BuiltRun:
        options = ["--verbose=false", *words, VALIDATES]
        request = of_checkpoint(_reduced(stored_config(path), path), options, path)
        quieten()
        # Lightning misses callbacks of the training run, which have nothing to do here.
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint.*")
        run = BuiltRun("validate", request, starts=True)
        if fault := next(sharding_faults(run.run_known, together=True), None):
            raise ConfigError(f"evaluate: {fault}")
        run.trainer.callbacks.append(measuring)  # type: ignore[attr-defined]
        return run

    started(make)
    return dict(measuring.found), measuring.model.tokenizer_json, measuring.writes


def _reduced(stored: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns of a run's configuration the network, what changes it, and where it is."""
    options = stored.get("trainer") or {}
    trainer = {name: options[name] for name in PLACES if name in options}
    for name, more in {"callbacks": [], "plugins": [{"class_path": READER}]}.items():
        parts = options.get(name)
        trainer[name] = (
            more + [one for one in parts if _changes_network(one)] if isinstance(parts, list) else more
        )
    trainer |= dict.fromkeys(SWITCHED_OFF, False) | {"default_root_dir": str(path.parent)}
    data = {
        "class_path": f"{_NoBatches.__module__}.{_NoBatches.__qualname__}",
        "init_args": {"path": str(path)},
    }
    return {"model": stored.get("model"), "trainer": trainer, "data": data}


def _changes_network(part: Any) -> bool:
    entry = catalog.by_class_path(part["class_path"]) if isinstance(part, Mapping) else None
    return entry is not None and isinstance(entry.load(), type) and issubclass(entry.load(), ChangesNetwork)


def _model(pl_module: Any, path: Path, batch_size: int) -> EvaluatedModel:
    """Returns what the command does on one process, with the network of a Trainer's module."""
    checkpoint, data = read_shards(path), stored_data(path)
    _, tokenizer, end = described(checkpoint, path)
    network = pl_module.network
    if "texts" in data:
        return EvaluatedModel(network, tokenizer, end, (), batch_size, pl_module.objective, data)
    model = Loaded(network, PromptEncoder(tokenizer), end, checkpoint.get(KEPT, {}))
    template = find_template(model, None)
    return EvaluatedModel(network, tokenizer, end, model.stop_ids, batch_size, None, data, template)
