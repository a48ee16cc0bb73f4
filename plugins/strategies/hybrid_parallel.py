"""Several kinds of parallelism at once, on one mesh of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel as split_loss

from core.contracts import TokenSum
from core.technique import technique
from plugins.strategies import tensor_parallel
from plugins.strategies.mesh_sizes import MeshSizes, group_of, joined
from plugins.strategies.mesh_strategy import MeshStrategy

if TYPE_CHECKING:
    from core.contracts import Network
    from core.selection import Run, Selected


@technique(
    paper="Megatron-LM, arXiv:1909.08053 (tensor), arXiv:2205.05198 (sequence), arXiv:2104.04473 (all at once)"
)
class HybridParallel(MeshStrategy):
    """Several kinds of parallelism at once, on one mesh of ranks: data, sharded data, tensor.

    The product of the sizes is the number of ranks; the ranks of a tensor-parallel group are neighbours. How a
    network is cut up it says itself: see `core.contracts.Network`. Checkpoints are those of a single process.

    Args:
        data_replicate: Copies of everything below, between which gradients are averaged.
        data_shard: Ranks over which parameters, gradients and optimizer states are spread (as `FSDP`, stage 3),
            each with rows of its own; None: what the other sizes leave.
        tensor: Ranks over which each matrix is cut up.
        sequence: 1, or the size of `tensor`: its ranks then split tokens, too, where no matrix is cut up.
        context: Ranks that share each sequence.
        pipeline: Stages of blocks, one after another.
        expert: Ranks that share the experts.
        loss_parallel: Whether the head is cut up along the vocabulary, so that no rank has all logits.
        timeout_minutes: How long a rank waits for the others before it gives up.

    Raises:
        ConfigError: If a number is out of its range.

    Example:
        trainer:
          strategy:
            class_path: HybridParallel
            init_args: {tensor: 1}
    """

    def __init__(
        self,
        data_replicate: int = 1,
        data_shard: int | None = None,
        tensor: int = 1,
        sequence: int = 1,
        context: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        loss_parallel: bool = True,
        timeout_minutes: float = 30.0,
    ) -> None:
        super().__init__(timeout_minutes)
        self.sizes = MeshSizes(data_replicate, data_shard, tensor, context, pipeline, expert)
        self.sequence, self.loss_parallel = sequence > 1, loss_parallel and tensor > 1

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what of the sizes does not fit the ranks, the network or the data."""
        given = own.arguments
        sizes = MeshSizes(**{name: given[name] for name in MeshSizes.__dataclass_fields__})
        yield from sizes.misfits(run.world_size)
        if given["sequence"] not in (1, given["tensor"]):
            yield f"sequence is {given['sequence']}; it is 1, or {given['tensor']} as tensor"
        if given["expert"] > 1:
            yield "expert is above 1, and no network has experts yet"
        network = _network(run)
        if network is None:  # which says by itself what is wrong
            return
        if given["tensor"] > 1:
            split = given["sequence"] > 1, given["loss_parallel"]
            yield from tensor_parallel.misfits(network, given["tensor"], *split)

    def connect_mesh(self) -> None:
        """Makes the mesh."""
        self.mesh = self.sizes.mesh(self.root_device.type, self.world_size)
        self.loss_group = group_of(joined(self.mesh, "data_replicate", "data_shard", "context"))
        self._data = joined(self.mesh, "data_replicate", "data_shard")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks of a tensor-parallel group read the same rows."""
        return {"num_replicas": self._data.size(), "rank": self._data.get_local_rank()}

    def parallelize(self, module: LightningModule) -> None:
        """Cuts up the network and spreads the parts."""
        network = module.network
        if self.sizes.tensor > 1:
            tensor_parallel.apply(network, self.mesh["tensor"], self.sequence, self.loss_parallel)
        if self.loss_parallel:
            module.compute_loss = self.compute_loss  # type: ignore[method-assign]
        options: dict[str, Any] = {"mesh": self._sharding_mesh(), "mp_policy": MixedPrecisionPolicy()}
        for block in network.blocks:
            fully_shard(block, **options)
        fully_shard(module, reshard_after_forward=False, **options)

    def _sharding_mesh(self) -> Any:
        shard = joined(self.mesh, "data_shard", "context")
        if self.sizes.data_replicate == 1:
            return shard
        return self.mesh["data_replicate", shard.mesh_dim_names[0]]

    def compute_loss(self, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the objective's sums, of parts of the logits added up over the tensor-parallel ranks."""
        module = self.lightning_module
        loss, metrics = module.objective.loss(module.network, batch)
        return _whole(loss), {name: _whole(value) for name, value in metrics.items()}

    def step_context(self) -> AbstractContextManager[Any]:
        """Computes the cross-entropy of logits that are cut up along the vocabulary."""
        context: AbstractContextManager[Any] = split_loss() if self.loss_parallel else nullcontext()
        return context

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiates the loss as it was computed."""
        with self.step_context():
            return super().backward(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a prediction step, of whose result each rank has the whole."""
        found = super().predict_step(*args, **kwargs)
        return found.full_tensor() if isinstance(found, DTensor) else found


def _whole(figure: TokenSum) -> TokenSum:
    total, tokens = (v.full_tensor() if isinstance(v, DTensor) else v for v in figure)
    return TokenSum(total, tokens)


def _network(run: Run) -> Network | None:
    """Returns the run's network without memory, or None where it cannot be built."""
    from core.cli import build_network

    try:
        with torch.device("meta"):
            network: Network = build_network(run.argument("model.network"))
    except Exception:  # the run's own building, which follows, says what is wrong
        return None
    return network
