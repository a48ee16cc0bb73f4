"""Callbacks, a strategy and precisions that each break a promise of a run."""

from collections import deque

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from core.errors import ConfigError
from core.technique import WorldSize, technique
from core.training.figures import log_figures


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

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
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


class DeviceDependent(Callback):
    """Changes gradients on a GPU."""

    def on_after_backward(self, trainer, pl_module):
        if pl_module.device.type == "cuda":
            for parameter in pl_module.parameters():
                parameter.grad.mul_(1.01)


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


class Diligent(Callback):
    """Counts, logs, scales and keeps as it should: what the kit must not complain about, in any proof.

    Those below do one of these things wrongly.
    """

    def __init__(self):
        self.steps, self.largest = 0, torch.zeros(3)
        self.losses = deque(maxlen=3)

    def state_dict(self):
        return {"steps": self.steps, "largest": self.largest.clone()}

    def load_state_dict(self, state_dict):
        self.steps, self.largest = state_dict["steps"], state_dict["largest"].clone()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.count()
        self.scale(pl_module)
        self.note(pl_module.step_loss)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.logging_step:
            log_figures(trainer, {"own/steps": self.steps, "own/loss": float(pl_module.step_loss)})

    def count(self):
        self.steps += 1

    def scale(self, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad.mul_(1 - 1e-3 * (self.steps % 2))

    def note(self, loss):
        self.losses.append(loss.detach())
        self.largest[self.steps % 3] = loss


class Uncounted(Diligent):
    """Logs how many steps it has seen, and forgets it."""

    def state_dict(self):
        return {"largest": self.largest.clone()}

    def load_state_dict(self, state_dict):
        self.largest = state_dict["largest"].clone()


class Unrestored(Diligent):
    """Saves its count, and takes no notice of what was saved."""

    def load_state_dict(self, state_dict):
        self.largest = state_dict["largest"].clone()


class OwnRank(Diligent):
    """Logs the loss of this rank's tokens under the name of all."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.logging_step:
            log_figures(trainer, {"own/inputs": float(batch["input_ids"].sum())})


class CountingBatches(Diligent):
    """Takes micro-batches for steps."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps += 1

    def count(self):
        """Has counted."""


class ScalingBatches(Diligent):
    """Makes gradients smaller after each backward, those of earlier micro-batches again."""

    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad.mul_(0.9)

    def scale(self, pl_module):
        """Has scaled."""


class LoggingBatches(Diligent):
    """Logs under the number of the batch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.logging_step:
            for logger in trainer.loggers:
                logger.log_metrics({"own/again": float(self.steps)}, step=batch_idx)


class Hoarding(Diligent):
    """Keeps every loss."""

    def __init__(self):
        super().__init__()
        self.losses = []


LOSSES = []


class HoardingElsewhere(Diligent):
    """Keeps every loss in a list of its module, as a number, whenever it may look at it."""

    def note(self, loss):
        super().note(loss)
        LOSSES.append(len(LOSSES) + 0.5)


class Caching(Diligent):
    """Keeps one number in an early step, and 1,000 at once in a late one: no leak."""

    def __init__(self):
        super().__init__()
        self.cache = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step in (7, 250):
            self.cache += [0.5] * (1 if trainer.global_step == 7 else 1000)


class Tensors(Diligent):
    """Saves its count as a tensor."""

    def state_dict(self):
        return {**super().state_dict(), "steps": torch.tensor(self.steps)}

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "steps": int(state_dict["steps"])})


class Live(Diligent):
    """Hands out the tensor that it goes on to write to."""

    def state_dict(self):
        return {"steps": self.steps, "largest": self.largest}


class Sets(Diligent):
    """Saves what a checkpoint cannot hold safely."""

    def state_dict(self):
        return {**super().state_dict(), "seen": {1, 2}}


@technique(paper="own work", observer=True)
class Meddling(Diligent):
    """Says that it only looks on, and changes gradients."""


@technique(paper="own work", observer=True)
class Watching(Diligent):
    """Looks on, and leaves all as it is: sound."""

    def scale(self, pl_module):
        """Leaves gradients."""


class Accumulating(Diligent):
    """A sound one whose example accumulates, so that validations fall into idle steps.

    Example:
        trainer:
          accumulate_grad_batches: 2
          callbacks+: [Accumulating]
    """


class Single(SingleDeviceStrategy):
    """Trains on one device: sound."""

    def __init__(self):
        super().__init__("cpu")


class Multiplying(Single):
    """Makes the loss larger again by what Lightning has divided it by, so that it is right without accumulation."""

    def backward(self, closure_loss, optimizer, *args, **kwargs):
        times = self.lightning_module.trainer.accumulate_grad_batches
        super().backward(closure_loss * times, optimizer, *args, **kwargs)
