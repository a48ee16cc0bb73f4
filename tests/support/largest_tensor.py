"""How large the largest tensor is that a computation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor in memory that an operation returns, forward or backward."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor) and not value.is_meta and not hasattr(value, "to_local"):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return result
