"""Copies to the CPU that nobody waits for, on fake devices: what a GPU has not copied yet, a CPU reads too early."""

from torch.utils._python_dispatch import TorchDispatchMode


class EarlyCopies(TorchDispatchMode):
    """Records the shape of each tensor that is copied to the CPU from another device without waiting."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        copies = "_to_copy" in str(function) and kwargs.get("non_blocking")
        if copies and args[0].device.type != "cpu" and found.device.type == "cpu":
            self.shapes.append(tuple(found.shape))
        return found
