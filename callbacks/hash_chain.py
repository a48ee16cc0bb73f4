"""Records fingerprints of batch, loss and weights of each step, by which `bisect` finds where two runs part."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from core import durable
from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import technique
from core.training.shards import local_tensors, reshard
from toolkit.hash_chains import FOLDER, as_hex, fingerprint, group_of, link, ordered_fingerprint, read_chain

FIXED = 3
"""Columns before those of the weights: batch, and both halves of the loss."""


@technique(
    paper="own work; bitwise comparison of runs as in torchtitan's and OLMo's debugging, one line for each step",
    observer=True,
)
class HashChain(Callback):
    """Records fingerprints of each step's batch, loss and weights, by which `bisect` finds where two runs part.

    `hash_chain/rank0.jsonl` in the run folder, a file for each rank, has a line for each optimizer step: fingerprints of the
    batch and of the loss, those of each module's weights after the step (a block of the network is a module), and the
    hash of all lines so far. Two runs whose last lines have the same `chain` have computed the same, bit by bit. A
    fingerprint is a sum of bits as integers, made on the device; lines are written where figures are logged, and before
    a checkpoint. A resumed run continues the file.

    `python -m core bisect RUN_A RUN_B` compares the files of two runs that should be the same. Its replays use
    `inspect_step`.

    Args:
        every_n_steps: Optimizer steps from one fingerprint of the weights to the next; batch and loss are recorded in
            each step. With 1 also a weight that was changed by no step, and that no replay reproduces, is found.
        inspect_step: Ends the run after this optimizer step. Until there, lines also have fingerprints of the weights before the
            step, of the output of each module, in the order of their computation, and of the gradients, each by name. Of this step
            itself the batch, gradients, and the weights before and after are kept as safetensors files. Slow.

    Raises:
        ConfigError: If a number is below 1.

    Example:
        trainer:
          callbacks+:
            - class_path: HashChain
              init_args: {every_n_steps: 1}
    """

    def __init__(self, every_n_steps: int = 1, inspect_step: int | None = None) -> None:
        if every_n_steps < 1 or (inspect_step is not None and inspect_step < 1):
            raise ConfigError(
                f"HashChain takes every_n_steps and inspect_step from 1 upwards, not {every_n_steps} and {inspect_step}."
            )
        self.every_n_steps, self.inspect_step = every_n_steps, inspect_step
        self._path: Path | None = None
        self._chain = ""
        self._filled = 0
        self._steps: list[tuple[int, bool]] = []  # step, whether its weights are recorded
        self._inspection: Inspection | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Continues the file of a resumed run, or begins one with the initial weights."""
        reshard(pl_module)
        named = [*pl_module.named_parameters(), *pl_module.named_buffers()]
        self._tensors = [tensor for _, tensor in named]
        groups = [group_of(name) for name, _ in named]
        self._groups = list(dict.fromkeys(groups))
        self._group_index = [self._groups.index(group) for group in groups]
        columns = FIXED + len(named)
        capacity = max(int(trainer.log_every_n_steps), 1)  # type: ignore[attr-defined]
        self._rows = torch.zeros(capacity, columns, dtype=torch.int32, device=pl_module.device)
        self._filled, self._steps = 0, []
        self._path = Path(trainer.default_root_dir, FOLDER, f"rank{trainer.global_rank}.jsonl")
        self._begin_file(trainer)
        if self.inspect_step is not None:
            self._inspection = Inspection(pl_module, named, self._path)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Adds the fingerprint of a micro-batch."""
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        cell = self._rows[self._filled, 0]
        cell.mul_(31).add_(ordered_fingerprint(tensors).to(cell.device))
        if self._inspection is not None:
            self._inspection.begin(batch, trainer.global_step + 1 == self.inspect_step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Takes the loss of the step."""
        loss = pl_module.step_loss.detach().to(torch.float64)
        self._rows[self._filled, 1:FIXED] = loss.reshape(1).view(torch.int32)
        if self._inspection is not None:
            self._inspection.take_gradients()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the weights after the step; writes where the host waits anyway."""
        if is_accumulating(trainer):
            return
        step = trainer.global_step
        weighs = step % self.every_n_steps == 0
        if weighs:
            self._weigh(self._rows[self._filled, FIXED:])
        self._steps.append((step, weighs))
        self._filled += 1
        if pl_module.logging_step or self._filled == len(self._rows) or self._inspection is not None:
            self._flush()
        if self._inspection is not None and step == self.inspect_step:
            self._inspection.finish()
            trainer.should_stop = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Writes what a run that resumes from the checkpoint will not record again."""
        self._flush()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the last steps."""
        self._flush()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Writes the steps before an error, where the device still answers."""
        with suppress(RuntimeError):  # the run ends with its own error
            self._flush()

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Stops listening to modules."""
        if self._inspection is not None:
            self._inspection.close()
        self._inspection = self._path = None

    def _weigh(self, out: Tensor) -> None:
        if self._tensors:
            found = [fingerprint(own).to(out.device) for own in local_tensors(self._tensors)]
            torch.stack(found, out=out)

    def _begin_file(self, trainer: Trainer) -> None:
        """Keeps the lines up to the step that the run begins from; writes the head, and the weights before a first step."""
        assert self._path is not None
        step, kept = trainer.global_step, []
        if step and self._path.is_file():
            chain = read_chain(self._path)
            if chain.groups == self._groups:
                kept = [line for number, line in chain.steps.items() if number <= step]
        head = {
            "environment": _environment(trainer),
            "groups": self._groups,
            "every_n_steps": self.every_n_steps,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._chain = kept[-1]["chain"] if kept else ""
        durable.write(self._path, "".join(json.dumps(line) + "\n" for line in (head, *kept)))
        if not kept:
            first = self._rows[0, FIXED:]
            self._weigh(first)
            self._append([{"step": step, "weights": self._of_groups(first.tolist())}])
            self._rows.zero_()

    def _flush(self) -> None:
        """Writes the steps since the last time."""
        if self._path is None or not self._steps:
            return
        lines = []
        rows = self._rows[: self._filled].tolist()
        for (step, weighs), row in zip(self._steps, rows, strict=True):
            line: dict[str, Any] = {"step": step, "batch": as_hex(row[:1]), "loss": as_hex(row[1:FIXED])}
            if weighs:
                line["weights"] = self._of_groups(row[FIXED:])
            if self._inspection is not None:
                line["detail"] = self._inspection.detail()
            lines.append(line)
        begun = self._rows[self._filled, 0].clone() if self._filled < len(self._rows) else None
        self._rows.zero_()
        if begun is not None:  # of a step of which some micro-batches are read
            self._rows[0, 0] = begun
        self._filled, self._steps = 0, []
        self._append(lines)

    def _of_groups(self, values: list[int]) -> str:
        sums = [0] * len(self._groups)
        for group, value in zip(self._group_index, values, strict=True):
            sums[group] = sums[group] * 31 + value
        return as_hex(sums)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        assert self._path is not None
        text = ""
        for line in lines:
            self._chain = link(self._chain, line)
            text += json.dumps(line | {"chain": self._chain}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:  # the run continues
            print(f"HashChain: {self._path} could not be written: {error}", file=sys.stderr)


class Inspection:
    """Fingerprints of what happens within steps, and the tensors of one of them.

    Args:
        module: What is trained.
        named: Its parameters and buffers.
        chain: The file of the rank; tensors are written beside it.
    """

    def __init__(self, module: Any, named: list[tuple[str, Tensor]], chain: Path) -> None:
        self._named, self._beside = named, chain
        self._detail: dict[str, Any] = {}
        self._kept: dict[str, dict[str, Tensor]] | None = None
        self._handles = [
            inner.register_forward_hook(self._hook(name))
            for name, inner in module.network.named_modules()
            if name
        ]

    def _hook(self, name: str) -> Any:
        def note(_: Any, inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if tensors and "outputs" in self._detail:
                value = as_hex([int(ordered_fingerprint(local_tensors(tensors)))])
                self._detail["outputs"].append([name, value])

        return note

    def begin(self, batch: Any, keeps: bool) -> None:
        """Begins a micro-batch; the first one of a step begins the step."""
        if not self._detail:
            self._detail = {"before": self._fingerprints(self._named), "outputs": [], "batches": 0}
            self._kept = {"before": self._copies(self._named), "batch": {}} if keeps else None
        if self._kept is not None:
            number = self._detail["batches"]
            tensors = {f"{number}.{k}": v for k, v in batch.items() if isinstance(v, Tensor)}
            self._kept["batch"] |= self._copies(list(tensors.items()))
        self._detail["batches"] += 1

    def take_gradients(self) -> None:
        """Takes the gradients as the step finds them."""
        found = [(name, t.grad) for name, t in self._named if t.grad is not None]
        self._detail["gradients"] = self._fingerprints(found)
        if self._kept is not None:
            self._kept["gradients"] = self._copies(found)

    def detail(self) -> dict[str, Any]:
        """Returns what was noted in the step."""
        found, self._detail = self._detail, {}
        return found | {"after": self._fingerprints(self._named)}

    def finish(self) -> None:
        """Writes the tensors of the step."""
        from safetensors.torch import save_file

        assert self._kept is not None
        self._kept["after"] = self._copies(self._named)
        for name, tensors in self._kept.items():
            with durable.replacing(self._beside.with_suffix(f".{name}.safetensors")) as temporary:
                save_file(tensors, temporary)

    def close(self) -> None:
        """Stops listening."""
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _fingerprints(named: list[tuple[str, Any]]) -> dict[str, str]:
        own = local_tensors(tensor for _, tensor in named)
        values = torch.stack([fingerprint(tensor).cpu() for tensor in own]).tolist() if own else []
        return {name: as_hex([value]) for (name, _), value in zip(named, values, strict=True)}

    @staticmethod
    def _copies(named: list[tuple[str, Any]]) -> dict[str, Tensor]:
        own = local_tensors(tensor.detach() for _, tensor in named)
        return {name: t.to("cpu", copy=True).contiguous() for (name, _), t in zip(named, own, strict=True)}


def _environment(trainer: Trainer) -> dict[str, Any]:
    """Returns what the order of reductions depends on, beside the configuration."""
    device: torch.device = trainer.strategy.root_device
    cuda = device.type == "cuda"
    return {
        "leyden": version("leyden"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability(),
        "ranks": trainer.world_size,
    }
