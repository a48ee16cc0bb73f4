"""The thread that writes checkpoints."""

import threading

import pytest
import torch

from plugins.checkpoints.background import Background


@pytest.mark.parametrize("aside", [False, True])
def test_the_thread_has_the_device_of_its_rank(aside, monkeypatch):
    """torch begins each thread with device 0, copies to the host without waiting, and synchronises the thread's device."""
    devices = threading.local()
    devices.current = 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(devices, "current", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(devices, "current", device))
    background, found = Background(), []
    submit = background.submit_aside if aside else background.submit
    submit(lambda: found.append((torch.cuda.current_device(), threading.current_thread().name)))
    background.close()
    [(device, thread)] = found
    assert device == 1
    assert thread != threading.current_thread().name
