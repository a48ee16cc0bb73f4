"""Multi-token prediction: small modules behind the network predict the tokens after the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.technique import technique
from core.training.shards import full_tensor
from toolkit.further_blocks import RunsFurtherBlocks, set_further_blocks
from toolkit.initial_values import copied, normal, start_added
from toolkit.prefixes import PREFIX

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

AROUND = {"BalancedRouting": "listens to the network's routers", "PrefixLM": "changes what the network sees"}
"""Objectives that go around this one, and why."""

WITHIN = (
    "{}, and MultiTokenPrediction runs the network itself: put MultiTokenPrediction within it, not around it"
)


class Ahead(nn.Module):
    """One module of DeepSeek-V3's: arXiv:2412.19437, equations 21 to 23.

    Args:
        network: Its last block is copied, with the weights that it begins with.
        width: C.
        name: Of the module.
    """

    def __init__(self, network: Network, width: int, name: str) -> None:
        super().__init__()
        self.block = copied(network.blocks[-1])
        weight = next(self.block.parameters())
        options: Any = {"device": weight.device, "dtype": weight.dtype}
        self.hidden_norm, self.token_norm, self.norm = (nn.RMSNorm(width, 1e-6, **options) for _ in range(3))
        self.projection = nn.Linear(2 * width, width, bias=False, **options)
        start_added(self.projection.weight, normal(0.02), network, f"{name}.projection")
        for place, norm in enumerate((self.hidden_norm, self.token_norm, self.norm)):
            start_added(norm.weight, 1.0, network, f"{name}.norm.{place}")

    def forward(
        self, network: RunsFurtherBlocks, batch: Mapping[str, Tensor], hidden: Tensor, tokens: Tensor
    ) -> Tensor:
        """Maps hidden states and embeddings of the tokens that they are to know now, both (B, T, C), to hidden states."""
        joined = torch.cat((self.hidden_norm(hidden), self.token_norm(tokens)), dim=-1)
        return network.run_further_block(self.block, batch, self.projection(joined))


class _Given:
    """The network as an objective sees it whose hidden states are known: calling it returns them.

    Its parameters are those of the part that made the states: a penalty on weights counts each of them once.
    """

    def __init__(self, network: Network, hidden: Tensor, part: nn.Module) -> None:
        self._network, self._hidden, self.parameters = network, hidden, part.parameters

    def __call__(self, batch: Mapping[str, Tensor], cache: Any = None) -> Tensor:
        return self._hidden

    @property
    def attends_to_prefixes(self) -> bool:
        raise ConfigError(WITHIN.format(f"PrefixLM {AROUND['PrefixLM']}") + ".")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


@technique(
    paper="DeepSeek-V3, arXiv:2412.19437, section 2.2",
    offers=("keeps_weights",),
    conflicts={
        "RandomRestart": "it begins with other weights of the network, and would leave those of the predictions"
    },
)
class MultiTokenPrediction(Objective):
    """Also predicts the `depth` tokens after the next one, each with a module of its own, in training.

    Module k maps the hidden states of module k - 1, of the network for the first, and the embedding of the k-th next token
    to hidden states: RMSNorm of both, a projection to C, one more block, RMSNorm, and the network's embedding and head.
    They are sequential as in DeepSeek-V3 and not parallel as in arXiv:2404.19737: each prediction sees the tokens before it, and
    a module costs one block however large the vocabulary is. The loss is the objective's plus `weight` times the mean of
    those of the modules, each over all label tokens. A term for logits, such as CausalLM's `z_loss`, is part of each of them;
    one for weights, `l2`, is over those of the network in the first and over a module's own in the others.

    ActivationCheckpointing and ActivationOffload treat the modules' blocks as those of the network. In a mixture of experts their
    routers count as layers: for BalancedRouting, which goes around this objective, BiasBalancing and RoutingMonitor.
    PrefixLM, too, goes around this objective: modules see prefixes as the network does.
    StochasticDepth leaves out blocks of the network alone, and precisions with layers of their own leave those of the
    modules as they are.

    The modules are parameters of the objective, saved with it. An export, and a run that starts from the weights, leaves them
    out. In validation only the objective counts. Logged: `train/task_loss`, the objective alone, and `train/ahead_1`...

    Args:
        objective: The objective of the network and of each module.
        depth: D, the number of modules.
        weight: Weight of the mean loss of the modules; 0.3 in DeepSeek-V3, at its end 0.1.

    Raises:
        ConfigError: If a number is out of range, or the network has no embedding, block and head to share.

    Example:
        model:
          objective:
            class_path: MultiTokenPrediction
            init_args:
              objective: {class_path: CausalLM}
              depth: 1
              weight: 0.3
    """

    def __init__(self, objective: Objective, depth: int = 1, weight: float = 0.3) -> None:
        super().__init__()
        if depth < 1:
            raise ConfigError(f"MultiTokenPrediction: depth={depth} must be at least 1.")
        if not 0 < weight < float("inf"):
            raise ConfigError(f"MultiTokenPrediction: weight={weight} must be above 0.")
        self.loss_unit = objective.loss_unit
        self.objective, self.depth, self.weight = objective, depth, weight
        self.ahead = nn.ModuleList()

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error where a strategy takes rows or network apart, or the objective listens to the network."""
        for name in ("pipeline", "context"):
            if any((item.arguments.get(name) or 1) > 1 for item in run.selected):
                yield f"MultiTokenPrediction needs whole rows, and embedding and head on one rank: set {name} to 1"
        inner = str(run.argument(f"{own.key}.objective.class_path")).rpartition(".")[2]
        if inner in AROUND:
            yield WITHIN.format(f"{inner} {AROUND[inner]}")

    def change_network(self, network: Network) -> None:
        """Makes the modules, of the size of a network that was just built; the network stays as it is."""
        weight = network.output_weight
        if not isinstance(network, RunsFurtherBlocks) or weight is None:
            raise ConfigError(
                f"MultiTokenPrediction: {type(network).__name__} returns logits, or runs no further blocks.\nTake a network such "
                "as Llama, without final_soft_cap."
            )
        modules = [Ahead(network, weight.shape[1], f"ahead.{k}") for k in range(self.depth)]
        self.ahead = nn.ModuleList(modules)
        self._weights = 2 * weight.shape[1] ** 2 + weight.numel()  # of a projection, and of the head
        set_further_blocks(network, (module.block for module in modules))

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the objective's sums, in training with those of the further tokens added."""
        if not self.training:
            return self.objective.loss(network, batch)
        if not self.ahead:
            raise ConfigError(
                "MultiTokenPrediction has no modules: call change_network(network) before training."
            )
        hidden = network(batch)
        loss, figures = self._of(network, hidden, network, batch)
        figures = {**figures, "task_loss": TokenSum(loss.total.detach(), loss.tokens, loss.weight)}
        total = full_tensor(loss.total)
        module: Any
        for k, module in enumerate(self.ahead, start=1):
            tokens = network.forward_blocks(
                {**batch, "input_ids": shifted(batch["input_ids"], k, 0)}, None, range(0)
            )
            hidden = module(network, batch, hidden, tokens)
            further, _ = self._of(
                network, module.norm(hidden), module, {**batch, "labels": labels_ahead(batch, k)}
            )
            total = total + self.weight / self.depth * full_tensor(further.total)
            figures[f"ahead_{k}"] = TokenSum(further.total.detach(), further.tokens, further.weight)
        return TokenSum(total, loss.tokens, loss.weight), figures

    def further_flops_per_token(self, network: Any, sequence_length: int) -> float:
        """Returns operations of the modules, forward and backward: 6 for each weight of projection and head, and their blocks."""
        return self.depth * (network.further_block_flops(sequence_length) + 6.0 * self._weights)

    def _of(
        self, network: Network, hidden: Tensor, part: nn.Module, batch: Mapping[str, Tensor]
    ) -> tuple[TokenSum, dict[str, TokenSum]]:
        given: Any = _Given(network, hidden, part)
        return self.objective.loss(given, batch)


def shifted(x: Tensor, k: int, fill: int) -> Tensor:
    """Returns for each position the value k later, (B, T); `fill` where there is none."""
    return nn.functional.pad(x[:, k:], (0, k), value=fill)


def labels_ahead(batch: Mapping[str, Tensor], k: int) -> Tensor:
    """Returns the labels k later, (B, T), of the same document; within a prefix only those of its last token.

    There, a module has the embeddings of k tokens more, and each token sees all of it, also what it is to predict.
    """
    labels = shifted(batch["labels"], k, IGNORED_LABEL)
    if PREFIX in batch:
        labels = labels.masked_fill(batch[PREFIX] & shifted(batch[PREFIX], 1, 0), IGNORED_LABEL)
    documents = batch.get("document_ids")
    if documents is None:
        return labels
    return labels.masked_fill(documents != shifted(documents, k, -2), IGNORED_LABEL)
