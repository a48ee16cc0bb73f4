"""Losses of a mixture of experts beside another objective: load balancing and router z-loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.technique import technique
from core.training.shards import full_tensor
from toolkit.routing import RoutesTokens, Routing, recorded

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="Switch Transformer, arXiv:2101.03961, equations 4 to 6; per sequence: DeepSeek-V3, arXiv:2412.19437, 17 to 20; "
    "z-loss: ST-MoE, arXiv:2202.08906, equation 5",
)
class BalancedRouting(Objective):
    """Adds to an objective what keeps the experts of a mixture evenly used: a balancing loss and a router z-loss.

    With f_e, the choices of expert e over the number of tokens, and P_e, the mean of its probability, the balancing loss of
    a layer is E sum_e f_e P_e: k where all E experts are used alike, at most E k. That of the network is the mean over its
    layers. For one layer it is `load_balancing_loss_func` of transformers, which takes f and P over all layers together.
    Tokens without a label count in neither.

    f_e times P_e is no sum over tokens: over a batch, the loss is that of the rows that one process computes at a time, and
    the loss of a step is the mean of these, weighted by label tokens. Other micro-batches or ranks change it a little. Over
    each sequence it is a sum over rows, and accumulation changes nothing. The z-loss always is a sum over tokens.

    Logged are `train/task_loss`, the objective alone, `train/load_balancing` and `train/router_z_loss`, without their
    coefficients. In validation only the objective counts.

    Args:
        objective: The objective to which the losses of routing are added.
        load_balancing: Coefficient of the balancing loss; 0.01 in Switch Transformer and OLMoE, 0.001 in Mixtral's config.
        z_loss: Coefficient of the mean of (log sum_e exp(logit_e))^2 over tokens and layers; 0.001 in ST-MoE.
        over: What f and P are taken over: "batch", the rows that are computed at a time, or "sequence", each row.

    Raises:
        ConfigError: If a coefficient is below 0, or the network has no experts.

    Example:
        model:
          network:
            class_path: Mixtral
            init_args: {n_layer: 4, n_head: 4, n_kv_head: 2, n_embd: 256, intermediate_size: 256, max_sequence_length: 512}
          objective:
            class_path: BalancedRouting
            init_args:
              objective: {class_path: CausalLM}
              load_balancing: 0.01
              z_loss: 0.001
    """

    def __init__(
        self,
        objective: Objective,
        load_balancing: float = 0.01,
        z_loss: float = 0.0,
        over: Literal["batch", "sequence"] = "batch",
    ) -> None:
        super().__init__()
        for name, value in (("load_balancing", load_balancing), ("z_loss", z_loss)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"BalancedRouting takes {name} from 0 upwards, not {value}.")
        if over not in ("batch", "sequence"):
            raise ConfigError(f"BalancedRouting takes over=batch or over=sequence, not {over!r}.")
        self.loss_unit = objective.loss_unit
        self.objective, self.load_balancing, self.z_loss, self.over = objective, load_balancing, z_loss, over

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error where the objective does not see the routers."""
        stages = [item for item in run.selected if (item.arguments.get("pipeline") or 1) > 1]
        if stages and stages[0].name == "HybridParallel":
            yield (
                "BalancedRouting sees the routers of the last stage only: set pipeline to 1, or take the objective alone "
                "with the callback BiasBalancing, which balances without a loss"
            )

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the objective's sums, in training with those of the routers added."""
        if not self.training:
            return self.objective.loss(network, batch)
        if not isinstance(network, RoutesTokens):
            raise ConfigError(
                f"BalancedRouting: {type(network).__name__} has no experts.\nTake a network that has, such as Mixtral, or "
                "--model.objective=CausalLM."
            )
        with recorded(network) as routings:
            loss, figures = self.objective.loss(network, batch)
        if not routings:
            raise ConfigError(
                f"BalancedRouting: no block of {type(network).__name__} with experts has run.\nPut MultiTokenPrediction within "
                "BalancedRouting, not around it, and make dense_layers smaller than n_layer."
            )
        seen = batch["labels"] != IGNORED_LABEL
        tokens = seen.sum()
        balance, squares = routing_sums(routings, seen, self.over == "sequence")
        figures = dict(figures)
        figures["task_loss"] = TokenSum(loss.total.detach(), loss.tokens, loss.weight)
        figures["load_balancing"] = TokenSum(balance.detach(), tokens)
        figures["router_z_loss"] = TokenSum(squares.detach(), tokens)
        # where the objective weighs tokens, the means are weighed as these tokens are
        share = 1.0 if loss.weight is loss.tokens else loss.weight / tokens.clamp(min=1)
        total = full_tensor(loss.total) + share * (self.load_balancing * balance + self.z_loss * squares)
        return TokenSum(total, loss.tokens, loss.weight), figures


def routing_sums(routings: Sequence[Routing], seen: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    """Returns balancing losses times their tokens, and squares of log-sum-exps, summed over tokens, of the mean layer.

    Args:
        routings: The routing of each layer.
        seen: Which tokens count, (B, T).
        per_row: Whether each row is balanced by itself.
    """
    counted = seen.flatten().float()
    groups = len(seen) if per_row else 1
    tokens = counted.view(groups, -1).sum(1).clamp(min=1)
    balance = squares = counted.new_zeros(())
    for routing in routings:
        n_experts, choices = routing.logits.shape[1], routing.experts.shape[1]
        chosen = counted.new_zeros(groups, n_experts).scatter_add_(
            1, routing.experts.view(groups, -1), counted.repeat_interleave(choices).view(groups, -1)
        )
        expected = (routing.probabilities * counted[:, None]).view(groups, -1, n_experts).sum(1)
        balance = balance + n_experts * ((chosen * expected).sum(1) / tokens).sum()
        wide = routing.logits.to(torch.promote_types(routing.logits.dtype, torch.float32))
        squares = squares + (wide.logsumexp(-1).square() * counted).sum()
    return balance / len(routings), squares / len(routings)
