"""Next-token prediction: the language modelling loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.technique import technique
from core.training.shards import full_tensor
from plugins.objectives.chunked import Call, ChunkTokens, check_chunk_tokens, sums_over_positions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from toolkit.selection import Run, Selected

SHARDING = ("FSDP", "HybridParallel", "FSDPStrategy", "ModelParallelStrategy")
"""Strategies that shard weights, and gather them only in the forward of the network."""


@technique(
    paper="GPT, Radford et al. 2018, section 3.1; smoothing: arXiv:1512.00567, 7; z-loss: PaLM, arXiv:2204.02311, 5",
    maturity="stable",
)
class CausalLM(Objective):
    """Cross-entropy of the next token, in nats, summed over the tokens that have a label.

    Logits (B, T, V) are converted to float32 first. Positions with label -100 count neither in the sum nor in the
    number of tokens. Smoothing, z-loss and L2 are part of the training loss only: `train/cross_entropy` is the loss
    without them, `val/loss` never has them.

    Args:
        label_smoothing: Fraction s of the target that is distributed evenly over the V tokens: the loss is (1 - s)
            times the cross-entropy with the label plus s times the mean of the cross-entropies with every token.
        z_loss: Coefficient of the mean square of log Z, the logarithm of the softmax's denominator; 1e-4 in PaLM.
            Logged as `train/z_loss`, without the coefficient.
        l2: Coefficient c of c/2 times the sum of squares of all weights of two and more dimensions. Unlike the
            optimizer's decoupled weight decay, its gradient passes through the optimizer's moments.
            Needs full weights on each rank: not with `FSDP`, `HybridParallel` and stage 3 of `DeepSpeedZero`.
        chunk_tokens: Positions whose logits are computed at a time, so that memory does not grow with B T V; None: all.
            "auto": all, up to 512 MiB of logits in float32 or 1,024 positions (on CUDA 4,096); beyond that as many at a time.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        model:
          objective:
            class_path: CausalLM
            init_args: {label_smoothing: 0.0, z_loss: 1.0e-4}
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        l2: float = 0.0,
        chunk_tokens: ChunkTokens = "auto",
    ) -> None:
        super().__init__()
        for name, value, most in (
            ("label_smoothing", label_smoothing, 1.0),
            ("z_loss", z_loss, 1e9),
            ("l2", l2, 1e9),
        ):
            if not 0 <= value <= most:
                raise ConfigError(
                    f"CausalLM takes {name} from 0 {'to 1' if most == 1 else 'upwards'}, not {value}."
                )
        check_chunk_tokens("CausalLM", chunk_tokens)
        self.label_smoothing, self.z_loss, self.l2 = label_smoothing, z_loss, l2
        self.chunk_tokens = chunk_tokens
        self._call: Call | None = None

    def compile_loss(self, call: Call | None) -> None:
        """Computes losses from logits with compiled code from now on; see `toolkit.updates.CompilesLoss`."""
        self._call = call

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error for a network that sees later tokens, and for `l2` with sharded weights or weight decay."""
        for item in run.selected:
            if "bidirectional" in item.declaration.offers:
                yield (
                    f"{item.name} sees the tokens that follow, which CausalLM predicts: take the objective that goes "
                    f"with {item.name} (python -m core plugins show {item.name}), or a decoder such as GPT"
                )
        zero = [item.name for item in run.selected if item.arguments.get("stage") == 3]
        sharding = [item.name for item in run.selected if item.name in SHARDING] or zero
        if own.arguments.get("l2") and sharding:
            yield (
                f"l2 is {own.arguments['l2']}, a sum over full weights, and {sharding[0]} shards them. "
                "Set --model.objective.l2=0, and --model.optimizer.weight_decay instead."
            )
        decay = run.argument("model.optimizer.weight_decay")
        if own.arguments.get("l2") and decay:
            yield (
                f"l2 is {own.arguments['l2']} and the optimizer's weight_decay {decay}: both shrink the weights. "
                "Set --model.optimizer.weight_decay=0 or --model.objective.l2=0."
            )

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of label tokens, and the terms of a loss that has several."""
        labels = batch["labels"]
        tokens = (labels != IGNORED_LABEL).sum()
        hidden = network(batch)
        smoothing, z_loss = (self.label_smoothing, self.z_loss) if self.training else (0.0, 0.0)
        parts = partial(cross_entropy, smoothing=smoothing, z_loss=z_loss)
        sums = sums_over_positions(parts, network, hidden, labels, self.chunk_tokens, self._call)
        total, plain, squares = sums.unbind()
        figures = {}
        if self.training and (smoothing or z_loss or self.l2):
            figures["cross_entropy"] = TokenSum(plain.detach(), tokens)
            if z_loss:
                figures["z_loss"] = TokenSum(squares.detach(), tokens)
            if self.l2:
                total = total + tokens * (self.l2 / 2 * _sum_of_squares(network))
        return TokenSum(total, tokens), figures


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Returns three sums over the positions with a label: loss, plain cross-entropy and (log Z)^2, shape (3,).

    Args:
        logits: (N, V); converted to float32.
        labels: (N,).
        smoothing: Fraction of the target that is distributed over all tokens.
        z_loss: Coefficient of (log Z)^2.
    """
    logits = logits.float()
    plain = full_tensor(F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum"))
    total, squares = plain, torch.zeros_like(plain)
    if smoothing or z_loss:
        labelled, log_z = labels != IGNORED_LABEL, _log_denominator(logits)
        if smoothing:
            others = log_z - full_tensor(logits.sum(-1)) / logits.shape[-1]
            total = (1 - smoothing) * plain + smoothing * others.where(labelled, 0.0).sum()
        if z_loss:
            squares = log_z.square().where(labelled, 0.0).sum()
            total = total + z_loss * squares
    return torch.stack((total, plain, squares))


def _log_denominator(logits: Tensor) -> Tensor:
    """Returns log Z of each position, (N,); of logits that are sharded along the vocabulary without gathering them."""
    if not hasattr(logits, "full_tensor"):
        return logits.logsumexp(-1)
    from torch.distributed.tensor import DTensor, Replicate

    most = full_tensor(logits.detach().amax(-1))
    mesh: DeviceMesh = logits.device_mesh  # type: ignore[attr-defined]
    replicated = DTensor.from_local(most[:, None], mesh, [Replicate()] * mesh.ndim, run_check=False)
    return full_tensor((logits - replicated).exp().sum(-1)).log() + most


def _sum_of_squares(network: Network) -> Tensor:
    squares = [weight.float().square().sum() for weight in network.parameters() if weight.ndim > 1]
    return torch.stack([s.full_tensor() if hasattr(s, "full_tensor") else s for s in squares]).sum()
