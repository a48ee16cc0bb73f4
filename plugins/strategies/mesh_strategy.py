"""Base class of the strategies that shard one model over a mesh of ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from core import lightning_compat
from core.contracts import ConnectsRanks, ReadsParts, SavesParts, ScalesLosses
from core.errors import ConfigError
from core.training import shards
from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.strategies import gradients, initial_shards, tensors
from plugins.strategies.deferred_reduction import DeferredReduction
from plugins.strategies.frozen_shards import FrozenShards, shard_frozen
from plugins.strategies.initial_shards import Begins, InitialShards, RowNorms, Spread
from plugins.strategies.mixed_precision import FORMATS, Format, Formats
from plugins.strategies.shared_scaler import SharedScaler
from toolkit.initial_values import Start, named, new_seed
from toolkit.initial_weights import SeesWeights


class MeshStrategy(ParallelStrategy):
    """Shards a model over ranks; a checkpoint is that of a single process, or sharded.

    The values of its weights are those of a single process. The network is built on the meta device, and each rank draws its
    own shards, if the network says how each parameter begins (`toolkit.initial_values`) and nothing else looks at its weights.
    Otherwise rank 0 builds and initialises it on the CPU, and sends each weight to all.

    Not a `ModelParallelStrategy`, which Lightning does not allow with fp16 and a loss scaler.

    Args:
        timeout_minutes: Minutes that a rank waits for the others before it raises an error.
        param_format: See :class:`Formats`.
        reduce_format: See there.

    Attributes:
        formats: Data types of gathered weights and reduced gradients; set in `setup`.
        mesh: The mesh of ranks; set once the processes are connected.
        starts: Name in the module -> how it begins; empty: rank 0 has the values.
        loss_group: The ranks that have different tokens: losses are summed over them, gradients averaged.
        frozen_mesh: The ranks over which frozen networks of objectives are sharded; None: they stay whole.
    """

    formats: Formats
    mesh: DeviceMesh
    loss_group: dist.ProcessGroup
    frozen_mesh: DeviceMesh | None = None

    def __init__(
        self,
        timeout_minutes: float,
        param_format: Format | None = None,
        reduce_format: Format | None = None,
    ) -> None:
        if not timeout_minutes > 0:
            raise ConfigError(
                f"{type(self).__name__}: timeout_minutes is {timeout_minutes}; it must be above 0."
            )
        super().__init__()
        self.timeout = timedelta(minutes=timeout_minutes)
        self.num_nodes = 1
        self.starts: dict[str, Begins] = {}
        self._formats = param_format, reduce_format
        self._deferred: DeferredReduction | None = None
        self._frozen: list[FrozenShards] = []

    @abstractmethod
    def connect_mesh(self) -> None:
        """Sets `mesh` and `loss_group`; called once the processes are connected."""

    @abstractmethod
    def parallelize(self, module: LightningModule) -> None:
        """Shards the parameters of a module on the meta device over the mesh."""

    # -- processes --------------------------------------------------------------------------------

    is_distributed = True
    """Lightning reads this attribute of strategies that are not its own."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def language_module(self) -> Any:
        """The module that is trained, whose network and objective Lightning's type does not have."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank reads rows of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @cached_property
    def launcher(self) -> Any:
        """Starts the other ranks of this machine, where nothing else does; Lightning reads it before it connects them."""
        environment = self.cluster_environment
        assert environment is not None
        if environment.creates_processes_externally:
            return None
        return lightning_compat.SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Sets rank and world size of the launcher's environment."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # the decorator's, set as Lightning sets it

    @property
    def process_group_backend(self) -> str:
        """The communication backend, by torch's name."""
        return str(lightning_compat.default_backend(self.root_device))

    def setup_environment(self) -> None:
        """Connects the processes."""
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device if self.root_device.type != "cpu" else None
        options: Any = {"timeout": self.timeout, "device_id": device}
        lightning_compat.init_process_group(self.cluster_environment, self.process_group_backend, **options)
        self.connect_mesh()
        if isinstance(self.checkpoint_io, ConnectsRanks):
            self.checkpoint_io.connect()

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
        """Reduces a tensor in place, by default to its mean over all ranks.

        Args:
            tensor: Changed in place; other values are returned as they are.
            group: The ranks; None: all.
            reduce_op: torch's name or constant of the operation.
        """
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
        """Context in which the model is built: on the meta device, or, if rank 0 has to initialise it, there on the CPU."""
        self.starts = initial_shards.starts_of(self.language_module.trainer, type(self).__name__)
        place = torch.device("cpu" if self.global_rank == 0 and not self.starts else "meta")
        with place, self.precision_plugin.tensor_init_context():
            yield
        if self.starts:
            self.starts |= initial_shards.added_starts(self.language_module, self.starts)

    @property
    def parameter_device(self) -> torch.device:
        """Device on which parameters are kept."""
        return self.root_device

    def setup(self, trainer: Trainer) -> None:
        """Shards the model and builds the optimizer."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.language_module
        self.model = self.precision_plugin.convert_module(module)
        tensors.refuse_extra_state(module, type(self).__name__)
        full = tensors.named_tensors(module)
        stored = module.state_dict().keys() if trainer.ckpt_path else ()
        seed = self._common_seed() if self.starts else 0
        seeing = [part for part in trainer.callbacks if isinstance(part, SeesWeights) and module.weights]  # type: ignore[attr-defined]
        initial = InitialShards(full, self.starts, seed, stored, self.root_device, seeing)
        tensors.to_meta(module)
        self.formats = Formats(self.precision_plugin, *self._formats)
        self.parallelize(module)
        self.fill(module, initial)
        lightning_compat.set_device(module, self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            ways = self.precision_plugin, self.formats, self.root_device, self.frozen_options()
            self._frozen = shard_frozen(module, *ways)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            lightning_compat.optimizers_to_device(self.optimizers, self.parameter_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizer; techniques that find a learning rate build it again."""
        super().setup_optimizers(trainer)
        if self._deferred is not None:
            self._deferred.follow(self.optimizers)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The data type of matrix products; None: that of the precision."""
        params, autocasts = self._formats[0], isinstance(self.precision_plugin, MixedPrecision)
        return FORMATS[params] if params and not autocasts else None

    def fill(self, module: nn.Module, initial: InitialShards) -> None:
        """Allocates memory for a module on the meta device, whose tensors may be sharded, and fills it."""
        tensors.to_memory(module, self.parameter_device)
        own = tensors.named_tensors(module)
        for name in initial.full:
            initial.fill(name, own.get(name))

    def frozen_options(self) -> dict[str, Any]:
        """Returns options of `fully_shard` for frozen networks of objectives; empty: they stay whole."""
        return {"mesh": self.frozen_mesh} if self.frozen_mesh else {}

    def _common_seed(self) -> int:
        """Returns a seed for the network, that of rank 0."""
        seed = torch.tensor(new_seed(), device=self.root_device)
        dist.broadcast(seed, 0)
        return int(seed)

    def draw_weights(self) -> bool:
        """Draws all weights again that the network began with, each rank its shards; False if rank 0 has to initialise them."""
        if not self.starts:
            return False
        module, seed = self.language_module, self._common_seed()
        shards.reshard(module)
        for name, tensor in named(module):
            if name not in self.starts:  # of an objective, such as a coefficient
                continue
            start, key = initial_shards.opened(name, self.starts[name])
            self.draw_weight(tensor, initial_shards.as_drawn(start), seed, key)
        return True

    def draw_weight(self, tensor: Tensor, start: Start | RowNorms | Spread, seed: int, name: str) -> None:
        """Draws this rank's shard of a parameter or buffer; called on every rank."""
        initial_shards.draw_shard(tensor.detach(), start, seed, name)

    def model_to_device(self) -> None:
        """Does nothing: `setup` places each shard."""

    def setup_precision_plugin(self) -> None:
        """Attaches the precision; a loss scaler has to skip a step on all ranks or on none."""
        super().setup_precision_plugin()
        if isinstance(self.precision_plugin, ScalesLosses) and self.precision_plugin.scaler is not None:
            scaler = self.precision_plugin.scaler
            self.precision_plugin.scaler = SharedScaler(scaler, self.parameter_device, self.root_device)

    # -- steps ------------------------------------------------------------------------------------

    frees_blocks = True
    """Whether the gathered weights of a block are freed after its forward."""

    further_roots: Sequence[nn.Module] = ()
    """Modules that are sharded and not below the network, such as stages of a pipeline."""

    @contextmanager
    def gathered(self, network: nn.Module) -> Iterator[None]:
        """Gathers the weights of a network once, for as many forwards as each rank likes; called on every rank."""
        roots = (network, *self.further_roots)
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        sharded = [module for module in modules if isinstance(module, FSDPModule)]
        try:
            for module in sharded:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
            yield
        finally:
            for module in sharded:
                module.set_reshard_after_forward(self.frees_blocks, recurse=False)
                module.reshard()

    def drop_step(self) -> None:
        """Drops what forward or backward left that broke off, and all gradients; see `toolkit.lone_ranks.DropsSteps`."""
        roots: Sequence[nn.Module] = self.further_roots or (self.language_module,)
        for root in roots:
            if isinstance(root, FSDPModule):
                root.reset_iter_state()
        for module in dict.fromkeys(each for root in roots for each in root.modules()):
            if isinstance(module, FSDPModule):
                module.unshard()  # gradients that were not reduced yet belong to the gathered weights
                nn.Module.zero_grad(module)
                module.reshard()
        for frozen in self._frozen:
            frozen.release()

    def step_context(self) -> AbstractContextManager[Any]:
        """Context of each step, in addition to that of the precision."""
        return nullcontext()

    def run_as_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module as its forward, so that FSDP gathers parameters outside of blocks for it."""
        with self.step_context():
            return lightning_compat.call_as_forward(self, name, *args, **kwargs)

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

    def defer_reduction(self, module: nn.Module, replicated: bool) -> None:
        """Reduces gradients over replicas once a step from now on; called by `parallelize` once the module is sharded."""
        self._deferred = DeferredReduction(module, self.frees_blocks, replicated)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context of a micro-batch that others of its step follow."""
        with self._deferred.accumulating() if self._deferred else nullcontext():
            yield

    def post_backward(self, closure_loss: Tensor) -> None:
        """Frees what frozen networks have gathered; raises a ConfigError if gradients were not reduced over replicas."""
        for frozen in self._frozen:
            frozen.release()
        if self._deferred is not None:
            self._deferred.check()

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the norm of the gradients of the full model, 0-d, on this rank's device."""
        return gradients.squared_norm(shards.gradients(optimizer)).sqrt().to(self.root_device)

    def clip_gradients(
        self, optimizer: Optimizer, clip: float | None = None, algorithm: str | None = None
    ) -> None:
        """Scales gradients to a norm of at most `clip`, or clamps each value to it ("value")."""
        if not clip:
            return
        if algorithm == "value":
            gradients.clamp_(shards.gradients(optimizer), clip)
        else:
            gradients.scale_to_(shards.gradients(optimizer), self.gradient_norm(optimizer), clip)

    # -- checkpoints ------------------------------------------------------------------------------

    restore_checkpoint_after_setup = True
    """Weights are loaded into shards, which exist after `setup`."""

    @property
    def writes_parts(self) -> bool:
        """Whether checkpoints are sharded: each rank writes its own shards into a folder."""
        return isinstance(self.checkpoint_io, SavesParts)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint; called on every rank."""
        if isinstance(self.checkpoint_io, SavesParts):
            self.checkpoint_io.save_parts(checkpoint, filepath)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint; of a sharded one without tensors, of which each rank reads its shards later."""
        path = Path(self.broadcast(str(checkpoint_path)))  # rank 0 may have skipped a damaged one
        found = self._reader.read_parts(path)
        return super().load_checkpoint(path, weights_only) if found is None else found

    @property
    def _reader(self) -> ReadsParts:
        return self.checkpoint_io if isinstance(self.checkpoint_io, ReadsParts) else AtomicCheckpoint()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the full weights on rank 0 and nothing on others, or this rank's shards; called on every rank."""
        state = tensors.state_of(self.language_module)
        return state if self.writes_parts else tensors.gather(state, keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this rank's shards of the full model's weights."""
        pairs: list[tuple[Any, Tensor]] = []
        for name, target in tensors.state_of(self.language_module).items():
            if strict or name in checkpoint["state_dict"]:
                stored = checkpoint["state_dict"][name]
                if tensors.is_stored(stored):
                    pairs.append((stored, target))
                else:
                    tensors.copy_part(target, stored)
        self._reader.fill(pairs)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the full optimizer state on rank 0 and nothing on others, or this rank's shards."""
        state = lightning_compat.unwrapped(optimizer).state_dict()
        return state if self.writes_parts else tensors.gather(state, self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this rank's shards of the full optimizer state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            parts = {n: tensors.parts(values, parameters[n]) for n, values in state["state"].items()}
            rooms = [(v, parts[n][k]) for n, values in state["state"].items() for k, v in values.items()]
            self._reader.fill((stored, room) for stored, room in rooms if tensors.is_stored(stored))
            optimizer.load_state_dict({**state, "state": parts})
            lightning_compat.optimizers_to_device([optimizer], self.parameter_device)

    def teardown(self) -> None:
        """Tears down plugins and accelerator; does not move the model, for which one rank may lack memory."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
