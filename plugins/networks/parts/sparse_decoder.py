"""What decoder families with experts add to :class:`Decoder`: initialisation, FLOPs, plans, and what routes tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from core.errors import ConfigError
from plugins.networks.parts.decoder import Decoder
from plugins.networks.parts.moe import Experts, Router, SparseMLP
from plugins.networks.parts.plans import narrowed
from toolkit.hugging_face import Rename
from toolkit.initial_values import Start

EXPERTS = (
    Rename("layers.*.mlp.router", "model.layers.*.mlp.gate"),
    *(
        Rename(f"layers.*.mlp.experts.{name}", f"model.layers.*.mlp.experts.*.{name}.weight", stacked=True)
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
    Rename("layers.*.mlp.shared", "model.layers.*.mlp.shared_experts"),
)
"""Lines of all families but Mixtral, as in files: in memory transformers 5 stacks experts, too."""


class SparseDecoder(Decoder):
    """A decoder of which some MLPs are mixtures of experts. Offers `toolkit.routing.RoutesTokens`."""

    def _count_weights(self, block: nn.Module) -> int:
        """Of the experts those count that a token passes."""
        found = super()._count_weights(block)
        for mlp in block.modules():
            if isinstance(mlp, SparseMLP):
                active = mlp.router.experts_per_token / len(mlp.router.weight)
                found += round(active * sum(p.numel() for p in mlp.experts.parameters()))
        return found

    def initial_value(self, name: str, tensor: Tensor) -> Start | None:
        """As that of :class:`Decoder`; routers and experts begin as other matrices."""
        owner, _, leaf = name.rpartition(".")
        module = self.get_submodule(owner)
        if isinstance(module, Experts):
            return self._matrix(name, tensor)
        if isinstance(module, Router):
            return self._matrix(owner, tensor) if leaf == "weight" else 0.0
        return super().initial_value(name, tensor)

    @property
    def routers(self) -> list[Router]:
        """The routers, in order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    @property
    def expert_stacks(self) -> list[Experts]:
        """The experts of each router."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    def select_rows(self, arguments: tuple[Any, ...], rows: Tensor) -> None:
        """None: routers see all tokens, as losses of routing and the room of experts are of the whole batch."""

    def sequence_parallel_plan(self) -> dict[str, Any]:
        """As that of :class:`Decoder`; the tokens that the experts made are split again."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import PrepareModuleInputOutput, RowwiseParallel

        plan = super().sequence_parallel_plan()
        for name, module in self.named_modules():
            if isinstance(module, Router):
                mlp = name.removesuffix(".router")
                whole = PrepareModuleInputOutput(
                    input_layouts=Shard(1),
                    desired_input_layouts=Replicate(),
                    use_local_input=True,
                    output_layouts=Replicate(),
                    desired_output_layouts=Shard(1),
                )
                plan[mlp] = [narrowed(), whole]
                if f"{mlp}.shared.down_proj" in plan:
                    plan[f"{mlp}.shared.down_proj"] = RowwiseParallel()
        return plan


def new_sparse_mlp(
    n_embd: int,
    n_experts: int,
    experts_per_token: int,
    expert_size: int,
    shared: nn.Module | None = None,
    **routing: Any,
) -> SparseMLP:
    """Returns a mixture of gated experts with SiLU; `routing` are further arguments of :class:`Router`."""
    router = Router(n_embd, n_experts, experts_per_token, **routing)
    return SparseMLP(router, Experts(n_experts, n_embd, expert_size, "silu"), shared)


def check_experts(
    name: str, n_experts: int, experts_per_token: int, groups: int = 1, chosen: int = 1
) -> None:
    """Raises a ConfigError if a token cannot choose so many of the experts."""
    if experts_per_token > n_experts:
        raise ConfigError(f"{name}: experts_per_token={experts_per_token} is above n_experts={n_experts}.")
    if n_experts % groups:
        raise ConfigError(f"{name}: groups={groups} does not divide n_experts={n_experts}.")
    if chosen > groups:
        raise ConfigError(f"{name}: groups_per_token={chosen} is above groups={groups}.")
    size = n_experts // groups
    if groups > 1 and (size < 2 or experts_per_token > chosen * size):
        raise ConfigError(
            f"{name}: {chosen} of {groups} groups have {chosen * size} experts, {size} each: a group needs 2, and a "
            f"token {experts_per_token}."
        )
