"""Data parallelism with parameters, gradients and optimizer states sharded over the ranks."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from core.errors import ConfigError
from core.lightning_compat import destroy_process_group
from core.technique import technique
from core.training import shards
from plugins.strategies import mixed_precision
from plugins.strategies.frozen_shards import kept_blocks
from plugins.strategies.mesh_strategy import MeshStrategy
from plugins.strategies.mixed_precision import Format
from plugins.strategies.ordered_reduce_scatter import OrderedReduceScatter
from toolkit.ordered_sums import Turn, norm_of_full

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="ZeRO, arXiv:1910.02054, stages 2 and 3; PyTorch FSDP, arXiv:2304.11277; torch's fully_shard (FSDP2)",
    strategy_words=("fsdp",),
)
class FSDP(MeshStrategy):
    """Fully sharded data parallelism: parameters, gradients and optimizer states are sharded, block by block.

    Each rank keeps 1/n of every parameter; a block is gathered just before it is used. Checkpoints are those
    of a single process, gathered on rank 0, or with `ShardedCheckpoint` written by all ranks.

    Args:
        stage: 3 frees a block's gathered parameters after forward and gathers them again for backward; 2 keeps
            them, over all micro-batches of a step: less communication, more memory.
        replicas: Number of copies of the model: parameters are sharded within each copy, gradients averaged over
            all (hybrid sharding). A divisor of the number of ranks, usually the number of machines.
        offload: Whether parameters, gradients and optimizer states are kept in CPU memory, where the optimizer
            steps; a block is copied to the device just before it is used.
        param_format: Data type in which weights are gathered and blocks computed; None: bf16 under the precision
            bf16-mixed, else that of the parameters. "fp16" needs a precision with a loss scaler.
        reduce_format: Data type in which gradients are averaged; None: that in which they were computed. Sums over the
            micro-batches of a step are in float32 with each of them.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        trainer:
          strategy:
            class_path: FSDP
            init_args: {stage: 3}
    """

    def __init__(
        self,
        stage: Literal[2, 3] = 3,
        replicas: int = 1,
        offload: bool = False,
        param_format: Format | None = None,
        reduce_format: Format | None = None,
        timeout_minutes: float = 30.0,
    ) -> None:
        super().__init__(timeout_minutes, param_format, reduce_format)
        if replicas < 1:
            raise ConfigError(f"FSDP: replicas is {replicas}; it must be at least 1.")
        self.stage, self.replicas, self.offload = stage, replicas, offload
        self._turn: Turn | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error if `replicas` does not divide the ranks, or if gradients in fp16 are not scaled."""
        yield from mixed_precision.compatibility_errors(run, own.arguments)
        replicas = own.arguments.get("replicas", 1)
        if replicas > 0 and run.world_size % replicas:
            fits = [number for number in range(1, run.world_size + 1) if run.world_size % number == 0]
            yield f"replicas is {replicas}, which does not divide {run.world_size} ranks; {fits} do"

    def connect_mesh(self) -> None:
        """Makes a mesh of replicas x ranks per replica."""
        sizes = self.replicas, self.world_size // self.replicas
        self.mesh = init_device_mesh(
            self.root_device.type, sizes, mesh_dim_names=("data_replicate", "data_shard")
        )
        assert dist.group.WORLD is not None
        self.loss_group = dist.group.WORLD

    @property
    def process_group_backend(self) -> str:
        """The backend by torch's name; under `offload` also gloo, for gradients on the CPU."""
        backend, device = super().process_group_backend, self.root_device.type
        return f"cpu:gloo,{device}:{backend}" if self.offload and device != "cpu" else backend

    def setup_environment(self) -> None:
        """Connects the processes; Lightning does not destroy the group of a backend with several names at exit."""
        super().setup_environment()
        if "," in self.process_group_backend:
            atexit.register(destroy_process_group)

    @property
    def frees_blocks(self) -> bool:  # type: ignore[override]
        """Whether the gathered weights of a block are freed after its forward."""
        return self.stage == 3

    @property
    def parameter_device(self) -> torch.device:
        """Where parameters are kept: the CPU under `offload`."""
        return torch.device("cpu") if self.offload else self.root_device

    def parallelize(self, module: LightningModule) -> None:
        """Shards each block separately, and the remaining parameters with the module."""
        options = self.frozen_options() | ({"mesh": self.mesh} if self.replicas > 1 else {})
        trained = self.language_module
        for block in (*trained.network.blocks, *kept_blocks(trained.objective)):
            self.formats.set_up(block)
            policy = self.formats.policy(block)
            fully_shard(block, reshard_after_forward=self.frees_blocks, mp_policy=policy, **options)
        # Head and loss use its parameters after forward.
        fully_shard(module, reshard_after_forward=False, mp_policy=self.formats.policy(module), **options)
        self.defer_reduction(module, self.replicas > 1)

    def frozen_options(self) -> dict[str, Any]:
        """Returns options of `fully_shard`: over the ranks of one copy of the model."""
        pinned = self.root_device.type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=pinned) if self.offload else OffloadPolicy()
        return {"mesh": self.mesh["data_shard"], "offload_policy": policy}

    def sum_in_order(self, turn: Turn) -> None:
        """Adds the ranks' gradients one after the other; see :class:`toolkit.ordered_sums.SumsInOrder`."""
        self._turn = turn
        for module in self.language_module.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_reduce_scatter(cast(Any, OrderedReduceScatter(turn)))

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the norm of the gradients of the full model, a 0-d tensor."""
        if self._turn is None:
            return super().gradient_norm(optimizer)
        return norm_of_full(shards.gradients(optimizer))
