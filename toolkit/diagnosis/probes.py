"""What the doctor measures during a run, put together: before the first step, and in steps that are examined."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Trainer

from core.contracts import Batch, HasTokenizer, MarksEndOfText, PackedBatches
from core.data.token_datamodule import TokenDataModule
from core.pretrain_datamodule import PretrainDataModule
from core.training.loss_ranks import dp_size
from toolkit.diagnosis import data_probes, network_probes
from toolkit.diagnosis.comparisons import Comparisons
from toolkit.diagnosis.data_probes import SeenRows
from toolkit.diagnosis.gradient_probes import (
    GradientCheck,
    OptimizerState,
    between_steps,
    norms_of,
    ranks_apart,
)
from toolkit.diagnosis.parts import known_class
from toolkit.whole_networks import as_forward

__all__ = ["Probes"]

WHOLE = ("SingleDeviceStrategy", "DDPStrategy", "DDP")
"""Strategies under which every process has all weights."""

GATHERS = ("FSDP",)
"""Strategies that gather the weights of a block for its forward, where all ranks run the network together."""

ROWS = 8
"""Rows that are read at a time, however large the batches of the run are, and on which the network is examined."""

SPANS, LEAST_TOKENS, MOST_TOKENS = 4, 2**18, 2**22
"""So many times more batches are read to look for copies and validation text in them, of these tokens at least and at most."""

EXAMINED_TOKENS, LONGEST = 4096, 1024
"""Tokens on which the network is examined, and those of a row: all weights of attention and all logits are in memory at once."""


class Probes:
    """Measures; figures are of all ranks, but for those of batches, which are of rank 0's.

    Args:
        batches: Batches of 8 training rows that are read before the first step.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.stepped = self._is_whole = self._compares = False
        self._kept: list[tuple[Any, int]] = []
        self._fixed: Any = None
        self._plain = self._coarse = 0.0
        self._buffers: list[torch.Tensor] = []
        self._meant = 0
        self._products: list[tuple[int, bool]] = []
        self._check: GradientCheck | None = None
        self._state = OptimizerState()
        self.rows = SeenRows()
        self._source: data_probes.SourceFrequencies | None = None
        self._norms: list[list[float]] = []
        self._compared: Comparisons | None = None
        self._position: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next examined step goes on from."""
        rows = [self.rows.begin, *self.rows.numbers]
        state = {"rows": rows, "norms": [list(each) for each in self._norms]}
        return state | {"position": self._compared.cursor() if self._compared is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state."""
        self.rows.begin, *self.rows.numbers = state["rows"]
        self._norms = [list(each) for each in state["norms"]]
        self._position = state.get("position")

    def sizes(self, trainer: Trainer, module: Any) -> list[float]:
        """Returns the norms of the weights; nothing where no process has them."""
        if known_class(type(trainer.strategy)).__name__ not in WHOLE:
            return []
        return norms_of(
            [p.detach() for p in module.network.parameters() if p.is_floating_point()]
        )  # others are quantised

    def not_restored(self, trainer: Trainer, module: Any, sizes: Sequence[float]) -> float:
        """Returns the share of the weights' tensors whose norms are not those of the checkpoint."""
        now = self.sizes(trainer, module)
        apart = [abs(a - b) > 1e-3 * b for a, b in zip(now, sizes, strict=False)]
        return sum(apart) / len(apart) if apart and len(now) == len(sizes) else 0.0

    def is_odd(self, batch: Any, optimizer: Any, rates: Sequence[float]) -> bool:
        """Returns whether the first step after a resume has the rows that the run began with, or a rate of its own.

        Args:
            batch: The first micro-batch.
            optimizer: With the rate of the step.
            rates: The ones that were logged before.
        """
        anew = _has_labels(batch) and self.rows.begins_anew(batch)
        rate = optimizer.param_groups[0]["lr"]
        return anew or bool(rates and rates[-1] > 0 and abs(rate / rates[-1] - 1) > 0.3)

    def kept_state(self) -> list[float]:
        """Returns numbers of what the optimizer keeps, for a checkpoint; nothing where it is not compared."""
        return self._compared.state() if self._compared is not None else []

    def start(
        self,
        trainer: Trainer,
        module: Any,
        is_fresh: bool,
        config: Mapping[str, Any] | None = None,
        restored: Sequence[float] = (),
    ) -> dict[str, float]:
        """Returns figures of the data, and of what the network sees; every rank reads the same rows.

        Args:
            trainer: The trainer.
            module: Its LanguageModule.
            is_fresh: Whether the run begins; one that is resumed was looked at when it began.
            config: The run's configuration.
            restored: What `kept_state` returned when the checkpoint was written.
        """
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._kept, self._check, self._fixed, self.stepped = [], None, None, False
        self._state = OptimizerState()
        whole, figures = known_class(type(trainer.strategy)).__name__ in WHOLE, dict[str, float]()
        validation: list[Batch] = []
        self._is_whole = whole
        examines = whole and module.network.output_weight is not None
        if isinstance(data, TokenDataModule) and data.training_loader is not None and self.batches:
            validation = _read(data.val_dataloader().batches, self.batches)
            if examines and validation and _has_labels(validation[0]):
                self._fixed = trainer.strategy.batch_to_device(first_tokens(validation[0]))
            training = _read(_coming(data), self._count(data.sequence_length)) if is_fresh else []
            if training and _has_labels(training[0]):
                self.rows.begin = SeenRows.number(training[0])
                figures |= self._of_data(data, training, validation)
                if examines or self._gathers(trainer, module):
                    figures |= self._seen(trainer, module, first_tokens(_divided(training)))
        untrained = is_fresh and trainer.global_step == 0  # else it was added to a run that goes on
        if untrained and self._fixed is not None:
            state = network_probes.inner_state(module.network, self._fixed)
            state |= network_probes.backward_gains(module.network, self._fixed)
            figures |= {name.replace("doctor/", "doctor/initial_"): value for name, value in state.items()}
            figures |= network_probes.unsteadiness(module.network, self._fixed, is_first=True)
        if untrained and whole:
            figures |= network_probes.weights_at_start(module.network)
            if missing := network_probes.not_optimized(module.network, trainer.optimizers):
                figures["doctor/not_optimized"] = missing
        self._compared = Comparisons(config or {}, trainer, module, whole)
        return figures | self._compared.start(untrained, self._position, restored, validation, ROWS)

    def begin_batch(self, batch: Any) -> None:
        """Counts a micro-batch."""
        if self._compared is not None:
            self._compared.begin_batch(batch)

    def end_batch(self, batch: Any, is_logged: bool) -> dict[str, float]:
        """Returns the figures of a step that is compared, behind its last micro-batch."""
        return self._compared.after_step(batch, is_logged) if self._compared is not None else {}

    def in_validation(self, batch: Any) -> dict[str, float]:
        """Returns figures of the first batch of a validation, where it is compared."""
        return self._compared.in_validation(batch) if self._compared is not None else {}

    def pause(self) -> None:
        """Leaves the time until the next batch out."""
        if self._compared is not None:
            self._compared.pause()

    def close(self) -> None:
        """Takes hooks away."""
        if self._compared is not None:
            self._compared.close()

    def _count(self, length: int) -> int:
        """Returns how many batches of training rows of so many tokens are read."""
        tokens = ROWS * length
        spans = max(SPANS * self.batches, LEAST_TOKENS // tokens)
        return max(self.batches, min(spans, MOST_TOKENS // tokens))

    def _gathers(self, trainer: Trainer, module: Any) -> bool:
        gathers = known_class(type(trainer.strategy)).__name__ in GATHERS
        return gathers and module.network.output_weight is not None

    def _seen(self, trainer: Trainer, module: Any, batch: Mapping[str, Any]) -> dict[str, float]:
        """Returns what the network sees of a batch, which is the same on every rank."""
        look = partial(
            network_probes.visibility, module.network, trainer.strategy.batch_to_device(dict(batch))
        )
        return look() if self._is_whole else as_forward(trainer, module, "look", look)

    def _of_data(self, data: Any, read: Sequence[Batch], validation: Sequence[Batch]) -> dict[str, float]:
        loader = data.training_loader
        epoch = max(len(loader) * loader.batches.batch_size * loader.batches.world_size // ROWS, 1)
        read = read[:epoch]
        training = read[: self.batches]
        counts = data_probes.label_counts(training)
        counts |= data_probes.repeated_rows(read)
        counts |= data_probes.common_text(
            read, data.end_of_text_id if isinstance(data, MarksEndOfText) else None
        )
        counts |= data_probes.position_counts(training, data.end_of_text_id)
        counts |= data_probes.seen_spans(validation, read, len(read) / epoch)
        if len(training) >= 8:
            counts |= data_probes.neighbours(training, data.vocab_size)
        if isinstance(data, HasTokenizer):
            counts |= data_probes.round_trips(training[:2], data.tokenizer_json)
            if isinstance(data, PretrainDataModule) and not data.prepared and not data.options["transforms"]:
                documents = data.reader(data.source).documents()
                self._source = data_probes.SourceFrequencies(documents, data.tokenizer_json)
                frequencies = self._source.frequencies(training, data.vocab_size)
                return data_probes.figures_of(counts) | self._source.figures(frequencies)
        return data_probes.figures_of(counts)

    def keep(self, module: Any, batch: Any, index: int, compares: bool) -> None:
        """Keeps a micro-batch of a step that is examined, and where it can be, compared with leyden's own parts."""
        if not self._kept:
            self._meant = 0
            self._buffers = network_probes.copied_buffers(module.network) if self._is_whole else []
        self._kept.append((batch, index))
        data: Any = module.trainer.datamodule
        if isinstance(data, TokenDataModule) and data.training_loader is not None:
            # now, as a schedule may change it before the step ends
            self._meant += data.training_loader.batches.batch_size
        self._compares = compares

    def between(self, module: Any) -> dict[str, float]:
        """Returns what happened to the weights since the last examined step, in the step after it; else nothing."""
        norms, self._norms = self._norms, []
        found = between_steps(module, norms) if norms else {}
        if self._compared is not None:
            first: Any = self._kept[0][0] if self._kept and self._compares else {}
            found |= self._compared.before_step(first_tokens(first) if _has_labels(first) else None)
        return found

    def before_step(self, trainer: Trainer, module: Any) -> None:
        """Computes the gradients of the kept micro-batches again."""
        self.stepped = True
        self._state.before_step(trainer.optimizers[0])
        batch = self._kept[0][0]
        if (
            self._fixed is None
            and self._is_whole
            and module.network.output_weight is not None
            and _has_labels(batch)
        ):
            row = {name: value[:1].cpu() for name, value in first_tokens(batch).items()}
            self._fixed = trainer.strategy.batch_to_device(trainer.strategy.broadcast(row))
        if self._is_whole:
            self._products, network = [], module.network
            mixed = "mixed" in str(trainer.precision)
            with (
                network_probes.kept_buffers(network, self._buffers),
                network_probes.products(network, self._products) if mixed else nullcontext(),
            ):
                self._check = GradientCheck(module, self._kept, trainer.gradient_clip_val)  # type: ignore[arg-type]
            self._coarse = network_probes.coarse_share(network)  # as the step has used them
            self._plain = network_probes.plain_loss(module, [batch for batch, _ in self._kept])

    def after_step(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Returns the figures of an examined step."""
        figures, kept = dict[str, float](), [batch for batch, _ in self._kept]
        self._kept, self._buffers, self.stepped = [], [], False
        if kept and _has_labels(kept[0]):
            figures |= self._of_batches(trainer, module, kept)
        if self._check is not None:
            norm = float(module.gradient_norm(trainer.optimizers[0])) if module.logging_step else None
            figures |= self._check.figures(norm)
            figures["doctor/plain_loss"] = self._plain
            self._norms = self._check.norms()
            figures["doctor/frozen"] = network_probes.frozen_share(module.network)
            figures["doctor/weights_coarse"] = self._coarse
            if size := sum(size for size, _ in self._products):
                figures["doctor/past_autocast"] = sum(size for size, wide in self._products if wide) / size
            self._check = None
        if self._is_whole:
            figures["doctor/ranks_apart"] = ranks_apart(module)
        if self._fixed is not None:
            figures |= network_probes.inner_state(module.network, self._fixed)
            figures |= network_probes.backward_gains(module.network, self._fixed)
            figures |= network_probes.unsteadiness(module.network, self._fixed)
        figures |= self._state.figures(trainer.optimizers[0], trainer.global_step)
        return figures | self.anchor(module)

    def _of_batches(self, trainer: Trainer, module: Any, kept: Sequence[Batch]) -> dict[str, float]:
        """Returns figures of the batches of a step, of all ranks."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]

        def total(values: Any) -> Any:
            return module.sum_over_ranks(
                torch.as_tensor(values, dtype=torch.float64, device=module.device)
            ).cpu()

        counts = data_probes.label_counts(kept) | data_probes.position_counts(
            kept, data.end_of_text_id if isinstance(data, MarksEndOfText) else None
        )
        if isinstance(data, HasTokenizer):
            counts |= data_probes.round_trips(kept, data.tokenizer_json)
        sums = total([counts[name] for name in counts]).tolist()
        figures = data_probes.figures_of({name: (*pair,) for name, pair in zip(counts, sums, strict=True)})
        if self._meant:
            rows = sum(len(batch["input_ids"]) for batch in kept)
            figures["doctor/rows_given"] = float(total(rows)) / (self._meant * dp_size(trainer))
        if self._source is not None:
            figures |= self._source.figures(total(self._source.frequencies(kept, data.vocab_size)).numpy())
        if self._is_whole:
            number = torch.tensor(float(SeenRows.number(kept[0])), dtype=torch.float64, device=module.device)
            ranks = module.all_gather(number).flatten() if trainer.world_size > 1 else number[None]
            figures["doctor/ranks_alike"] = (
                1 - (ranks.unique().numel() - 1) / max(len(ranks) - 1, 1) if len(ranks) > 1 else 0.0
            )
        return figures | self.rows.add(kept[0])

    def anchor(self, module: Any) -> dict[str, float]:
        """Returns the loss of a batch that stays the same."""
        if self._fixed is None:
            return {}
        return {"doctor/anchor_loss": network_probes.plain_loss(module, [self._fixed])}


def _divided(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns `ROWS` rows, those with several documents first."""
    rows = {name: torch.cat([batch[name] for batch in batches[: 4 * ROWS]]) for name in batches[0]}
    number = data_probes.document_numbers(rows)
    if number is None:
        return {name: value[:ROWS] for name, value in rows.items()}
    order = number.amax(1).argsort(descending=True, stable=True)
    return {name: value[order[:ROWS]] for name, value in rows.items()}


def first_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first tokens of the first rows of a batch."""
    count, length = batch["input_ids"].shape
    length = min(length, LONGEST)
    rows = max(1, min(count, EXAMINED_TOKENS // length))
    shape = batch["input_ids"].shape
    return {
        name: value[:rows, :length] if value.shape[:2] == shape else value[:rows]
        for name, value in batch.items()
    }


def _coming(data: TokenDataModule) -> PackedBatches:
    """Returns the coming training batches, made anew: a packing that keeps a position of its own is not moved."""
    loader: Any = data.training_loader
    order = {
        "shuffle": data.shuffle and loader.begin is None,
        "seed": data.seed,
    }  # as `train_dataloader` says it
    length = loader.batches.sequence_length
    batches = data.packed("train", sequence_length=length, batch_size=ROWS, rank=0, world_size=1, **order)
    batches.cursor = copy.deepcopy(loader.batches.cursor)
    return batches


def _read(batches: PackedBatches, count: int) -> list[Batch]:
    """Returns the coming rows in batches of `ROWS`, the same on every rank."""
    batches.batch_size, batches.rank, batches.world_size = ROWS, 0, 1
    return [batch for _, batch in islice(batches, count)]


def _has_labels(batch: Batch) -> bool:
    """Returns whether each token of a batch may have a label: not so for encoders with decoders, and for pairs."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    return ids is not None and labels is not None and ids.shape == labels.shape
