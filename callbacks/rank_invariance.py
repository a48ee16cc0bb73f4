"""The same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor

from core.contracts import PackedBatches
from core.data.token_datamodule import TRAIN_ON, TokenDataModule
from core.errors import ConfigError
from core.language_module import GRADIENT_TOKENS
from core.lightning_compat import replace_closure, restore_closure, zero_gradients
from core.technique import technique
from core.training.loss_ranks import scale_gradients
from core.training.seeding import mix, seed_generators
from toolkit.ordered_sums import NOTHING, OrderedSums, SumsInOrder, Turn
from toolkit.trials import say

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

CUT_UP = dict.fromkeys(
    ("HybridParallel", "DeepSpeedZero", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"),
    "it adds gradients, or cuts products, in an order that depends on the number of ranks: take DDP or FSDP",
)
STRATEGY_OPTIONS: dict[str, tuple[Any, str]] = {
    "compression": ("none", "none"),
    "static_graph": (False, "false"),
    "find_unused_parameters": (False, "false"),
    "replicas": (1, "1"),
}
"""Option of DDP or FSDP -> the value that gradients in order need, and how it is written."""

BY_SHARD = {
    "Adafactor": "adds squares shard by shard",
    **dict.fromkeys(
        ("AdamW8bit", "Lion8bit", "PagedAdamW8bit", "TorchaoAdamW8bit"), "quantises blocks of a shard"
    ),
}
"""Optimizers that compute other bits under FSDP than in one process."""

MEASURED = "On two CPU ranks steps took 1.06 to 1.34 times as long as with plain accumulation; GPUs are not measured."
"""tests/benchmarks/RESULTS.md, rank_invariance."""


@technique(
    paper="the order of sums as the cause: Demmel and Nguyen, Fast Reproducible Floating-Point Summation, ARITH 2013",
    owns=("batch_size", "gradient_accumulation"),
    offers=("global_batch",),
    conflicts=CUT_UP
    | {
        "OOMGuard": "both decide how a step is cut into micro-batches",
        "GradientNoiseScale": "it compares micro-batches in the order of their ranks",
        "SequenceLengthSchedule": "it gives each rank rows of its own choice: train with one length",
        "KTO": "its loss takes an average over the micro-batches that ranks compute at the same time",
        "Rollouts": "each rank samples answers with random numbers of its own",
        "SpikeReport": "it looks for documents in the rows of one rank, which are dealt out in another way here",
    },
    before=("LRFinder", "RandomRestart"),
)
class RankInvariance(Callback):
    """Trains with the same bits on any number of ranks: those of one process with gradient accumulation.

    A step is `micro_batches` micro-batches of `data.batch_size` rows, on however many ranks there are, and nothing of a
    configuration changes with them. Micro-batch u goes to rank u mod ranks. After each round of micro-batches the gradients
    of rank 0, 1, 2... are added to those of the step in that order, which is the order of one process: the sums are plain
    float32 sums, and any number of ranks, also one that does not divide `micro_batches`, computes the same. A run that
    is resumed on other ranks, or with DDP in place of FSDP, goes on as if nothing had changed. Random numbers of dropout
    follow from the micro-batch's number, and the norm of gradients is that of full gradients.

    The price: gradients are exchanged after each micro-batch, not once a step, and not during backward under DDP. What
    that comes to is printed when training begins. Under FSDP, which exchanges them as often anyway, the norm gathers each
    gradient once a step.

    The same bits take the same kernels: the same device model, `threads` on a CPU, `trainer.deterministic` on CUDA. On a CPU
    optimizers step without torch's fused kernels, which round by a tensor's place in a shard: a run without the technique has
    these bits with `model.optimizer.fused: false`.
    `val/loss` agrees where validation is not cut short: `trainer.limit_val_batches` counts each rank's batches.
    Figures are sums in float64, which are exact unless losses of micro-batches differ by a factor of 10^5 and more. A schedule
    in tokens needs ranks that divide `micro_batches`; StochasticDepth computes other rows under FSDP than under DDP.

    Args:
        micro_batches: Micro-batches of an optimizer step, of all ranks together; at least one for each rank.
        threads: Threads of a rank on a CPU, on which the order of sums within an operation depends.

    Raises:
        ConfigError: If a number is below 1, there are more ranks than micro-batches, or the data module does not read
            stored tokens.

    Example:
        trainer:
          callbacks+:
            - class_path: RankInvariance
              init_args: {micro_batches: 8}
    """

    def __init__(self, micro_batches: int, threads: int = 1) -> None:
        for name, value in {"micro_batches": micro_batches, "threads": threads}.items():
            if value < 1:
                raise ConfigError(f"RankInvariance: {name} is {value}; it must be at least 1.")
        self.micro_batches, self.threads = micro_batches, threads
        self._turn = Turn()
        self._seed: int | None = None
        self._sums: OrderedSums | None = None
        self._sharded = False
        self._undo: list[Callable[[], Any]] = []
        self._restore_loss: Callable[[], Any] = lambda: None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what of the run computes other bits on other ranks."""
        if (count := own.arguments.get("micro_batches", 1)) < run.world_size:
            yield f"micro_batches is {count} on {run.world_size} ranks, some of which would have nothing to compute"
        for name, (value, written) in STRATEGY_OPTIONS.items():
            found = run.argument(f"trainer.strategy.{name}")
            if found is not None and found != value:
                yield f"it adds gradients rank by rank, which {name}={found} does not: set --trainer.strategy.{name}={written}"
        word = run.argument("trainer.strategy")
        if isinstance(word, str) and "find_unused_parameters_true" in word:
            yield "it adds the gradients of all parameters: take --trainer.strategy=ddp"
        reduced = run.argument("trainer.strategy.reduce_format") or run.argument(
            "trainer.strategy.param_format"
        )
        if reduced not in (None, "fp32"):
            yield f"gradients of the step would be added in {reduced}: set --trainer.strategy.reduce_format=fp32"
        yield from _sharded_errors(run, count)
        if run.accelerator == "cuda" and run.argument("trainer.deterministic") is not True:
            yield "kernels of CUDA may add in any order: set --trainer.deterministic=true"
        data: Any = next((item.target for item in run.selected if item.key == "data"), TokenDataModule)
        if isinstance(data, type) and not issubclass(data, TokenDataModule):
            yield f"it deals out rows of stored tokens, which {data.__name__} does not read: {TRAIN_ON}"

    # -- before training ----------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Deals out the rows of a step by micro-batches, and fixes what operations depend on."""
        if stage != "fit":
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TokenDataModule):
            raise ConfigError(
                f"RankInvariance: it deals out rows of stored tokens, which {type(data).__name__} does not read.\n{TRAIN_ON}."
            )
        if trainer.world_size > self.micro_batches:
            raise ConfigError(
                f"RankInvariance: micro_batches is {self.micro_batches} on {trainer.world_size} ranks; there must be one for each."
            )
        module: Any = pl_module
        self._replace(data, "packed", partial(self._packed, trainer, data.packed))
        if trainer.strategy.root_device.type == "cpu":
            self._undo.append(partial(torch.set_num_threads, torch.get_num_threads()))
            torch.set_num_threads(self.threads)
            drops = any(type(each).__name__ == "SkipStep" for each in trainer.callbacks)  # type: ignore[attr-defined]
            if not drops:
                build = module.build_optimizer
                self._replace(module, "build_optimizer", lambda groups: _without_fused_kernel(build(groups)))

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        self._undo.append(_replaced(owner, name, by))

    def _packed(
        self, trainer: Trainer, plain: Callable[..., PackedBatches], split: str, **order: Any
    ) -> PackedBatches:
        if split != "train":
            return plain(split, **order)
        rows, rank, ranks = order["batch_size"], order["rank"], order["world_size"]
        step = {"batch_size": rows * self.micro_batches, "rank": 0, "world_size": 1}
        batches = plain(split, **order | step)
        own = [
            row
            for unit in range(rank, self.micro_batches, ranks)
            for row in range(unit * rows, (unit + 1) * rows)
        ]
        for name in ("read", "chunks", "places"):
            if hasattr(batches, name):
                setattr(batches, name, _OwnRows(batches, name, own, step["batch_size"]))
        return batches

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undoes what `setup` did."""
        while self._undo:
            self._undo.pop()()

    # -- training -----------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replaces the functions that compute the gradients of a step and the loss, and prints the price."""
        module: Any = pl_module
        module.in_parts = True
        [optimizer] = trainer.optimizers
        strategy = trainer.strategy
        self._sharded = isinstance(strategy, SumsInOrder)
        if isinstance(strategy, SumsInOrder):
            strategy.sum_in_order(self._turn)
        elif trainer.world_size > 1:
            self._sums = OrderedSums([p for group in optimizer.param_groups for p in group["params"]])
        # Here, around what others have made of the loss: a compiled one would be compiled again for each seed.
        seeded = partial(self._compute_loss, module, module.compute_loss)
        self._restore_loss = _replaced(module, "compute_loss", seeded)
        replace_closure(
            trainer,
            lambda kwargs: Closure(
                lambda: self._gradients(trainer, optimizer, kwargs["batch"], kwargs["batch_idx"])
            ),
        )
        say(trainer, self, self._price(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the functions."""
        restore_closure(trainer)
        self._restore_loss()
        self._restore_loss = lambda: None
        module: Any = pl_module
        module.in_parts, self._sums = False, None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the functions, and undoes what `setup` did: Lightning calls none of the hooks that do so then."""
        if self._undo:
            self.on_train_end(trainer, pl_module)
            self.teardown(trainer, pl_module, "fit")

    def _price(self, trainer: Trainer) -> str:
        rounds, ranks = self._rounds(trainer), trainer.world_size
        text = f"{self.micro_batches} micro-batches a step on {ranks} rank{'s' if ranks > 1 else ''}"
        if self._sums is not None:
            text += f"; gradients take {(rounds + 1) / 2:g} times the bytes of an all-reduce, and are not sent during backward"
        idle = 1 - self.micro_batches / (rounds * ranks)
        text += f"; ranks have nothing to compute for {idle:.0%} of the time." if idle else "."
        return text + (f" {MEASURED}" if ranks > 1 else "")

    def _rounds(self, trainer: Trainer) -> int:
        return -(-self.micro_batches // trainer.world_size)

    def _gradients(self, trainer: Trainer, optimizer: Any, batch: Any, number: int) -> ClosureResult:
        """Computes the gradients of a step from this rank's rows of it."""
        module: Any = trainer.lightning_module
        rank, ranks = trainer.global_rank, trainer.world_size
        own = _cut(batch, len(range(rank, self.micro_batches, ranks)))
        self._turn.step += 1
        zero_gradients(trainer, number, optimizer)
        if self._sums is not None:
            self._sums.begin()
        losses: list[Tensor] = []
        for turn in range(self._rounds(trainer)):
            unit = turn * ranks + rank
            self._turn.number = turn
            self._turn.idle = unit >= self.micro_batches
            if turn and ranks > 1:
                optimizer.zero_grad()  # the strategy, or `_sums`, has what there is
            if not self._turn.idle:
                index = number * self.micro_batches + unit
                losses.append(self._micro_batch(trainer, optimizer, own[turn], index))
            elif self._sums is None:  # sharded: the others need this rank's weights
                kept = module.train_sums.copy(), module.step_sums
                self._micro_batch(trainer, optimizer, own[0], number * self.micro_batches)
                module.train_sums, module.step_sums = kept
            if self._sums is not None:
                self._sums.add(self._turn.idle)
        if self._sums is not None:
            self._sums.finish()
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is None):
            parameter.grad = torch.full_like(parameter, NOTHING)  # as `_sums` does, on any number of ranks
        self._weigh(trainer, optimizer)
        return ClosureResult(torch.stack(losses).sum())

    def _micro_batch(self, trainer: Trainer, optimizer: Any, rows: Any, index: int) -> Tensor:
        """Computes the gradients of one micro-batch; its number in the epoch gives its random numbers."""
        module: Any = trainer.lightning_module
        self._seed = mix(module.seed, module.current_epoch, index, 0)  # as rank 0 of one
        try:
            if self._sharded:
                output: Any = trainer.strategy.training_step(rows, index)  # type: ignore[attr-defined]
            else:  # not through DDP's forward, which would average
                with trainer.precision_plugin.train_step_context():
                    output = module.training_step(rows, index)
        finally:
            self._seed = None
        loss: Tensor = output / self.micro_batches
        trainer.strategy.backward(loss, optimizer)
        return loss.detach()

    def _compute_loss(self, module: Any, plain: Callable[[Any], Any], batch: Any) -> Any:
        if self._seed is not None:
            seed_generators(self._seed, module.device)
        return plain(batch)

    def _weigh(self, trainer: Trainer, optimizer: Any) -> None:
        """Divides by the label tokens of the step, as LanguageModule does for one process."""
        module: Any = trainer.lightning_module
        total, weight = module.sum_over_ranks(module.step_sums).unbind()
        module.step_sums = None  # done
        weight = torch.where(weight > 0, weight, torch.ones_like(weight))
        module.step_loss = total / weight
        factor = GRADIENT_TOKENS * self.micro_batches / weight.to(torch.float32)
        scale_gradients(trainer, optimizer, factor)


def _replaced(owner: Any, name: str, by: Any) -> Callable[[], Any]:
    """Sets an attribute of an object; returns what undoes it."""
    mine = vars(owner).get(name)
    setattr(owner, name, by)
    return (lambda: setattr(owner, name, mine)) if mine else (lambda: delattr(owner, name))


def _sharded_errors(run: Run, micro_batches: int) -> Iterator[str]:
    names = {item.name for item in run.selected}
    if "FSDP" not in names:
        return
    precision, format = run.argument("trainer.precision"), run.argument("trainer.strategy.param_format")
    if format is None and (
        str(precision) in ("bf16", "bf16-mixed") or names & {"Float8", "TransformerEngine"}
    ):
        yield (
            "FSDP would gather weights, and add gradients, in bf16, which one process and DDP keep in float32: set "
            "--trainer.strategy.param_format=fp32"
        )
    for name in sorted(names & BY_SHARD.keys()):
        yield f"{name} {BY_SHARD[name]}, which depends on the number of ranks: take AdamW, or DDP"
    if "SkipStep" in names and run.accelerator == "cpu" and run.world_size > 1:
        yield "SkipStep needs a fused optimizer, which on a CPU rounds by the place in a shard: take --trainer.strategy=ddp"
    if "BiasBalancing" in names and micro_batches % run.world_size:
        yield (
            f"{run.world_size} ranks do not divide micro_batches={micro_batches}, and BiasBalancing would count the tokens of those "
            "that only lend their weights: take DDP, or a number of micro-batches that they divide"
        )


class _OwnRows:
    """In place of a method of packed batches that takes the rows of a global batch and a slice of them.

    Args:
        batches: The batches.
        name: Of the method.
        own: The numbers of this rank's rows.
        step: How many a step has.
    """

    def __init__(self, batches: PackedBatches, name: str, own: Sequence[int], step: int) -> None:
        self.batches, self.name, self.own, self.step = batches, name, list(own), step

    def __call__(self, rows: Sequence[Any], own: slice) -> Any:
        """Calls the method for this rank's rows; all are given, as the width of rows may depend on them."""
        if own != slice(0, self.step):  # who reads other rows than those of a step wants these
            return getattr(type(self.batches), self.name)(self.batches, rows, own)
        others = sorted(set(range(len(rows))) - set(self.own))
        ordered = [rows[index] for index in (*self.own, *others)]
        before, self.batches.batch_size = self.batches.batch_size, len(self.own)
        try:
            return getattr(type(self.batches), self.name)(self.batches, ordered, slice(0, len(self.own)))
        finally:
            self.batches.batch_size = before


def _cut(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Returns a batch cut into parts of as many rows each."""
    cut = {name: value.split(len(value) // parts) for name, value in batch.items()}
    return [{name: pieces[index] for name, pieces in cut.items()} for index in range(parts)]


def _without_fused_kernel(optimizer: Any) -> Any:
    """Returns an optimizer that does not step by torch's fused kernel, which on a CPU rounds the last elements of a tensor
    in another way than the others: which those are depends on how it is sharded.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False
    return optimizer
