"""What strategies that spread one model over a mesh of ranks have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from core.checkpoints import sharded
from core.errors import ConfigError
from core.training import shards
from plugins.strategies import gradients, shared_check, tensors
from plugins.strategies.shared_scaler import SharedScaler


class MeshStrategy(ParallelStrategy):
    """Spreads a model that no rank need hold whole; a checkpoint is that of a single process, or parts.

    Rank 0 builds and initialises the model on the CPU, the others build it without memory; each weight is
    then sent once and every rank keeps its part: the values are those of a single process on the CPU.

    Not a `ModelParallelStrategy`, which Lightning does not let run with fp16 and a scaler.

    Args:
        timeout_minutes: How long a rank waits for the others before it gives up.

    Attributes:
        mesh: The mesh of ranks, once processes are connected.
        loss_group: The ranks that have different tokens: losses are sums over them, gradients are averaged.
    """

    mesh: DeviceMesh
    loss_group: dist.ProcessGroup

    def __init__(self, timeout_minutes: float) -> None:
        if not timeout_minutes > 0:
            raise ConfigError(
                f"{type(self).__name__}: timeout_minutes is {timeout_minutes}; it must be above 0."
            )
        super().__init__()
        self.timeout = timedelta(minutes=timeout_minutes)
        self.num_nodes = 1

    @abstractmethod
    def connect_mesh(self) -> None:
        """Sets `mesh` and `loss_group`; called once the processes are connected."""

    @abstractmethod
    def parallelize(self, module: LightningModule) -> None:
        """Spreads the parameters of a module on the meta device over the mesh."""

    # -- processes --------------------------------------------------------------------------------

    is_distributed = True
    """Lightning asks strategies of other kinds than its own."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            environment = self.cluster_environment
            self._launcher = _SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tells the launcher's environment which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    @property
    def process_group_backend(self) -> str:
        """What the processes talk through, by torch's name."""
        return str(_get_default_process_group_backend_for_device(self.root_device))

    def setup_environment(self) -> None:
        """Connects the processes."""
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device if self.root_device.type != "cpu" else None
        options: Any = {"timeout": self.timeout, "device_id": device}
        _init_dist_connection(self.cluster_environment, self.process_group_backend, **options)
        self.connect_mesh()
        if connect := getattr(self.checkpoint_io, "connect", None):
            connect()

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if dist.is_initialized():
            dist.barrier(device_ids=None if self.root_device.type == "cpu" else [self.root_device.index])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank `src`."""
        objects = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Averages a tensor over a group, or what else `reduce_op` says, in place; by default over all ranks."""
        if not isinstance(tensor, Tensor):
            return tensor
        averages = reduce_op in ("mean", "avg", dist.ReduceOp.AVG)  # gloo has no average of its own
        name = "SUM" if averages or reduce_op is None else reduce_op
        dist.all_reduce(
            tensor, getattr(dist.ReduceOp, name.upper()) if isinstance(name, str) else name, group
        )
        if averages:
            tensor.copy_(tensor / dist.get_world_size(group))
        return tensor

    # -- the model --------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where the model is built: on the CPU of rank 0, without memory elsewhere."""
        place = torch.device("cpu" if self.global_rank == 0 else "meta")
        with place, self.precision_plugin.tensor_init_context():
            yield

    @property
    def parameter_device(self) -> torch.device:
        """Where parameters are kept between their uses."""
        return self.root_device

    def setup(self, trainer: Trainer) -> None:
        """Spreads the model and builds the optimizer."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        module = self.lightning_module
        assert module is not None
        tensors.refuse_extra_state(module, type(self).__name__)
        whole = tensors.named_tensors(module)
        tensors.to_meta(module)
        self.parallelize(module)
        tensors.to_memory(module, self.parameter_device)
        module._device = self.root_device
        tensors.spread(whole, module, self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.parameter_device)

    def model_to_device(self) -> None:
        """Does nothing: `setup` puts each part where it belongs."""

    def setup_precision_plugin(self) -> None:
        """Attaches the precision; a scaler of fp16 gradients has to skip a step on all ranks or on none."""
        super().setup_precision_plugin()
        if getattr(self.precision_plugin, "scaler", None) is not None:
            self.precision_plugin.scaler = SharedScaler(self.precision_plugin.scaler, self.root_device)

    # -- steps ------------------------------------------------------------------------------------

    def step_context(self) -> AbstractContextManager[Any]:
        """What surrounds each step besides the precision."""
        return nullcontext()

    def run_as_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module as its forward: what is no block's is gathered for as long as it takes."""
        with self.step_context():
            return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training step as the module's forward."""
        with self.precision_plugin.train_step_context():
            return self.run_as_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a validation step as the module's forward."""
        with self.precision_plugin.val_step_context():
            return self.run_as_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a test step as the module's forward."""
        with self.precision_plugin.test_step_context():
            return self.run_as_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a prediction step as the module's forward."""
        with self.precision_plugin.predict_step_context():
            return self.run_as_forward("predict_step", *args, **kwargs)

    # -- gradients --------------------------------------------------------------------------------

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the norm, a 0-d tensor, of the gradients of the whole model."""
        return gradients.squared_norm(shards.gradients(optimizer)).sqrt()

    def clip_gradients(
        self, optimizer: Optimizer, clip: float | None = None, algorithm: str | None = None
    ) -> None:
        """Scales gradients to a norm of at most `clip`, or cuts each number off there ("value")."""
        if not clip:
            return
        if algorithm == "value":
            gradients.clamp_(shards.gradients(optimizer), clip)
        else:
            gradients.scale_to_(shards.gradients(optimizer), self.gradient_norm(optimizer), clip)

    # -- checkpoints ------------------------------------------------------------------------------

    restore_checkpoint_after_setup = True
    """Weights are loaded into the parts, not before there are any."""

    @property
    def writes_parts(self) -> bool:
        """Whether each rank writes its own parts into checkpoints, which are folders then."""
        return hasattr(self.checkpoint_io, "save_parts")

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint; called on every rank."""
        if self.writes_parts:
            self.checkpoint_io.save_parts(checkpoint, filepath)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint; of one that is a folder, no tensors yet, of which each rank will read its parts."""
        path = Path(self.broadcast(str(checkpoint_path)))  # rank 0 may have passed over one that is damaged
        if not sharded.is_sharded(path):
            return super().load_checkpoint(path, weights_only)
        shared_check.check(path)
        return sharded.outline(path)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the whole model's weights on rank 0, nothing elsewhere, or this rank's parts; called on every rank."""
        assert self.lightning_module is not None
        if self.writes_parts:
            return tensors.state_of(self.lightning_module)
        return tensors.gather(tensors.state_of(self.lightning_module), keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Takes this rank's part of the whole model's weights."""
        assert self.lightning_module is not None
        pairs: list[tuple[sharded.Stored, Tensor]] = []
        for name, target in tensors.state_of(self.lightning_module).items():
            if strict or name in checkpoint["state_dict"]:
                stored = checkpoint["state_dict"][name]
                if isinstance(stored, sharded.Stored):
                    pairs.append((stored, target))
                else:
                    tensors.fill(target, stored)
        sharded.fill(pairs)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole optimizer's state on rank 0, nothing elsewhere, or this rank's parts."""
        state = getattr(optimizer, "_optimizer", optimizer).state_dict()
        return state if self.writes_parts else tensors.gather(state, self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes this rank's part of the whole optimizer's state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            parts = {n: tensors.parts(values, parameters[n]) for n, values in state["state"].items()}
            rooms = [(v, parts[n][k]) for n, values in state["state"].items() for k, v in values.items()]
            sharded.fill((stored, room) for stored, room in rooms if isinstance(stored, sharded.Stored))
            optimizer.load_state_dict({**state, "state": parts})
            _optimizers_to_device([optimizer], self.parameter_device)

    def teardown(self) -> None:
        """Ends what was started; leaves the model where it is: no rank has room for the whole."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
