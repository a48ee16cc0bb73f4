"""A callback that notes how much each rank holds of the frozen network of an objective."""

import json
from pathlib import Path

from lightning.pytorch import Callback

from core.training.shards import local_tensors
from plugins.objectives.distillation import Distillation
from toolkit.rollouts import OnPolicyObjective


def network_of(objective):
    """Returns the frozen network of an objective, or of one within it."""
    for part in objective.modules():
        if isinstance(part, Distillation):
            return part._teacher[0]
        if isinstance(part, OnPolicyObjective):
            return part.reference
    raise TypeError(f"{type(objective).__name__} has none")


class HeldNetwork(Callback):
    """Writes the most bytes of a teacher or a reference that this rank held before a backward and after it, to `held.RANK.json`.

    Args:
        folder: Where to write.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._most = Path(folder), {"before": 0, "after": 0}

    def on_before_backward(self, trainer, pl_module, loss):
        """Notes what is gathered for the backward."""
        self._note("before", pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Notes what is held from step to step."""
        self._note("after", pl_module)

    def _note(self, when, module):
        network = network_of(module.objective)
        parameters = list(network.parameters())
        own = local_tensors([parameter.detach() for parameter in parameters])
        held = sum(part.numel() * part.element_size() for part in own)
        self._most[when] = max(self._most[when], held)
        self._most["whole"] = sum(one.numel() * one.element_size() for one in parameters)
        self._most["blocks"] = sum(
            p.numel() * p.element_size() for block in network.blocks for p in block.parameters()
        )
        self._most["dtypes"] = sorted({str(one.dtype) for one in parameters})

    def on_train_end(self, trainer, pl_module):
        """Writes the file."""
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"held.{trainer.global_rank}.json").write_text(json.dumps(self._most))
