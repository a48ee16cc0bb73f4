"""Several kinds of parallelism at once, on one mesh of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel as split_loss
from torch.optim import Optimizer

from core.contracts import Network, Objective, ScalesLosses, TokenSum
from core.errors import ConfigError
from core.lightning_compat import unwrapped
from core.technique import technique
from core.training.shards import full_tensor
from plugins.strategies import (
    expert_parallel,
    gradients,
    hybrid_checks,
    initial_shards,
    shared_forward,
    stage_state,
    tensor_parallel,
    tensors,
)
from plugins.strategies.context_parallel import ContextParallel, Method, pieces
from plugins.strategies.frozen_shards import kept_blocks
from plugins.strategies.mesh_sizes import MeshSizes, dp_process_group, is_first, joined, pair_group
from plugins.strategies.mesh_strategy import MeshStrategy
from plugins.strategies.mixed_precision import Format
from plugins.strategies.pipeline import Pipeline, full_sum
from plugins.strategies.pipeline_stages import Layout, Stage, cut, tied
from plugins.strategies.stage_shards import StageShards
from toolkit.positions import explain_position_mixing
from toolkit.routing import RoutesTokens

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from toolkit.selection import Run, Selected

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@technique(
    paper="Megatron-LM, arXiv:1909.08053 (tensor), 2205.05198 (sequence), 2104.04473 (pipeline, all at once); "
    "ZBV, arXiv:2401.10241; DualPipe, arXiv:2412.19437; ring attention, 2310.01889; Ulysses, 2309.14509; "
    "experts: GShard, arXiv:2006.16668"
)
class HybridParallel(MeshStrategy):
    """Several kinds of parallelism at once, on one mesh: data, sharded data, tensor, pipeline, context, expert.

    The product of the sizes, without `sequence`, is the number of ranks. Ranks of a tensor-parallel group are
    neighbours. The network provides the plans by which it is sharded: see `core.contracts.Network`. An objective must
    call the network once, and have no parameters under a pipeline. Checkpoints are those of a single process.

    Args:
        data_replicate: Copies of everything below; gradients are averaged over them.
        data_shard: Ranks over which parameters, gradients and optimizer states are sharded (as `FSDP`, stage 3),
            each with its own rows; None: the number of ranks divided by the other sizes.
        tensor: Ranks over which each matrix is sharded.
        sequence: 1, or the size of `tensor`: its ranks then also shard tokens where no matrix is sharded.
        context: Ranks over which each sequence is sharded.
        pipeline: Ranks over which the blocks are distributed: one stage each, or two under schedules other than
            GPipe and 1F1B.
        expert: Ranks over which the experts of a mixture are sharded, each with its own rows: tokens are sent to the ranks
            of their experts. All other parameters are sharded over `data_shard` times `expert` ranks.
        loss_parallel: Whether the head is sharded along the vocabulary, so that no rank has all logits.
        context_method: "ring": keys and values are passed around a ring; "ulysses": all-to-all of tokens and heads.
        schedule: Order in which stages run micro-batches forward and backward.
        microbatches: Micro-batches into which a pipeline splits a batch; None: one for each stage. Those of all batches of a step
            go through one schedule, with the last batch. GPipe, which keeps the activations of all, takes a batch at a time.
        param_format: As of `FSDP`. A pipeline without sharded data leaves bf16 to autocast.
        reduce_format: As of `FSDP`, also for the average over `data_replicate`.
        async_tensor: Whether gathers and scatters of `sequence` run beside the products of matrices that need them, in
            pieces, as torch's compiler can make it. On GPUs of one machine, with the callback `Compile`.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        trainer:
          strategy:
            class_path: HybridParallel
            init_args: {tensor: 1, pipeline: 1}
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
        context_method: Method = "ring",
        schedule: Schedule = "1F1B",
        microbatches: int | None = None,
        param_format: Format | None = None,
        reduce_format: Format | None = None,
        async_tensor: bool = False,
        timeout_minutes: float = 30.0,
    ) -> None:
        super().__init__(timeout_minutes, param_format, reduce_format)
        if microbatches is not None and microbatches < 1:
            raise ConfigError(f"HybridParallel: microbatches is {microbatches}; it must be at least 1.")
        self.sizes = MeshSizes(data_replicate, data_shard, tensor, context, pipeline, expert)
        self.sequence, self.loss_parallel = sequence > 1, loss_parallel and tensor > 1
        self.context_method, self.schedule, self.microbatches = context_method, schedule, microbatches
        self.async_tensor = async_tensor
        self._undo_overlap: Callable[[], None] = lambda: None
        self.context: ContextParallel | None = None
        self.pipeline: Pipeline | None = None
        self._data: DeviceMesh | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields which sizes do not fit the ranks, the network or the data."""
        yield from hybrid_checks.compatibility_errors(run, own.arguments)

    def connect_mesh(self) -> None:
        """Makes the mesh."""
        self.mesh = self.sizes.mesh(self.root_device.type, self.world_size)
        self.loss_group = dp_process_group(
            joined(self.mesh, "data_replicate", "data_shard", "expert", "context")
        )
        self._data = joined(self.mesh, "data_replicate", "data_shard", "expert")
        self._shard = self.frozen_mesh = joined(self.mesh, "data_shard", "expert", "context")
        self._stages = dp_process_group(self.mesh["pipeline"])
        # one rank of each stage writes its state
        self._writes_stage = is_first(
            self.mesh, "data_replicate", "data_shard", "expert", "context", "tensor"
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that share a model or a sequence read the same rows; before they are connected, those of rank 0."""
        if self._data is None:
            sizes = self.sizes.of(self.world_size)
            readers = sizes["data_replicate"] * sizes["data_shard"] * sizes["expert"]
            return {"num_replicas": readers, "rank": 0}
        return {"num_replicas": self._data.size(), "rank": self._data.get_local_rank()}

    # -- the model --------------------------------------------------------------------------------

    def parallelize(self, module: LightningModule) -> None:
        """Applies tensor, context and pipeline parallelism to the network, then shards the parameters."""
        trained = self.language_module
        network: Network = trained.network
        self._weights = list(module.state_dict())
        self._parameters = [name for name, _ in module.named_parameters()]
        if self.sizes.tensor > 1:
            tensor_parallel.apply(network, self.mesh["tensor"], self.sequence, self.loss_parallel)
            if self.async_tensor:
                self._undo_overlap = tensor_parallel.overlap(self.mesh["tensor"])
        if self.sizes.expert > 1:
            assert isinstance(network, RoutesTokens)
            names = ("expert", "tensor") if self.sizes.tensor > 1 else ("expert",)
            expert_parallel.apply(network, self.mesh[names])
        if self.sizes.context > 1:
            self.context = ContextParallel(dp_process_group(self.mesh["context"]), self.context_method)
            self.context.install(network)
        if self.sizes.pipeline > 1:
            self._cut(module, network, trained.objective)
        else:
            self._shard_parameters(module, network)
            self.defer_reduction(module, self.sizes.data_replicate > 1)
        trained.compute_loss = self.compute_loss

    def _shard_parameters(self, module: nn.Module, network: Network) -> None:
        mesh, experts = self._shard_meshes()
        for block in (*network.blocks, *kept_blocks(self.language_module.objective)):
            self.formats.set_up(block)
            policy = self.formats.policy(block)
            if self.sizes.expert > 1:
                for stack in expert_parallel.stacks(network, block):
                    expert_parallel.shard(stack, experts, mp_policy=policy)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        policy = self.formats.policy(module)
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)

    def _shard_meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """Returns the ranks over which weights are sharded, and those of experts; over replicas gradients are averaged."""
        if self.sizes.data_replicate == 1:
            return self._shard, self.mesh["data_shard"]
        assert self._shard.mesh_dim_names is not None
        return (
            self.mesh["data_replicate", self._shard.mesh_dim_names[0]],
            self.mesh["data_replicate", "data_shard"],
        )

    def _cut(self, module: LightningModule, network: Network, objective: Objective) -> None:
        if next(objective.parameters(), None) is not None:
            raise ConfigError(
                f"HybridParallel: {type(objective).__name__} has parameters, which no stage holds: set pipeline to 1."
            )
        layout = Layout(self.schedule, self.sizes.pipeline, len(network.blocks))
        hybrid_checks.check_stages(network, layout, self.sizes.pipeline)
        first, last = layout.rank_of(0), layout.rank_of(layout.stages - 1)
        shared, here = {id(p) for p in tied(network)}, dist.get_rank(self._stages)
        self._tied_names = {n for n, p in module.named_parameters() if id(p) in shared and first != last}
        self._counts_tied = here == first
        self._tied_group = pair_group(self.mesh, first, last) if self._tied_names else None
        stages = cut(network, layout, here)
        shards = self._shard_stages(network, stages) if self._shard.size() > 1 else None
        microbatches = self.microbatches or layout.stages
        options = (microbatches, self._stages, self.root_device, self._reduced, self._squares, shards)
        self.pipeline = Pipeline(network, objective, stages, layout, *options)

    def _shard_stages(self, network: Network, stages: Mapping[int, Stage]) -> StageShards:
        mesh, experts = self._shard_meshes()
        blocks = {id(network.blocks[index]) for stage in stages.values() for index in stage.span}
        parts = dict.fromkeys(part for stage in stages.values() for part in stage.parts)
        held: list[nn.Module] = []
        for part in parts:
            if id(part) not in blocks:
                held.append(part)
                continue
            self.formats.set_up(part)
            policy = self.formats.policy(part)
            inner = (
                [StageShards(stack) for stack in expert_parallel.stacks(network, part)]
                if self.sizes.expert > 1
                else []
            )
            for stack in inner:
                expert_parallel.shard(stack, experts, reshard_after_forward=False, mp_policy=policy)
            held.append(StageShards(part, *inner))
            own = {parameter for stack in inner for parameter in stack.parameters()}
            options: Any = {"reshard_after_forward": False, "mp_policy": policy, "ignored_params": own}
            fully_shard(held[-1], mesh=mesh, **options)
        root = StageShards(*held)
        fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=self.formats.policy(root))
        self.further_roots, self.frees_blocks = [root], False
        return root

    @contextmanager
    def gathered(self, network: Any) -> Iterator[None]:
        """Gathers weights; ranks that share a batch or exchange tokens call the network together and have all of it."""
        methods: dict[str, Any] = {}
        if self.pipeline is not None and network is self.pipeline.network:
            methods = self.pipeline.whole()
        elif self.loss_parallel:
            logits = network.logits
            methods = {"logits": lambda hidden: full_tensor(logits(hidden))}
        if network is self.language_module.network:
            methods |= self._shared(methods.get("forward", network.forward))
        with super().gathered(network), shared_forward.with_methods(network, methods):
            yield

    def _shared(self, forward: Callable[..., Tensor]) -> dict[str, Any]:
        """Returns methods of the network where ranks have some tokens, or experts, of a batch in training."""
        whole, multiple = forward, self.sizes.tensor if self.sequence else 1
        if self.context is not None:
            multiple *= pieces(self.sizes.context, self.context_method)
        if multiple > 1:
            forward = shared_forward.by_tokens(forward, multiple, self.context)
        if self.sizes.expert > 1:
            forward = shared_forward.by_rows(forward, self.mesh.get_group("expert"))
        return {} if forward is whole else shared_forward.without_cache(forward)

    def item_share(self) -> tuple[int, int]:
        """Returns which share of an evaluation's items this rank measures, and of how many; see `toolkit.shards.SharesItems`."""
        copies, shards = self.mesh["data_replicate"], self.mesh["data_shard"]
        own = copies.get_local_rank() * shards.size() + shards.get_local_rank()
        return own, copies.size() * shards.size()

    def all_tokens(self, own: Tensor, dim: int = 1) -> Tensor:
        """Returns the values of all tokens of the rows, given those of this rank's; see `toolkit.shards.SplitsTokens`."""
        return own if self.context is None else self.context.joined(own, dim)

    def activation_groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups whose ranks send each other activations; see `toolkit.lone_ranks.SendsActivations`."""
        return [self.mesh.get_group(name) for name in ("tensor", "context") if self.mesh[name].size() > 1]

    @property
    def row_documents(self) -> Tensor | None:
        """The documents of the rows that are computed; see there."""
        return None if self.context is None else self.context.documents

    def compute_loss(self, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the objective's sums for this rank's tokens, full on each rank that shares them."""
        if self.context is not None:
            batch = self.context.shard(batch)
        if self.pipeline is not None:
            if self.context is not None and self.context.documents is not None:
                raise ConfigError("HybridParallel: document_ids take pipeline 1 or context 1.")
            with nullcontext() if torch.is_grad_enabled() else super().gathered(self.pipeline.network):
                return self.pipeline.loss(batch)
        module = self.language_module
        loss, metrics = module.objective.loss(module.network, batch)
        return full_sum(loss), {name: full_sum(value) for name, value in metrics.items()}

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context of the batches of a step before the last one: a pipeline computes them with the last one."""
        with super().block_backward_sync(), self.pipeline.keeping() if self.pipeline else nullcontext():
            yield

    def drop_step(self) -> None:
        """Drops what forward or backward left that broke off."""
        super().drop_step()
        if self.sizes.tensor > 1:
            tensor_parallel.forget_masks()

    def step_context(self) -> AbstractContextManager[Any]:
        """Context in which the cross-entropy takes logits that are sharded along the vocabulary."""
        context: AbstractContextManager[Any] = split_loss() if self.loss_parallel else nullcontext()
        return context

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward in the same context as forward."""
        with self.step_context():
            return super().backward(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a prediction step; each rank returns the full result."""
        found = super().predict_step(*args, **kwargs)
        return found.full_tensor() if isinstance(found, DTensor) else found

    # -- stages: gradients and checkpoints ----------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Shards the model and builds the optimizer; all stages have to have the same groups."""
        if self.sizes.context > 1:
            self._try_positions()
        super().setup(trainer)
        if self.pipeline is None:
            return
        if isinstance(self.precision_plugin, ScalesLosses) and self.precision_plugin.scaler is not None:
            self.pipeline.scale = self.precision_plugin.scaler.scale
        named = dict(self.language_module.named_parameters())
        self.pipeline.parameters = [p for p in named.values() if p.requires_grad]
        self._tied = {id(named[name]) for name in self._tied_names if name in named}
        for optimizer in self.optimizers:
            self._numbers(optimizer)

    def _try_positions(self) -> None:
        """Raises a ConfigError on every rank if the network mixes tokens outside of attention; rank 0 tries it."""
        network, reason = self.language_module.network, None
        if self.is_global_zero:
            tried = initial_shards.stand_in(network, self.starts) if self.starts else network
            reason = explain_position_mixing(tried)
        if reason := self.broadcast(reason):
            raise ConfigError(
                f"HybridParallel: context is {self.sizes.context}, and sequences of {type(network).__name__} cannot be "
                f"split: {reason}.\nSet context to 1, and let its replace_attention return False."
            )

    def _reduced(self, parameters: Sequence[nn.Parameter], found: list[Tensor]) -> list[Tensor]:
        assert self.pipeline is not None
        found = [gradients.summed(g, p) for p, g in zip(parameters, found, strict=True)]
        if self.pipeline.shards is None and self.loss_group.size() > 1:
            gradients.average_(found, self.loss_group, self.formats.reduced)
        for parameter, gradient in zip(parameters, found, strict=True):
            if id(parameter) in self._tied:
                dist.all_reduce(tensors.local_shard(gradient), group=self._tied_group)
        return found

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the norm of the gradients of all stages, a 0-d tensor; tied ones count once."""
        if self.pipeline is None:
            return super().gradient_norm(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return self._squares(parameters, [p.grad for p in parameters]).sqrt()

    def _squares(self, parameters: Sequence[nn.Parameter], found: Sequence[Tensor]) -> Tensor:
        pairs = zip(parameters, found, strict=True)
        squares = gradients.squared_norm(g for p, g in pairs if self._counts_tied or id(p) not in self._tied)
        dist.all_reduce(squares, group=self._stages)
        return squares

    def step_parts(self, batches: int) -> int:
        """Returns into how many parts a step of so many batches is taken apart; see `toolkit.gradient_noise.MeasuresParts`."""
        if self.pipeline is None:
            return 0
        halves = self.pipeline.layout.half_of(self.pipeline.microbatches)
        return 2 if batches == 1 and halves else batches

    def measure_parts(self) -> list[tuple[Tensor, Tensor]]:
        """Computes the coming step part by part; returns a list that gets the squared norm and the weight of each."""
        assert self.pipeline is not None
        return self.pipeline.measure()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the full weights on rank 0 and nothing on others, or this rank's shards; called on every rank."""
        if self.writes_parts:
            return super().lightning_module_state_dict()
        own = tensors.gather(tensors.state_of(self.language_module), keep=self._writes_stage)
        if self.pipeline is None or not self._writes_stage:
            return dict(own)
        return stage_state.joined(stage_state.collect(own, self._stages), self._weights)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the full optimizer state on rank 0 and nothing on others, or this rank's shards."""
        optimizer = unwrapped(optimizer)
        if self.writes_parts:
            state = super().optimizer_state(optimizer)
            if self.pipeline is None:
                return state
            names = stage_state.names_of(optimizer, self.language_module)
            return stage_state.joined_optimizer([(state, names)], self._numbers(optimizer))
        own = tensors.gather(optimizer.state_dict(), keep=self._writes_stage)
        if self.pipeline is None or not self._writes_stage:
            return dict(own)
        numbers, names = self._numbers(optimizer), stage_state.names_of(optimizer, self.language_module)
        parts = stage_state.collect((own, names), self._stages)
        return stage_state.joined_optimizer(parts, numbers) if parts else {}

    def _numbers(self, optimizer: Optimizer) -> list[dict[str, int]]:
        """Returns name -> index of the full model's parameters; called on every rank of a pipeline."""
        names: list[Any] = [None] * self.sizes.pipeline
        own = stage_state.names_of(optimizer, self.language_module)
        dist.all_gather_object(names, own, group=self._stages)
        return stage_state.numbered(names, self._parameters)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint without the weights of other stages."""
        found = super().load_checkpoint(checkpoint_path, weights_only)
        if self.pipeline is not None:
            others = set(self._weights) - set(tensors.state_of(self.language_module))
            found["state_dict"] = {n: w for n, w in found["state_dict"].items() if n not in others}
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this rank's shards of the full optimizer state."""
        states = checkpoint["optimizer_states"]
        if self.pipeline is not None:
            states = [
                stage_state.own_part(
                    state, stage_state.names_of(optimizer, self.language_module), self._numbers(optimizer)
                )
                for optimizer, state in zip(self.optimizers, states, strict=True)
            ]
        super().load_optimizer_state_dict({"optimizer_states": states})

    def teardown(self) -> None:
        """Undoes what the compiler was told."""
        self._undo_overlap()
        super().teardown()
