"""What `split` takes out of a checkpoint, `join` puts back in its place."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from plugins.checkpoints.sharded_form import join, split


def test_sharded_tensors_of_callbacks_are_found_again_under_their_keys():
    """States of an optimizer, which a callback may keep, are numbered."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    states = {"Kept": {"state": {0: {"exp_avg": sharded}, 1: {"step": 3}}, 7: sharded, (1, 2): None}}
    tensors, rest = split({"state_dict": {}, "callbacks": states})
    assert rest["callbacks"] == {"Kept": {"state": {0: {}, 1: {"step": 3}}, (1, 2): None}}
    found = join(dict.fromkeys(tensors, "read"), rest)["callbacks"]
    assert found == {"Kept": {"state": {0: {"exp_avg": "read"}, 1: {"step": 3}}, 7: "read", (1, 2): None}}
