"""Forward through the stages of a pipeline, without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.strategies.pipeline_stages import Layout, Stage

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Form = tuple[torch.dtype, torch.Size]
"""Data type and shape of a message."""


class StagedForward:
    """Runs micro-batches forward, so that each stage works on another one at the same time.

    In each slot of time a stage computes a micro-batch, and passes it on: all of them are through after as many slots as there
    are micro-batches and stages, less one. torch's schedules have no evaluation for V-shaped layouts.

    Args:
        stages: This rank's stages by index.
        layout: The layout of all stages.
        group: The ranks of the pipeline.
        device: Device of this rank.
    """

    def __init__(
        self, stages: Mapping[int, Stage], layout: Layout, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.stages, self.layout, self.group, self.device = stages, layout, group, device
        self._here = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._forms: dict[Any, Form] = {}

    def __call__(self, batches: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Returns what the last stage makes of each micro-batch, on its rank; an empty list on the others."""
        last, found = self.layout.stages - 1, list[Tensor]()
        inputs: dict[int, Tensor] = {}
        for slot in range(len(batches) + last):
            outputs: dict[int, Tensor] = {}
            at = {stage: slot - stage for stage in range(last + 1) if 0 <= slot - stage < len(batches)}
            for stage in sorted(at.keys() & self.stages.keys()):
                given = [inputs.pop(stage)] if stage else []
                outputs[stage] = self.stages[stage](*given, **batches[at[stage]])
            if last in outputs:
                found.append(outputs.pop(last))
            inputs = self._passed_on(outputs, {s: batches[n] for s, n in at.items() if s < last})
        return found

    def _passed_on(
        self, outputs: Mapping[int, Tensor], batches: Mapping[int, Mapping[str, Tensor]]
    ) -> dict[int, Tensor]:
        """Sends outputs to their next stages; returns the inputs of this rank's stages. `batches`: of all that send."""
        inputs = {stage + 1: output for stage, output in outputs.items() if stage + 1 in self.stages}
        away = {stage: output.contiguous() for stage, output in outputs.items() if stage + 1 not in inputs}
        expected = {
            stage: batches[stage] for stage in batches if stage + 1 in self.stages.keys() - inputs.keys()
        }
        keys = {stage: _key(stage, batches[stage], self.device) for stage in (*away, *expected)}
        heads = {stage: _head(output) for stage, output in away.items() if keys[stage] not in self._forms}
        rooms = {
            stage: torch.empty(9, dtype=torch.int64, device=self.device)
            for stage in expected
            if keys[stage] not in self._forms
        }
        self._exchange(heads, rooms)
        for stage, head in (heads | rooms).items():
            dtype, count, *shape = head.tolist()  # waits for the device, once for each shape
            self._forms[keys[stage]] = DTYPES[dtype], torch.Size(shape[:count])
        for stage, output in away.items():
            if (output.dtype, output.shape) != self._forms[keys[stage]]:
                raise RuntimeError(
                    f"stage {stage} made {output.dtype} {tuple(output.shape)}, not {self._forms[keys[stage]]}"
                )
        received = {stage: self._room(self._forms[keys[stage]]) for stage in expected}
        self._exchange(away, received)
        return inputs | {stage + 1: tensor for stage, tensor in received.items()}

    def _room(self, form: Form) -> Tensor:
        dtype, shape = form
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends from stages to the next ones, and receives from stages; in the order of stages, which pairs messages."""
        operations = []
        for stage in sorted(sent.keys() | received.keys()):
            if stage in sent:
                peer = self._ranks[self.layout.rank_of(stage + 1)]
                operations.append(dist.P2POp(dist.isend, sent[stage], peer, self.group))
            else:
                peer = self._ranks[self.layout.rank_of(stage)]
                operations.append(dist.P2POp(dist.irecv, received[stage], peer, self.group))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def _key(stage: int, batch: Mapping[str, Tensor], device: torch.device) -> Any:
    """Returns what the form of a stage's output follows from: the shapes of its micro-batch, and the data type of products."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return stage, autocast, tuple((name, value.shape) for name, value in batch.items())


def _head(tensor: Tensor) -> Tensor:
    padding = [0] * (7 - tensor.dim())
    return torch.tensor(
        [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *padding], device=tensor.device
    )


def broadcast(tensor: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Returns the tensor of a rank, which has up to seven dimensions, on each rank of the group."""
    head = torch.zeros(9, dtype=torch.int64, device=device) if tensor is None else _head(tensor)
    dist.broadcast(head, source, group=group)
    dtype, count, *shape = head.tolist()
    if tensor is None:
        tensor = torch.empty(shape[:count], dtype=DTYPES[dtype], device=device)
    dist.broadcast(tensor, source, group=group)
    return tensor
