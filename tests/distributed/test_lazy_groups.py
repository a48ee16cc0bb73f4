"""Groups that connect ranks by need: whoever is left notices a rank that died before its first message there."""

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.runs import on_ranks
from core.errors import ConfigError
from plugins.checkpoints.sharded_checkpoint import ShardedCheckpoint
from toolkit.joint_steps import JointSteps

pytestmark = pytest.mark.ci

GROUPS = 8
"""Which of two ranks connects, and which one waits for that, depends on the ports that they got."""
SECONDS = 30.0
"""The connection of a process that died is gone at once; for one that was never there gloo waits 30 minutes."""


def a_checkpoint(folder, number):
    """Returns what connects a group, and what writes the first checkpoint with it."""
    io = ShardedCheckpoint()
    io.connect()

    def write():
        checkpoint = {"state_dict": {"w": torch.zeros(2)}, "pytorch-lightning_version": "2.6.6"}
        io.save_parts(checkpoint, f"{folder}/step-{number}.ckpt")
        io.wait()

    return write


def a_step(folder, number):
    """Returns what tells the others that this rank is through with its first step."""
    joint = JointSteps(nn.Linear(1, 1), None)
    return lambda: joint.run(lambda: None, lambda: None)


def notices(action):
    """Whether an action raises an error, and soon."""
    raised = []

    def act():
        try:
            action()
        except (ConfigError, RuntimeError) as error:
            raised.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return bool(raised)


def of_rank(rank, make, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    actions = [make(folder, number) for number in range(GROUPS)]
    dist.barrier()
    if rank == 0:
        os._exit(0)
    for number, action in enumerate(actions):
        if not notices(action):
            print(f"rank 1 waits for a rank that is gone, in group {number}", file=sys.stderr, flush=True)
            os._exit(1)  # an error would wait for the thread


@pytest.mark.parametrize("make", [a_checkpoint, a_step])
def test_a_rank_that_dies_before_its_first_message_is_noticed(make, tmp_path):
    on_ranks(of_rank, 2, make, str(tmp_path))
