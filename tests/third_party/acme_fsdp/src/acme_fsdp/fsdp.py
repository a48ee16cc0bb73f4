"""Data parallelism with parameters, gradients and optimizer states sharded over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from core import lightning_compat
from core.contracts import ConnectsRanks, ReadsParts, SavesParts
from core.errors import ConfigError
from core.technique import technique
from core.training import shards
from toolkit.shards import copy_to_shard


@technique(
    paper="ZeRO, arXiv:1910.02054, stages 2 and 3; PyTorch FSDP, arXiv:2304.11277; torch's fully_shard (FSDP2)",
    api=">=1.4,<2",
)
class AcmeFSDP(ParallelStrategy):
    """Shards parameters, gradients and optimizer states over all ranks, block by block.

    Rank 0 builds the model on the CPU; its weights are sent once, and each rank keeps its part. A checkpoint is that of a
    single process, gathered on rank 0, or with `ShardedCheckpoint` each rank writes and reads its own parts.

    Args:
        stage: 3 frees a block's parameters after its forward pass and gathers them again for backward; 2 keeps them.
        timeout_minutes: How long a rank waits for the others before it fails.

    Raises:
        ConfigError: If `timeout_minutes` is not above 0.

    Example:
        trainer:
          strategy:
            class_path: AcmeFSDP
            init_args: {stage: 3}
    """

    is_distributed = True
    restore_checkpoint_after_setup = True

    def __init__(self, stage: Literal[2, 3] = 3, timeout_minutes: float = 30.0) -> None:
        if not timeout_minutes > 0:
            raise ConfigError(f"AcmeFSDP: timeout_minutes is {timeout_minutes}; it must be above 0.")
        super().__init__()
        self.stage, self.timeout, self.num_nodes = stage, timedelta(minutes=timeout_minutes), 1

    # -- processes --------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank reads rows of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @cached_property
    def launcher(self) -> Any:
        """Starts the other ranks of this machine, where nothing else does."""
        environment = self.cluster_environment
        if environment.creates_processes_externally:
            return None
        return lightning_compat.SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connects the processes."""
        super().setup_environment()
        environment = self.cluster_environment
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank
        lightning_compat.init_process_group(
            environment, lightning_compat.default_backend(self.root_device), timeout=self.timeout
        )
        self.mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        self.loss_group = dist.group.WORLD
        if isinstance(self.checkpoint_io, ConnectsRanks):
            self.checkpoint_io.connect()

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank `src`."""
        objects = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Sums a tensor over a group, or averages it, in place."""
        if isinstance(tensor, Tensor):
            dist.all_reduce(tensor, group=group)
            if reduce_op in ("mean", "avg"):
                tensor /= dist.get_world_size(group)
        return tensor

    # -- the model --------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds the model on the CPU of rank 0, and without memory elsewhere."""
        device = torch.device("cpu" if self.global_rank == 0 else "meta")
        with device, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shards the model and builds the optimizer."""
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self.model = self.precision_plugin.convert_module(module)
        full = _tensors(module)
        with _keeping_ties():
            nn.Module.to(module, "meta")
        for block in module.network.blocks:
            fully_shard(block, mesh=self.mesh, reshard_after_forward=self.stage == 3)
        fully_shard(module, mesh=self.mesh, reshard_after_forward=False)
        with _keeping_ties():
            module.to_empty(device=self.root_device)
        lightning_compat.set_device(module, self.root_device)
        own = _tensors(module)
        for name, tensor in full.items():
            message = tensor if self.global_rank == 0 else torch.empty_like(tensor, device="cpu")
            message = message.to(self.root_device)
            dist.broadcast(message, 0)
            copy_to_shard(own[name], message)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            lightning_compat.optimizers_to_device(self.optimizers, self.root_device)

    def model_to_device(self) -> None:
        """Does nothing: `setup` puts each part where it belongs."""

    # -- steps ------------------------------------------------------------------------------------

    def run_as_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module as its forward pass, with the weights gathered."""
        return lightning_compat.call_as_forward(self, name, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training step as the module's forward pass."""
        with self.precision_plugin.train_step_context():
            return self.run_as_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a validation step as the module's forward pass."""
        with self.precision_plugin.val_step_context():
            return self.run_as_forward("validation_step", *args, **kwargs)

    # -- gradients --------------------------------------------------------------------------------

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """Returns the 2-norm, 0-d, of the gradients of the whole model."""
        own = shards.local_tensors(shards.gradients(optimizer))
        squares = torch.stack(torch._foreach_norm(own, 2, torch.float32)).square().sum()
        dist.all_reduce(squares)
        return squares.sqrt()

    def clip_gradients(self, optimizer: Any, clip: float | None = None, algorithm: str | None = None) -> None:
        """Scales gradients to a norm of at most `clip`, or limits each value to it ("value")."""
        if not clip:
            return
        own = shards.local_tensors(shards.gradients(optimizer))
        if algorithm == "value":
            torch._foreach_clamp_min_(own, -clip)
            torch._foreach_clamp_max_(own, clip)
        else:
            torch._foreach_mul_(own, (clip / (self.gradient_norm(optimizer) + 1e-6)).clamp(max=1.0))

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint; called on every rank."""
        if isinstance(self.checkpoint_io, SavesParts):
            self.checkpoint_io.save_parts(checkpoint, filepath)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint; of a sharded one without tensors, of which each rank reads its parts later."""
        path = self.broadcast(str(checkpoint_path))
        found = self.checkpoint_io.read_parts(path) if isinstance(self.checkpoint_io, ReadsParts) else None
        return super().load_checkpoint(path, weights_only) if found is None else found

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns all weights on rank 0 and nothing elsewhere, or this rank's parts; called on every rank."""
        shards.reshard(self.lightning_module)
        return self._saved(self.lightning_module.state_dict(keep_vars=True))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Takes this rank's part of the weights."""
        shards.reshard(self.lightning_module)
        for name, target in self.lightning_module.state_dict(keep_vars=True).items():
            if strict or name in checkpoint["state_dict"]:
                self._load(checkpoint["state_dict"][name], target.detach())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the state of the whole optimizer on rank 0 and nothing elsewhere, or this rank's parts."""
        return self._saved(lightning_compat.unwrapped(optimizer).state_dict())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes this rank's part of the optimizer's state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            parts = {
                number: {name: self._part(value, parameters[number]) for name, value in values.items()}
                for number, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})
            lightning_compat.optimizers_to_device([optimizer], self.root_device)

    def _load(self, value: Any, target: Tensor) -> None:
        if isinstance(value, Tensor):
            copy_to_shard(target, value)
        else:  # stored: this rank's part alone is read
            self.checkpoint_io.fill([(value, target)])

    def _part(self, value: Any, parameter: Tensor) -> Any:
        """Returns this rank's part of a state of the parameter's shape; other values as they are."""
        if not hasattr(value, "dtype"):
            return value
        alike = isinstance(parameter, DTensor) and value.shape == parameter.shape
        if isinstance(value, Tensor) and not alike:
            return value
        like = parameter.detach() if alike else torch.empty(value.shape)
        part = torch.empty_like(like, dtype=value.dtype)
        self._load(value, part)
        return part

    def _saved(self, state: Any) -> Any:
        return state if isinstance(self.checkpoint_io, SavesParts) else self._gathered(state)

    def _gathered(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            found = {key: self._gathered(item) for key, item in value.items()}
            return found if self.is_global_zero else {}
        if isinstance(value, list):
            return [self._gathered(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        full = shards.full_tensor(value.detach())
        return full.to("cpu", copy=True) if self.is_global_zero else full.new_empty(0)

    def teardown(self) -> None:
        """Ends what was started; leaves the model where it is."""
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


@contextmanager
def _keeping_ties() -> Iterator[None]:
    # Swapped, a parameter stays the same object: tied weights stay tied.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items()
    }
