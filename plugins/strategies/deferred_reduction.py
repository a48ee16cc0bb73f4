"""What FSDP does once a step under gradient accumulation, and not with each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from core.errors import ConfigError


class DeferredReduction:
    """Leaves all-reduces of gradients over replicas, and gathers of weights that are kept anyway, to once a step.

    Gradients are scattered with each micro-batch, so that no rank holds those of full weights. Over replicas only their sum of the step
    is reduced. Until the last micro-batch it is in no `parameter.grad`, but with FSDP: `zero_grad` drops it too.

    Args:
        root: What is sharded, with all modules in it that are sharded by themselves.
        frees: Whether the weights of these are freed after forward. Those of the root are not.
        replicated: Whether there are replicas.
    """

    def __init__(self, root: nn.Module, frees: bool, replicated: bool) -> None:
        self._sharded = [part for part in root.modules() if isinstance(part, FSDPModule)]
        self._kept = self._sharded[:1] if frees else self._sharded
        self._replicated, self._deferring = replicated, False
        for group in self._groups():
            if (prepare := getattr(group, "_prepare_partial_reduce_output", None)) is not None:
                group._prepare_partial_reduce_output = partial(_prepared, prepare)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context of the backward of a micro-batch, or of a part of one within it, that others of its step follow."""
        before = self._deferring
        self._defer(True)
        try:
            yield
        finally:
            self._defer(before)
        self._widen()

    def check(self) -> None:
        """Raises a ConfigError if gradients are left behind the last backward of a step; called behind each.

        From torch 2.15 on they are not: it reduces them in the last micro-batch, whatever has gradients there.
        """
        if not self._deferring and any(group._partial_reduce_output is not None for group in self._groups()):
            raise ConfigError(
                "Some of the network's blocks have gradients in other micro-batches of a step, and none in its last one, with which "
                "replicas reduce theirs.\nSet replicas (of HybridParallel: data_replicate) or accumulate_grad_batches to 1."
            )

    def _defer(self, deferred: bool) -> None:
        self._deferring = deferred
        for part in self._kept:
            part.set_reshard_after_backward(not deferred, recurse=False)
        for part in self._sharded if self._replicated else ():
            part.set_requires_all_reduce(not deferred, recurse=False)

    def _widen(self) -> None:
        # torch adds in the data type of the message. In bf16 a step of many micro-batches would lose the last ones.
        for group in self._groups():
            if (total := group._partial_reduce_output) is not None:
                # in the stream that adds to it: memory of another one would be free before that is done
                with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
                    group._partial_reduce_output = total.to(torch.promote_types(total.dtype, torch.float32))

    def drop(self) -> None:
        """Forgets the gradients of the step so far that have not been reduced over replicas."""
        for group in self._groups():
            group._partial_reduce_output = None

    def _groups(self) -> Iterator[Any]:
        """Yields what FSDP keeps of each module's parameters; no public name has what it has summed up."""
        for part in self._sharded if self._replicated else ():
            state: Any = part._get_fsdp_state()
            one = getattr(state, "_fsdp_param_group", None)  # of versions of torch that have no more of them
            yield from getattr(state, "_fsdp_param_groups", () if one is None else (one,))

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Lets `zero_grad` of optimizers drop those gradients too, whoever calls it."""
        for optimizer in optimizers:
            optimizer.zero_grad = partial(self._zero_grad, optimizer.zero_grad)  # type: ignore[method-assign]

    def _zero_grad(self, zero_grad: Callable[[bool], None], set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        self.drop()


def _prepared(prepare: Callable[..., Any], params: Any, sizes: Any, dtype: torch.dtype) -> Any:
    """Keeps the sum of a step in float32, which torch 2.15 casts to the data type of the message before it adds to it."""
    return prepare(params, sizes, torch.promote_types(dtype, torch.float32))
