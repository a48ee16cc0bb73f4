"""What `plugins new` starts an optimizer or a schedule from, each with its test.

Each is a small technique that works, to be changed into another. `TechniqueName`, `technique_name` and
`technique-name` stand for its name.
"""

OPTIMIZER = '''
"""An optimizer that goes by the sign of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from core.technique import technique
from torch.optim import Optimizer


@technique(paper="Signum, arXiv:1802.04434, algorithm 2, with decoupled weight decay", api="API_RANGE")
class TechniqueName(Optimizer):
    """Moves each weight by `lr` against the sign of its gradient's running mean.

    State: 4 bytes per float32 parameter (one mean).

    Args:
        params: Parameters or parameter groups.
        lr: Length of a step, the same for every weight.
        momentum: Decay rate of the mean; 0: the gradient itself.
        weight_decay: Decoupled decay per step, times the learning rate.

    Example:
        model:
          optimizer:
            class_path: TechniqueName
            init_args: {lr: 1.0e-3, momentum: 0.9}
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step; the closure computes the gradients and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(state["mean"].sign(), alpha=group["lr"])
        return loss
'''

OPTIMIZER_TEST = '''
"""What TechniqueName computes."""

import torch

from leyden_technique_name.technique_name import TechniqueName


def test_a_step_is_the_closed_form():
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    optimizer = TechniqueName([weight], lr=0.1, momentum=0.5, weight_decay=0.2)
    for gradient in ([4.0, -4.0, 0.0], [-1.0, 1.0, 0.0]):  # the means are +-2, then +-0.5
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    decay = 1 - 0.1 * 0.2
    expected = [decay * (decay * 1 - 0.1) - 0.1, decay * (decay * 1 + 0.1) + 0.1, decay**2]
    torch.testing.assert_close(weight.detach(), torch.tensor(expected))
'''

SCHEDULE = '''
"""A straight line from the peak down."""

from __future__ import annotations

from core.contracts import Schedule
from core.errors import ConfigError
from core.technique import technique
from torch.optim import Optimizer


@technique(paper="linear decay to zero: arXiv:2502.15938", api="API_RANGE")
class TechniqueName(Schedule):
    """Lowers the learning rate along a line, to `min_lr_ratio` of its peak at the last step of the run.

    Args:
        optimizer: Its learning rates are the peaks.
        min_lr_ratio: Final learning rate over the peak, 0 to 1.

    Raises:
        ConfigError: If `min_lr_ratio` is out of range.

    Example:
        model:
          lr_scheduler:
            class_path: TechniqueName
            init_args: {min_lr_ratio: 0.1}
    """

    def __init__(self, optimizer: Optimizer, min_lr_ratio: float = 0.0) -> None:
        if not 0 <= min_lr_ratio <= 1:
            raise ConfigError(f"TechniqueName takes min_lr_ratio from 0 to 1, not {min_lr_ratio}.")
        self.min_lr_ratio = min_lr_ratio
        self.total_steps = 1  # until `bind` tells the length of the run
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """Returns the rate of step `last_epoch`, counted from 0, for each parameter group."""
        progress = min(self.last_epoch / max(self.total_steps - 1, 1), 1.0)
        return [peak * (1 - (1 - self.min_lr_ratio) * progress) for peak in self.base_lrs]
'''

SCHEDULE_TEST = '''
"""What TechniqueName computes."""

import pytest
import torch
from core.errors import ConfigError

from leyden_technique_name.technique_name import TechniqueName


def test_the_rates_of_a_run_lie_on_the_line():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.01)
    schedule = TechniqueName(optimizer, min_lr_ratio=0.1)
    schedule.bind(total_steps=4)
    rates = []
    for _ in range(4):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.01, 0.007, 0.004, 0.001])


def test_a_ratio_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="from 0 to 1, not 2"):
        TechniqueName(torch.optim.SGD([torch.zeros(1)], lr=1.0), min_lr_ratio=2.0)
'''

TEMPLATES = {"optimizers": (OPTIMIZER, OPTIMIZER_TEST), "schedules": (SCHEDULE, SCHEDULE_TEST)}
"""Kind -> the technique's module, and its tests."""
