"""Writes a checkpoint's position in the epoch so that Lightning's loops resume exactly there."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from core.lightning_compat import LOGGED_STEPS, is_accumulating, is_last_batch

__all__ = ["convert_batch_counts"]


def normalize_loops(trainer: Trainer, checkpoint: dict[str, Any], epoch: int, accumulated: int) -> None:
    """Makes the state of the loops the same, however the run ended after a batch.

    Lightning 2.6 counts an epoch as done when `max_steps` or a signal ends the run within it: resumed, it would
    begin the next one, with other random numbers, or stop at `max_epochs`. Of a run that ended with an epoch it
    would count one more without a batch; of one saved with a validation, one of the loggers' steps too few. A
    checkpoint that a callback saves after a batch is restored correctly: all others get the same form.

    Args:
        trainer: The trainer that saves.
        checkpoint: Its checkpoint; changed in place.
        epoch: The epoch that the last batch belonged to, from 0.
        accumulated: Micro-batches of a step, as configured: a callback may have changed their number.
    """
    state = checkpoint["loops"]["fit_loop"]
    state["accumulated"] = accumulated
    for progress in state["epoch_progress"].values():
        progress.update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)
    batches = state["epoch_loop.batch_progress"]
    ended = is_last_batch(trainer)
    if ended and batches["current"]["completed"] == batches["current"]["ready"]:
        for progress in (batches["current"], batches["total"]):
            progress["completed"] -= 1
    will_count = batches["total"]["completed"] < batches["total"]["ready"] and not is_accumulating(trainer)
    state["epoch_loop.state_dict"][LOGGED_STEPS] = trainer.global_step - will_count


def convert_batch_counts(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Converts the batch counts of a checkpoint if an optimizer step now takes another number of micro-batches.

    Lightning steps when the number of micro-batches in the epoch is divisible by those of a step: a run that goes
    on with another number would take too few or too many into its first step.

    Args:
        trainer: The trainer that goes on.
        checkpoint: Its checkpoint; changed in place, before the loops are restored.
    """
    state, now = checkpoint["loops"]["fit_loop"], trainer.accumulate_grad_batches
    accumulated, batches = state.get("accumulated", now), state["epoch_loop.batch_progress"]
    if batches["current"]["ready"] % accumulated == 0:
        state["accumulated"] = now
    for progress in (batches["current"], batches["total"]):
        if progress["ready"] % accumulated == 0:  # else it was saved in the middle of a step
            more = progress["ready"] // accumulated * now - progress["ready"]
            progress.update({name: count + more for name, count in progress.items()})
