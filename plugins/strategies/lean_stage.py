"""A stage of torch's pipelines that keeps memory for messages of few micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from toolkit.sampled_steps import unheard


class LeanStage(PipelineStage):
    """Has buffers for messages of the micro-batches that are under way; torch has them for all of a step.

    With them memory would grow with the number of micro-batches, as that of activations does not.

    For the shapes of messages torch runs each stage once before the first step of a schedule, on values of no meaning:
    monitors leave that out.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forms: dict[str, list[Tensor | None]] = {}

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with unheard():
            return super()._forward_metadata_inference(*args, **kwargs)

    def _backward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with unheard():
            return super()._backward_metadata_inference(*args, **kwargs)

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:  # its name in torch 2.11
        with unheard():
            return super()._shape_inference(*args, **kwargs)  # type: ignore[misc]

    def clear_runtime_states(self) -> None:
        """Forgets what a step has left, among it the gradients of buffers: torch 2.11 looks for them in freed ones, too."""
        infos = self.args_recv_info
        self.args_recv_info = {
            chunk: () if self.is_first else tuple(info for info in of if info.buffer is not None)
            for chunk, of in infos.items()
        }
        super().clear_runtime_states()
        self.args_recv_info = infos

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Returns what receives the inputs of a micro-batch."""
        if not self.is_first:
            self._make_room("inputs", self.args_recv_info, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Returns what receives the gradients of the outputs of a micro-batch."""
        if not self.is_last:
            self._make_room("gradients", self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Computes the gradients of a micro-batch, and frees its buffers."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        inputs = () if self.is_first else self.args_recv_info[bwd_chunk_id]
        for info in (*inputs, *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def _make_room(self, kind: str, infos: Mapping[int, Sequence[Any]], chunk: int) -> None:
        if kind not in self._forms:  # torch has just made all buffers
            self._forms[kind] = [
                None if info.buffer is None else _empty_like(info.buffer, torch.device("meta"))
                for info in infos[chunk]
            ]
            for others in infos.values():
                for info in others:
                    info.buffer = None
        for info, form in zip(infos[chunk], self._forms[kind], strict=True):
            if info.buffer is None and form is not None:
                info.buffer = _empty_like(form, self.device)


def _empty_like(buffer: Tensor, device: torch.device) -> Tensor:
    # torch 2.11 sets `requires_grad` once, of the buffers that it has made; later versions do for each message.
    return torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
