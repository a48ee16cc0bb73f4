"""Runs whose batches change their shape."""

from lightning.pytorch import Callback


class Log(Callback):
    """Keeps what the run trained on, by optimizer step."""

    steps: list = []

    def on_train_start(self, trainer, pl_module):
        type(self).steps = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        stepped = not trainer.fit_loop.epoch_loop._should_accumulate()
        batch = self.batch["input_ids"].clone(), self.batch["labels"].clone()
        self.steps.append((trainer.global_step, *batch, stepped))
