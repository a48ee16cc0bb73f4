"""Updates that are dropped on the device: the next one counts again, with a gradient scaler and without."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.copied_flags import EarlyCopies
from toolkit.updates import drop_update, drops_updates


def fused_adam():
    weight = torch.nn.Parameter(torch.ones(3))
    return weight, torch.optim.AdamW([weight], lr=0.1, fused=True)


def step(weight, optimizer, drop=None, scaler=None):
    """Takes a step, as Lightning does: the hooks that may drop it run in the closure, or before the scaler's step."""

    def closure():
        weight.grad = torch.ones(3)
        if drop is not None:
            drop_update(optimizer, torch.tensor(drop))

    before = weight.detach().clone()
    if scaler is None:
        optimizer.step(closure)
    else:
        scaler.scale(torch.ones(()))
        closure()
        scaler.step(optimizer)
        scaler.update()
    return not torch.equal(before, weight)


@pytest.mark.parametrize("scales", [False, True])
def test_only_the_step_that_is_dropped_changes_nothing(scales):
    weight, optimizer = fused_adam()
    assert drops_updates(optimizer)
    scaler = torch.amp.GradScaler("cpu") if scales else None
    drops = [None, True, None, False, True, True, None]
    changed = [step(weight, optimizer, drop, scaler) for drop in drops]
    assert changed == [True, False, True, True, False, False, True]
    assert not {"found_inf", "_drop"} & vars(optimizer).keys()


def test_one_of_several_is_enough():
    weight, optimizer = fused_adam()
    drop_update(optimizer, torch.tensor(True))
    assert not step(weight, optimizer, drop=False)
    assert step(weight, optimizer, drop=False)


@pytest.mark.parametrize("scales", [False, True])
def test_weights_on_the_cpu_wait_for_the_flag_of_a_gpu(scales):
    with FakeTensorMode():
        weight, optimizer = fused_adam()
        weight.grad = torch.ones(3)
        drop_update(optimizer, torch.ones((), device="cuda"))
        if scales:  # what a gradient scaler on the GPU writes as the step begins
            optimizer.found_inf = torch.zeros((), device="cuda")
        with EarlyCopies() as copies:
            optimizer.step()
    assert copies.shapes == []


@pytest.mark.gpu
def test_a_flag_that_a_gpu_has_not_computed_yet_drops_the_step_of_weights_on_the_cpu():
    weight, optimizer = fused_adam()
    weight.grad = torch.ones(3)
    torch.cuda._sleep(1 << 30)  # a flag that is copied without waiting is 0 or anything until then
    drop_update(optimizer, torch.ones((), device="cuda") > 0)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0, 1.0]
