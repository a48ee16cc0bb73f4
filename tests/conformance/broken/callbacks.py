"""Callbacks, a strategy and precisions that each break a promise of a run."""

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from core.errors import ConfigError
from core.technique import WorldSize, technique


class Unbuildable(Callback):
    def __init__(self, window: int = 0):
        if window < 1:
            raise ConfigError(f"Unbuildable takes window >= 1, not {window}.")


class Opaque(Callback):
    def __init__(self, clock: object = object()):
        self.clock = clock


class Diverging(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(torch.inf)


class Stopping(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 3


class Forgetful(Callback):
    """Shrinks the weights the more, the more steps it has seen; a resumed run starts to count anew."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(1 - 1e-6 * self.steps)


class Mindful(Forgetful):
    """The same with its state saved: what the kit must not complain about."""

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


@technique(paper="own work", needs=[WorldSize(at_least=2)])
class Paired(Mindful):
    """A sound one that needs two processes."""


class RankDependent(Callback):
    """Changes the gradients on one rank alone, as a clipping before they are averaged may do."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_rank == 1:
            for parameter in pl_module.parameters():
                parameter.grad.mul_(0.9)


class Syncing(Callback):
    """Asks for the loss in every step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.loss = float(outputs["loss"])


class Copying(Callback):
    """Copies to the host in every step, which on a CPU is no operation."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.first = batch["input_ids"][0].tolist()


class DoingNothing(Callback):
    def on_after_backward(self, trainer, pl_module):
        """Does nothing, in every step."""


class Writing(CSVLogger):
    """A logger whose files cannot be made."""

    def __init__(self, save_dir: str = "/proc/nowhere"):
        super().__init__(save_dir)


class Approximate(SingleDeviceStrategy):
    """Trains on one device, and rounds the loss on the way."""

    def __init__(self):
        super().__init__("cpu")

    def backward(self, closure_loss, optimizer, *args, **kwargs):
        super().backward(closure_loss * 1.5, optimizer, *args, **kwargs)


class Unaveraged(DDPStrategy):
    """Never averages gradients."""

    def configure_ddp(self):
        """Leaves the module as it is."""


class Rough(MixedPrecision):
    """Claims to be a mixed precision and goes up instead of down."""

    def __init__(self):
        super().__init__("bf16-mixed", "cpu")

    def pre_backward(self, tensor, module):
        return super().pre_backward(tensor * -1, module)


class Idle(MixedPrecision):
    """Claims to be a mixed precision and trains with a tenth of the gradients."""

    def __init__(self):
        super().__init__("bf16-mixed", "cpu")

    def pre_backward(self, tensor, module):
        return super().pre_backward(tensor * 0.1, module)


class Fine(MixedPrecision):
    """bfloat16 as it should be: what the kit must not complain about."""

    def __init__(self):
        super().__init__("bf16-mixed", "cpu")
