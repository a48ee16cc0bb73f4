"""Snapshots of the state of training in host memory, restored in the running process."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from core.technique import declaration_of
from core.training.shards import local_tensors, reshard


@runtime_checkable
class HoldsWeights(Protocol):
    """A strategy that steps tensors of its own, such as flat shards of many weights, in place of the parameters."""

    def held_weights(self) -> list[Tensor]:
        """Returns those of this rank, of which the optimizer has states; no copies."""

    def weights_restored(self) -> None:
        """Copies them to the network, after they were written; called on every rank."""


Snapshot = dict[str, Any]
"""Numbers, strings, lists, mappings and tensors on the host: `torch.load(weights_only=True)` reads it."""


def take_snapshot(trainer: Trainer) -> Snapshot:
    """Copies what the next optimizer step depends on, except the position in the data.

    Weights and buffers, the optimizer's state, schedules, the loss scaler, callbacks, the count of steps and tokens.
    Each rank copies its part of sharded tensors; only callbacks may communicate.

    Args:
        trainer: The trainer, between two optimizer steps.

    Returns:
        Copies that share no memory with the training.
    """
    module: Any = trainer.lightning_module
    clock = module.schedule_clock
    return _copied(
        {
            "step": trainer.global_step,
            "tensors": tensors(trainer),
            "optimizers": [_optimizer_state(trainer, optimizer) for optimizer in trainer.optimizers],
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": {name: callback.state_dict() for name, callback in _callbacks(trainer)},
            "optimizer_progress": _progress(trainer).state_dict(),
            "tokens_seen": module.tokens_seen,
            "window": module.train_sums.state_dict(torch.atleast_2d),
            "positions": clock.positions if clock is not None else 0,
        }
    )


def put_back(trainer: Trainer, snapshot: Snapshot) -> None:
    """Restores training to a snapshot, on the same ranks; the host does not wait for the device.

    The data continues from where it is, and so do the numbers of batches, from which random numbers are derived.

    Args:
        trainer: The trainer that the snapshot was taken of, between two optimizer steps.
        snapshot: What :func:`take_snapshot` returned; it is not changed.
    """
    module: Any = trainer.lightning_module
    with torch.no_grad():
        for tensor, value in zip(tensors(trainer), snapshot["tensors"], strict=True):
            tensor.copy_(value, non_blocking=True)
    for optimizer, state in zip(trainer.optimizers, snapshot["optimizers"], strict=True):
        _put_back_optimizer(trainer, optimizer, state)
        optimizer.zero_grad()
    if isinstance(trainer.strategy, HoldsWeights):
        trainer.strategy.weights_restored()
    for config, state in zip(trainer.lr_scheduler_configs, snapshot["schedules"], strict=True):
        config.scheduler.load_state_dict(deepcopy(state))
    trainer.precision_plugin.load_state_dict(deepcopy(snapshot["precision"]))
    for name, callback in _callbacks(trainer):
        if state := snapshot["callbacks"].get(name):
            callback.load_state_dict(_copied(state))
    _progress(trainer).load_state_dict(deepcopy(snapshot["optimizer_progress"]))
    module.tokens_seen, module.step_sums = snapshot["tokens_seen"], None
    module.train_sums.load_state_dict(snapshot["window"], 0, 1, module.device)
    if module.schedule_clock is not None:
        module.schedule_clock.positions = snapshot["positions"]


def tensors(trainer: Trainer) -> list[Tensor]:
    """Returns what this rank holds of parameters and buffers; no copies."""
    module = trainer.lightning_module
    if isinstance(trainer.strategy, HoldsWeights):
        frozen = (parameter.detach() for parameter in module.parameters() if not parameter.requires_grad)
        return [*trainer.strategy.held_weights(), *frozen, *(buffer.detach() for buffer in module.buffers())]
    reshard(module)
    return local_tensors(tensor.detach() for tensor in (*module.parameters(), *module.buffers()))


def _own(tensor: Tensor) -> Tensor:
    return local_tensors([tensor.detach()])[0]


def _callbacks(trainer: Trainer) -> Iterator[tuple[str, Callback]]:
    """Yields the callbacks with a state that training depends on."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not is_observer(callback):
            yield callback.state_key, callback


def is_observer(callback: Callback) -> bool:
    """Returns whether a callback is declared as an observer, on which training does not depend."""
    declared = declaration_of(type(callback))
    return declared is not None and declared.observer


def _progress(trainer: Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress


def _parameters(trainer: Trainer, optimizer: Any) -> list[Tensor]:
    if isinstance(trainer.strategy, HoldsWeights):
        return trainer.strategy.held_weights()
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(trainer: Trainer, optimizer: Any) -> dict[str, Any]:
    """Returns an optimizer's state by the numbers of its parameters, and the settings of its groups."""
    state = [optimizer.state.get(parameter, {}) for parameter in _parameters(trainer, optimizer)]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"state": state, "groups": groups}


def _put_back_optimizer(trainer: Trainer, optimizer: Any, saved: dict[str, Any]) -> None:
    for group, own in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name in group.keys() - own.keys() - {"params"}:  # some count their steps there, from the first on
            del group[name]
        group.update(deepcopy(own))
    for parameter, state in zip(_parameters(trainer, optimizer), saved["state"], strict=True):
        if not state:  # it had made no step yet
            optimizer.state.pop(parameter, None)
            continue
        now = optimizer.state[parameter]
        for name in now.keys() - state.keys():
            del now[name]
        for name, value in state.items():
            now[name] = _into(now.get(name), value, parameter)


def _into(now: Any, value: Any, parameter: Tensor) -> Any:
    """Returns a saved value, in the memory of the present one where that fits."""
    if not isinstance(value, Tensor):
        return (
            {n: _into((now or {}).get(n), v, parameter) for n, v in value.items()}
            if isinstance(value, dict)
            else deepcopy(value)
        )
    if isinstance(now, Tensor) and _own(now).shape == value.shape and _own(now).dtype == value.dtype:
        with torch.no_grad():
            _own(now).copy_(value, non_blocking=True)
        return now
    return value.to(parameter.device, copy=True)


def _copied(value: Any) -> Any:
    """Returns a copy with all tensors on the host; of sharded ones, this rank's part."""
    if isinstance(value, Tensor):
        return _own(value).to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(one) for one in value)
    return deepcopy(value)
