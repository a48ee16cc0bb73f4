"""A callback that offers the noise scales of a list, one a step."""

from lightning.pytorch import Callback

from core.lightning_compat import is_accumulating
from core.technique import technique


@technique(paper="of tests", offers=("gradient_noise_scale",))
class ScriptedNoise(Callback):
    """Measures in every step.

    Args:
        tokens: The noise scale of each step; the last one of all later steps.
    """

    def __init__(self, tokens: list[float]):
        self.tokens, self.measurements, self.batch_ratio, self._batch = tokens, 0, None, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._batch += batch["input_ids"].numel()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not is_accumulating(trainer):
            at = min(trainer.global_step, len(self.tokens)) - 1
            self.batch_ratio, self._batch = self.tokens[at] / self._batch, 0
            self.measurements += 1

    def state_dict(self):
        return {"measurements": self.measurements, "batch": self._batch}

    def load_state_dict(self, state_dict):
        self.measurements, self._batch = state_dict["measurements"], state_dict["batch"]
