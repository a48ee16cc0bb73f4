"""Counts where the host waits for the device: what costs nothing on a CPU and stalls a GPU."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
OPERATIONS = (_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.equal, _aten.is_nonzero)
"""What .item(), float(), bool() and results of unknown size come down to; x[mask] is another."""

METHODS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.__repr__)
"""Copies to the host, which are no operation where the tensor is there already."""

OURS = (f"{Path(__file__).resolve().parent}/", "/torch/", "/lightning/", "/warnings.py", "/_py_warnings.py")


class Waits:
    """Notes the line of each wait between `start` and `stop`.

    Attributes:
        places: "file:line in function" of each wait.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self._modes: list[Any] = []

    def start(self, optimizers: Iterable[Any], device: str = "cpu") -> None:
        """Begins to count; torch's optimizers keep their `step` on the host, so that does not count."""
        on_host = {
            id(state["step"])
            for optimizer in optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict) and "step" in state
        }
        self._modes = [_Methods(self.places), _Operations(self.places, on_host)]
        if device == "cuda":
            self._modes = [_Synchronisations(self.places)]  # it sees these, and copies without pinned memory
        for mode in self._modes:
            mode.__enter__()

    def stop(self) -> None:
        """Stops the counting, if it is running."""
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        self._modes = []


class _Operations(TorchDispatchMode):
    def __init__(self, places: list[str], on_host: set[int]) -> None:
        super().__init__()
        self.places, self.on_host = places, on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket
        if (operation in OPERATIONS and id(args[0]) not in self.on_host) or (
            operation is _aten.index and any(i is not None and i.dtype == torch.bool for i in args[1])
        ):
            self.places.append(_place())
        return func(*args, **(kwargs or {}))


class _Synchronisations(ExitStack):
    """What torch itself says of waits, which it warns of."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.places = places

    def __enter__(self) -> _Synchronisations:
        self.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = self._note  # type: ignore[assignment]
        self.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def _note(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.places.append(_place())


class _Methods(TorchFunctionMode):
    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.places.append(_place())
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """The innermost line that is neither torch's, Lightning's nor the kit's."""
    stack = traceback.extract_stack()
    inner = [frame for frame in stack if not any(part in frame.filename for part in OURS)] or stack
    return f"{inner[-1].filename}:{inner[-1].lineno} in {inner[-1].name}"
