"""What MinGRU computes."""

import pytest
import torch
import torch.multiprocessing
from acme_network.min_gru import MinGRU, Recurrence, scan

from core.errors import ConfigError

SIZES = {"vocab_size": 11, "n_layer": 2, "n_embd": 8, "width": 12}
BATCH = {"input_ids": torch.arange(26).view(2, 13) * 7 % 11}


def new_network() -> MinGRU:
    torch.manual_seed(0)
    return MinGRU(**SIZES).double()


@pytest.mark.parametrize("length", [1, 2, 7, 8, 13])
def test_the_scan_is_the_recurrence(length):
    generator = torch.Generator().manual_seed(length)
    keep, new = torch.rand(2, 3, length, 5, generator=generator, dtype=torch.float64)
    state, expected = torch.zeros(3, 5, dtype=torch.float64), []
    for t in range(length):
        state = keep[:, t] * state + new[:, t]
        expected.append(state)
    torch.testing.assert_close(scan(keep, new), torch.stack(expected, dim=1))


def test_a_block_is_the_papers_cell_one_token_at_a_time():
    torch.manual_seed(1)
    block, x = Recurrence(4, 6).double(), torch.randn(2, 5, 4, dtype=torch.float64)
    state, expected = torch.zeros(2, 6), []
    for t in range(5):
        y = block.norm(x[:, t])
        z = torch.sigmoid(block.update(y))
        state = (1 - z) * state + z * block.candidate(y)
        expected.append(x[:, t] + block.out(state * torch.nn.functional.silu(block.gate(y))))
    actual, last = block(x, None, None)
    torch.testing.assert_close(actual, torch.stack(expected, dim=1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(last, state.float())


def test_token_by_token_it_is_the_same_as_all_at_once():
    network = new_network()
    cache, pieces = network.new_cache(2, 13), []
    for tokens in BATCH["input_ids"].split([5, 1, 1, 6], dim=1):
        pieces.append(network({"input_ids": tokens}, cache))
    torch.testing.assert_close(torch.cat(pieces, dim=1), network(BATCH), atol=1e-6, rtol=1e-5)


def test_no_token_sees_those_after_it_or_another_document():
    network, changed = new_network(), BATCH["input_ids"].clone()
    changed[:, 4] += 1
    documents = torch.tensor([[0] * 7 + [1] * 6] * 2)
    before = network({**BATCH, "document_ids": documents})
    after = network({"input_ids": changed % 11, "document_ids": documents})
    assert (before != after).any(-1).all(0).tolist() == [4 <= t < 7 for t in range(13)]
    alone = network({"input_ids": BATCH["input_ids"][:, 7:]})
    torch.testing.assert_close(before[:, 7:], alone, atol=1e-6, rtol=1e-5)


def test_from_the_meta_device_every_parameter_is_initialised():
    with torch.device("meta"):
        network = MinGRU(**SIZES)
    network.to_empty(device="cpu")
    for parameter in network.parameters():
        parameter.data.fill_(torch.nan)
    network.init_weights()
    assert all(parameter.isfinite().all() for parameter in network.parameters())


def test_the_operations_are_those_of_the_matrix_products():
    assert new_network().flops_per_token(16) == 6 * (11 * 8 + 2 * 4 * 8 * 12)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_below_one_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
        MinGRU(**{**SIZES, name: 0})


def compare_with_whole(rank: int, folder: str) -> None:
    """Runs on each of two ranks: logits and gradients of the divided network are those of the whole."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    whole, divided = new_network(), new_network()
    parallelize_module(divided, init_device_mesh("cpu", (2,)), divided.tensor_parallel_plan())
    assert divided.layers[0].gate.weight.to_local().shape == (6, 8)
    for network in (whole, divided):
        network(BATCH).square().sum().backward()
    torch.testing.assert_close(divided(BATCH), whole(BATCH))
    for (name, one), other in zip(divided.named_parameters(), whole.parameters(), strict=True):
        grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        torch.testing.assert_close(grad, other.grad, msg=name)
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_that_share_the_channels_compute_the_same(tmp_path):
    torch.multiprocessing.spawn(compare_with_whole, (str(tmp_path),), nprocs=2)
