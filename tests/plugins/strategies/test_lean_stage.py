"""Buffers of messages as torch 2.11 keeps them: made once, with `requires_grad`, and all expected to be there."""

from types import SimpleNamespace

import torch
from torch.distributed.pipelining import PipelineStage

from plugins.strategies.lean_stage import LeanStage


def test_buffers_that_are_made_again_take_gradients_and_freed_ones_are_not_cleared(monkeypatch):
    def clear(stage):
        for infos in stage.args_recv_info.values():
            for info in infos:
                info.buffer.grad = None

    monkeypatch.setattr(PipelineStage, "clear_runtime_states", clear)
    stage = object.__new__(LeanStage)
    stage.stage_index, stage.num_stages, stage.device, stage._forms = 1, 2, torch.device("cpu"), {}
    infos = {chunk: (SimpleNamespace(buffer=torch.empty(2, 3, requires_grad=True)),) for chunk in range(3)}
    stage.args_recv_info = infos
    stage._make_room("inputs", infos, 1)
    freed, buffer, _ = (info.buffer for (info,) in infos.values())
    assert freed is None
    assert buffer.requires_grad
    buffer.sum().backward()
    stage.clear_runtime_states()
    assert buffer.grad is None
    assert stage.args_recv_info is infos
