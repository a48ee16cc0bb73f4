"""Tensors of a checkpoint that share memory."""

import torch

from plugins.checkpoints.shared_memory import separate


def test_only_what_shares_memory_is_copied():
    flat, step = torch.arange(8.0), torch.tensor(3.0)
    first = {"step": step, "moments": flat[:4], "nested": {"lists": [step]}}
    second = {"step": step, "moments": flat[4:].view(2, 2), "overlap": flat[3:5], "other": 5}
    state = {"state": {0: first, 1: second}, "param_groups": []}
    assert separate(state) == 3
    assert first["moments"].data_ptr() == flat.data_ptr()
    steps = [first["step"], second["step"], first["nested"]["lists"][0]]
    assert len({one.data_ptr() for one in steps}) == 3
    assert {float(one) for one in steps} == {3.0}
    assert second["moments"].tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert second["overlap"].tolist() == [3.0, 4.0]
    assert separate(state) == 0
