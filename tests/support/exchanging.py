"""Experts over two gloo ranks, of which one may get or have no tokens, beside the same experts in one process."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from plugins.networks.parts.moe import Experts
from plugins.strategies.expert_parallel import exchanged

COUNTS = {  # tokens of each of 4 experts, on each rank; rank 0 has the first two
    "uneven": ([3, 0, 5, 1], [2, 4, 0, 7]),
    "all to one rank": ([3, 2, 0, 0], [1, 6, 0, 0]),
    "a rank without tokens": ([0, 0, 0, 0], [2, 0, 3, 4]),
    "no tokens at all": ([0, 0, 0, 0], [0, 0, 0, 0]),
}


def whole():
    torch.manual_seed(0)
    experts = Experts(4, 8, 12, "silu").double()
    for weight in experts.parameters():
        nn.init.normal_(weight)
    return experts


def given(counts, rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(counts[rank]), 8, generator=generator, dtype=torch.float64).requires_grad_()


def of_rank(rank, folder):
    """Saves what one of two ranks gets and computes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found = {}
    for name, counts in COUNTS.items():
        experts = whole()
        for key, weight in list(experts.named_parameters()):
            setattr(experts, key, nn.Parameter(weight.detach()[2 * rank : 2 * rank + 2].clone()))
        x = given(counts, rank)
        y = exchanged(experts.forward, dist.group.WORLD, x, torch.tensor(counts[rank]))
        y.square().sum().backward()
        found[name] = [y.detach(), x.grad, *(weight.grad for weight in experts.parameters())]
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
