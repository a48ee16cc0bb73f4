"""Where in an epoch a checkpoint was saved, told so that Lightning's loops go on there."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def settle(trainer: Trainer, checkpoint: dict[str, Any], epoch: int, accumulated: int) -> None:
    """Makes the loops' state the same for each way in which a run can end after a batch.

    Lightning 2.6 counts an epoch as done when `max_steps` or a signal ends the run within it: resumed, it would
    begin the next one, with other random numbers, or stop at `max_epochs`. Of a run that ended with an epoch it
    would count one more without a batch; of one saved with a validation, one of the loggers' steps too few. What a
    callback saves after a batch is understood: that form is taken.

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
    batches, loop = state["epoch_loop.batch_progress"], trainer.fit_loop.epoch_loop
    ended = loop._num_ready_batches_reached()
    if ended and batches["current"]["completed"] == batches["current"]["ready"]:
        for progress in (batches["current"], batches["total"]):
            progress["completed"] -= 1
    will_count = batches["total"]["completed"] < batches["total"]["ready"] and not loop._should_accumulate()
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = trainer.global_step - will_count


def rescale(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Counts the batches of a checkpoint in the micro-batches of now, of which an optimizer step may take others.

    Lightning steps when the number of micro-batches in the epoch is divisible by those of a step: a run that goes
    on with other ones would take some of them too few or too many into its first step.

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
