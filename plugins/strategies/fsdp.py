"""Data parallelism with parameters, gradients and optimizer states spread over the ranks."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from core.errors import ConfigError
from core.technique import technique
from plugins.strategies.mesh_strategy import MeshStrategy
from plugins.strategies.shared_scaler import scales_losses

if TYPE_CHECKING:
    from core.selection import Run, Selected

Format = Literal["fp32", "bf16", "fp16"]
FORMATS = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@technique(
    paper="ZeRO, arXiv:1910.02054, stages 2 and 3; PyTorch FSDP, arXiv:2304.11277; torch's fully_shard (FSDP2)"
)
class FSDP(MeshStrategy):
    """Spreads parameters, gradients and optimizer states over the ranks, block by block.

    Each rank keeps 1/n of every parameter; a block is gathered just before it is used. Checkpoints are those
    of a single process, gathered on rank 0.

    Args:
        stage: 3 gives a block's parameters back after forward and gathers them again for backward; 2 keeps
            them: less traffic, more memory.
        replicas: Copies of the model: parameters are spread within each, gradients averaged over all (hybrid
            sharding). A divisor of the number of ranks, on several machines usually the number of machines.
        offload: Whether parameters, gradients and optimizer states stay in the memory of the CPU, where the
            optimizer steps; a block is copied to the device just before it is used.
        param_format: What blocks are gathered and computed in; None: as they are kept. "fp16" needs a
            precision with a scaler.
        reduce_format: What gradients are averaged in; None: as they were computed.
        timeout_minutes: How long a rank waits for the others before it gives up.

    Raises:
        ConfigError: If a number is out of its range.

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
        super().__init__(timeout_minutes)
        if replicas < 1:
            raise ConfigError(f"FSDP: replicas is {replicas}; it must be at least 1.")
        self.stage, self.replicas, self.offload = stage, replicas, offload
        self.format = FORMATS[param_format]
        # Not all floating inputs of a block: tables of rotary positions lose too much in two bytes.
        self.policy = MixedPrecisionPolicy(
            param_dtype=self.format, reduce_dtype=FORMATS[reduce_format], cast_forward_inputs=False
        )

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields that the ranks cannot be dealt out to the replicas, or that gradients in fp16 are not scaled."""
        if own.arguments.get("param_format") == "fp16" and not scales_losses(run):
            yield (
                "param_format is fp16, in which small gradients become zero unless the loss is scaled: add "
                "--trainer.precision=16-mixed, or take bf16"
            )
        replicas = own.arguments.get("replicas", 1)
        if replicas > 0 and run.world_size % replicas:
            fits = [number for number in range(1, run.world_size + 1) if run.world_size % number == 0]
            yield f"replicas is {replicas}, which does not divide {run.world_size} ranks; {fits} do"

    def connect_mesh(self) -> None:
        """Makes a mesh of replicas x ranks of each."""
        sizes = self.replicas, self.world_size // self.replicas
        self.mesh = init_device_mesh(
            self.root_device.type, sizes, mesh_dim_names=("data_replicate", "data_shard")
        )
        assert dist.group.WORLD is not None
        self.loss_group = dist.group.WORLD

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank reads rows of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str:
        """With one for tensors on the CPU, too, where gradients and what is summed of them lie under `offload`."""
        backend, device = super().process_group_backend, self.root_device.type
        return f"cpu:gloo,{device}:{backend}" if self.offload and device != "cpu" else backend

    def setup_environment(self) -> None:
        """Connects the processes; of a backend by several names Lightning does not take its leave."""
        super().setup_environment()
        if "," in self.process_group_backend:
            atexit.register(_destroy_dist_connection)

    @property
    def parameter_device(self) -> torch.device:
        """The CPU under `offload`."""
        return torch.device("cpu") if self.offload else self.root_device

    def parallelize(self, module: LightningModule) -> None:
        """Spreads each block on its own, and what is left with the whole module."""
        cuda = self.root_device.type == "cuda"
        options = {
            "mesh": self.mesh if self.replicas > 1 else self.mesh["data_shard"],
            "mp_policy": self.policy,
            "offload_policy": CPUOffloadPolicy(pin_memory=cuda) if self.offload else OffloadPolicy(),
        }
        for block in module.network.blocks:
            fully_shard(block, reshard_after_forward=self.stage == 3, **options)
            if self.format is not None:
                block.register_forward_pre_hook(partial(_cast_hidden, self.format))
        fully_shard(module, reshard_after_forward=False, **options)  # its loss and head follow its forward


def _cast_hidden(format: torch.dtype, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return inputs[0].to(format), *inputs[1:]
