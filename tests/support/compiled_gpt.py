"""A GPT whose forward pass is compiled, and which counts how often."""

from typing import Any

import torch

from plugins.networks.gpt import GPT


class CompiledGPT(GPT):
    """Compiles `forward` with a compiler that only counts the graphs that it is given.

    Args:
        dynamic: Whether the first change of a length makes one graph for all lengths; torch's default.
        options: GPT's.
    """

    graphs = 0

    def __init__(self, dynamic: bool | None = None, **options: Any) -> None:
        super().__init__(**options)
        torch._dynamo.reset()
        type(self).graphs = 0
        self.forward = torch.compile(self.forward, backend=self._count, dynamic=dynamic, fullgraph=True)

    def _count(self, graph: Any, inputs: Any) -> Any:
        type(self).graphs += 1
        return graph.forward
