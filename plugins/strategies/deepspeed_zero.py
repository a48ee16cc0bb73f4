"""DeepSpeed's ZeRO: optimizer states, gradients and parameters sharded over ranks, or offloaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from core import lightning_compat
from core.errors import ConfigError
from core.technique import Package, technique
from plugins.strategies import deepspeed_checks, deepspeed_engine, deepspeed_state, shared_forward
from plugins.strategies.deepspeed_engine import EngineOptimizer
from plugins.strategies.initial_shards import InitialShards, RowNorms, Spread, draw_shard
from plugins.strategies.mesh_strategy import MeshStrategy
from plugins.strategies.tensors import replace, state_of
from toolkit.initial_values import Start

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

Place = Literal["none", "cpu", "nvme"]


@technique(
    paper="ZeRO, arXiv:1910.02054; ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857; deepspeed",
    needs=(Package("deepspeed>=0.19,<0.20", extra="deepspeed"),),
    strategy_words=("deepspeed",),
    replaces={
        "DeepSpeedStrategy": "Lightning's hides gradients from what has to scale them by the number of tokens"
    },
)
class DeepSpeedZero(MeshStrategy):
    """Shards optimizer states, gradients and parameters over the ranks, and offloads them to CPU memory or NVMe.

    The optimizer is that of the run; it steps flat partitions. A step whose gradient norm is not finite changes
    nothing. Under `bf16-mixed` the full network is kept in bfloat16 and the optimizer's weights in float32.
    Checkpoints are those of a single process, gathered on rank 0 or, with `ShardedCheckpoint`, distributed over the
    ranks. A run can resume from them under any strategy on any number of ranks, and from others under this one.

    Args:
        stage: 1 shards optimizer states, 2 also gradients, 3 also parameters.
        offload_optimizer: Where optimizer states are kept and stepped: "none" (the device), "cpu", "nvme" (stage 3).
        offload_parameters: Where parameters are kept until they are used, in stage 3.
        nvme_path: A folder on the NVMe disk.
        persistence_threshold: In stage 3, parameters of at most this many elements are not sharded.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        trainer:
          strategy:
            class_path: DeepSpeedZero
            init_args: {stage: 2}
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: Place = "none",
        offload_parameters: Place = "none",
        nvme_path: str | None = None,
        persistence_threshold: int = 100_000,
        timeout_minutes: float = 30.0,
    ) -> None:
        super().__init__(timeout_minutes)
        if persistence_threshold < 0:
            raise ConfigError(
                f"DeepSpeedZero: persistence_threshold is {persistence_threshold}; it must be at least 0."
            )
        self.stage, self.nvme_path, self.persistence_threshold = stage, nvme_path, persistence_threshold
        self.offload_optimizer, self.offload_parameters = offload_optimizer, offload_parameters
        self.zero: Any = None
        self._inner: Optimizer | None = None
        self.numbers: dict[int, int] = {}

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields problems of the arguments, the precision, the optimizer and the machine."""
        yield from deepspeed_checks.compatibility_errors(run, own.arguments)

    # -- processes --------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """A precision without autocast or scaler: DeepSpeed handles data types."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        plain = None
        if plugin is not None:
            plain = Precision()
            plain.precision = plugin.precision  # type: ignore[assignment]
        MeshStrategy.precision_plugin.fset(self, plain)  # type: ignore[attr-defined]

    def connect_mesh(self) -> None:
        """Initialises DeepSpeed with the connected processes."""
        assert dist.group.WORLD is not None
        self.loss_group = dist.group.WORLD
        if self.stage == 3:
            self.frozen_mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        os.environ["LOCAL_RANK"] = str(self.local_rank)  # DeepSpeed chooses its device by it
        deepspeed = deepspeed_engine.library(self.root_device.type)
        deepspeed.init_distributed(dist.get_backend(), timeout=self.timeout, dist_init_required=False)

    @property
    def parameter_device(self) -> torch.device:
        """The CPU, until DeepSpeed takes the parameters."""
        return torch.device("cpu")

    def parallelize(self, module: LightningModule) -> None:
        """Does nothing: DeepSpeed shards each parameter once it has its values."""

    # -- the model --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Wraps module and optimizer in DeepSpeed's engine; weights get their values on the way, one at a time."""
        super().setup(trainer)
        module = self.language_module
        format = deepspeed_engine.FORMATS.get(str(self.precision_plugin.precision), torch.float32)
        optimizer = self._inner
        groups = optimizer.param_groups if optimizer is not None else []
        self._counts = [len(group["params"]) for group in groups]
        self.numbers = {id(p): n for n, p in enumerate(p for group in groups for p in group["params"])}
        starts_engine = self.stage == 3 or optimizer is not None
        if self.stage < 3:
            for _ in self._filled(module, format, everywhere=not starts_engine):
                pass
        if starts_engine:
            self._start_engine(module, optimizer, format)
        else:
            module.to(self.root_device)
        del self._initial  # rank 0 may have the whole network in it
        lightning_compat.set_device(module, self.root_device)

    def fill(self, module: nn.Module, initial: InitialShards) -> None:
        """Fills buffers; parameters have no memory until DeepSpeed takes them."""

        def empty(tensor: Tensor) -> Tensor:
            if isinstance(tensor, nn.Parameter):
                return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
            return torch.empty_like(tensor, device=self.parameter_device)

        replace(module, empty)
        for name, buffer in module.named_buffers():
            initial.fill(name, buffer)
        self._initial = initial

    def _filled(
        self, module: nn.Module, format: torch.dtype, everywhere: bool = False
    ) -> Iterator[nn.Parameter]:
        """Yields each parameter once it has memory, in this data type on the device; called on every rank.

        Those of rank 0 have their values, or those of all ranks: DeepSpeed's engine sends those of rank 0 to the others, whose
        hosts have none to convert and copy to the device.
        """
        has_values = everywhere or self.global_rank == 0
        for name, parameter in module.named_parameters():
            kind = format if parameter.is_floating_point() else parameter.dtype
            if has_values:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._initial.fill(name, whole)
                parameter.data = whole.to(self.root_device, kind)
            else:
                self._initial.fill(name, None)
                parameter.data = torch.empty(parameter.shape, dtype=kind, device=self.root_device)
            yield parameter

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the run's optimizer, which only DeepSpeed refers to; techniques that find a learning rate build it again.

        Lightning's wrapper would inherit its destructor, which in DeepSpeed's own optimizers frees their kernel.
        """
        module = self.language_module
        with deepspeed_state.in_full_shape(module):
            [inner], self.lr_scheduler_configs = lightning_compat.init_optimizers(module)
        if self.zero is None:
            self._inner = inner
        else:
            self._stepped.replace(inner)

    def _start_engine(
        self, module: LightningModule, optimizer: Optimizer | None, format: torch.dtype
    ) -> None:
        import deepspeed

        config = deepspeed_engine.configuration(
            module,
            self.root_device.type,
            format,
            self.stage,
            self.persistence_threshold,
            offload_optimizer=self.offload_optimizer,
            offload_param=self.offload_parameters,
            nvme_path=self.nvme_path,
        )
        if self.stage == 3:  # one parameter at a time: device and host may lack memory for all at once
            filled = deepspeed_engine.OneByOne(self._filled(module, format))
            deepspeed.zero.Init(module=filled, config_dict_or_path=config, dtype=format)
            for buffer in module.buffers():
                buffer.data = buffer.data.to(self.root_device)
            module.register_state_dict_post_hook(deepspeed_state.with_full_shapes)
        self.model = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )[0]
        if optimizer is not None:
            self.zero = self.model.optimizer
            # The same ranks, in the group in which DeepSpeed talks: what a step has sent is counted by group.
            self.loss_group = self.zero.dp_process_group
            self.optimizers, self._inner = [EngineOptimizer(self.model, self.stage)], None

    # -- steps ------------------------------------------------------------------------------------

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Disables inference mode: parameters that are gathered in it could not be trained later."""
        training = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Marks for DeepSpeed that more micro-batches of the step follow."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs DeepSpeed's backward, which averages gradients over the ranks."""
        module = self.language_module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)  # calls hooks
        self.run_backward(closure_loss)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def run_backward(self, loss: Tensor) -> None:
        """Runs DeepSpeed's backward without telling callbacks of it; see `toolkit.shards.RunsBackward`."""
        self._engine.backward(loss, scale_wrt_gas=False)  # Lightning divides by the number of micro-batches

    @contextmanager
    def gathered(self, network: Any) -> Iterator[None]:
        """In stage 3 weights are gathered as modules run: ranks call the network together, and each computes some of the rows."""
        own = self.stage == 3 and network is self.language_module.network
        shared = shared_forward.by_rows(network.forward, self.loss_group)
        with shared_forward.with_methods(network, shared_forward.without_cache(shared) if own else {}):
            yield

    def item_share(self) -> tuple[int, int]:
        """Returns which share of an evaluation's items this rank measures, and of how many; see `toolkit.shards.SharesItems`."""
        return (0, 1) if self.stage == 3 else (self.global_rank, self.world_size)

    def drop_step(self) -> None:
        """Drops what forward or backward left that broke off, in stages 1 and 2; see `toolkit.lone_ranks.DropsSteps`."""
        self._engine.set_gradient_accumulation_boundary(True)
        deepspeed_state.drop_step(self.zero)

    @property
    def _engine(self) -> Any:
        return self.model

    @property
    def _stepped(self) -> EngineOptimizer:
        stepped: Any = self.optimizers[0]
        return stepped

    def scale_gradients(self, optimizer: Any, factor: Tensor) -> None:
        """Makes the step multiply all gradients by a 0-d factor, in addition to earlier ones."""
        before = self._stepped.factor
        self._stepped.factor = factor if before is None else before * factor

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """Returns the norm of the full gradient, a 0-d tensor; infinite if a value is not finite."""
        return self._stepped.gradient_norm()

    def clip_gradients(self, optimizer: Any, clip: float | None = None, algorithm: str | None = None) -> None:
        """Makes the step scale gradients to a norm of at most `clip`, or clamps each value to it ("value")."""
        self.zero.clip_grad = 0.0 if algorithm == "value" else float(clip or 0.0)
        if clip and algorithm == "value":
            limit = clip / self._stepped.scaled(torch.ones((), device=self.root_device))
            trained = (p for p in self.language_module.parameters() if id(p) in self.numbers)
            for part in self._gradients(trained):
                part.clamp_(-limit.to(part), limit.to(part))

    # -- parts -------------------------------------------------------------------------------------

    def weight_parts(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns this rank's part of each weight, in the optimizer's float32; see `toolkit.shards.HoldsParts`."""
        return [deepspeed_state.weight_part(parameter, self.zero) for parameter in parameters]

    def gradient_parts(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns this rank's part of each gradient, times the factor of the step."""
        return [self._stepped.scaled(part.flatten().float()) for part in self._gradients(parameters)]

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        if self.offload_optimizer != "none" and self.root_device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # DeepSpeed copies them to the host without waiting
        return [deepspeed_state.gradient_part(parameter, self.zero) for parameter in parameters]

    # -- snapshots --------------------------------------------------------------------------------

    def held_weights(self) -> list[Tensor]:
        """Returns this rank's flat partitions of the weights; see `toolkit.snapshots.HoldsWeights`."""
        return deepspeed_state.flat_weights(self.zero, self.stage)

    def weights_restored(self) -> None:
        """Copies the partitions to the network; called on every rank."""
        deepspeed_state.copy_weights_to_network(self.zero, self.stage)

    def draw_weights(self) -> bool:
        """Draws all weights again, one at a time; False if rank 0 has to initialise them."""
        drawn = super().draw_weights()
        if drawn:
            self.weights_restored()
        return drawn

    def draw_weight(self, tensor: Tensor, start: Start | RowNorms | Spread, seed: int, name: str) -> None:
        """Draws a whole parameter or buffer, and keeps this rank's part."""
        whole = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype)
        draw_shard(whole, start, seed, name)
        self.put_weight(tensor, whole)

    def put_weight(self, tensor: Tensor, value: Tensor) -> None:
        """Writes this rank's part of a parameter or buffer, rounded as DeepSpeed rounded it at first."""
        value = value.to(self.root_device, tensor.dtype)
        deepspeed_state.put_weight(tensor, value, self.zero)

    # -- checkpoints ------------------------------------------------------------------------------

    @cached_property
    def _owners(self) -> dict[int, int]:
        """Id of a parameter or buffer -> the rank that writes it to a sharded checkpoint; about equal sizes."""
        tensors = list({id(t): t for t in state_of(self.language_module).values()}.values())
        sizes = [int(getattr(t, "ds_numel", t.numel())) for t in tensors]
        ends = torch.tensor(sizes).cumsum(0) - 1
        share = ends.double() / max(sum(sizes), 1)
        return {id(t): int(part * self.world_size) for t, part in zip(tensors, share.tolist(), strict=True)}

    def _keeps(self, tensor: Tensor) -> bool:
        return self.global_rank == (self._owners[id(tensor)] if self.writes_parts else 0)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the full weights on rank 0, or each on the rank that writes it; called on every rank."""
        found, seen = {}, {}
        for name, tensor in state_of(self.language_module).items():
            if id(tensor) not in seen:
                value = deepspeed_state.full_weight(tensor, self.zero)
                seen[id(tensor)] = value.cpu() if self._keeps(tensor) else None
            if seen[id(tensor)] is not None:
                found[name] = seen[id(tensor)]
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this rank's shards of the full weights."""
        for name, tensor in state_of(self.language_module).items():
            if strict or name in checkpoint["state_dict"]:
                value = deepspeed_state.load_stored(checkpoint["state_dict"][name])
                deepspeed_state.put_weight(tensor, value.to(self.root_device), self.zero)
        if self.zero is not None:
            deepspeed_state.copy_weights_to_network(self.zero, self.stage)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the full optimizer state on rank 0, or that of each parameter on the rank that writes it."""
        groups, first = [], 0
        for group, count in zip(self._stepped.param_groups, self._counts, strict=True):
            numbers = list(range(first, first + count))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
            first += count
        state = deepspeed_state.full_states(self.zero, self.stage, self.numbers, self._keeps)
        return {"state": state, "param_groups": groups}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this rank's shards of the full optimizer state."""
        [saved] = checkpoint["optimizer_states"]
        for group, own in zip(self._stepped.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})
        deepspeed_state.put_states(self.zero, self.stage, self.numbers, saved["state"])
