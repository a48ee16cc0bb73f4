"""Supervised fine-tuning: the answers of conversations are predicted, weighed by token, answer or conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.technique import Feature, technique
from core.training.shards import full_tensor
from plugins.objectives.chunked import ChunkTokens, check_chunk_tokens, sums_over_positions

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

WEIGHTS = ("token", "answer", "conversation")


@technique(
    paper="InstructGPT, arXiv:2203.02155, section 3.5; noise: NEFTune, arXiv:2310.05914, algorithm 1",
    needs=(Feature("answer_labels"),),
    offers=("answer_objective",),
)
class SupervisedFineTuning(Objective):
    """Cross-entropy of the tokens of answers, in nats; each token, each answer or each conversation weighs the same.

    The data mask all but the answers, as `InstructionDataModule` does; data in which every token has a label are refused. With
    `weigh: token` it has the loss and gradients of `CausalLM`: a long answer counts more than a short one. With `answer` the mean over
    an answer's tokens counts, however many there are, and with `conversation` that over all answers of a record. The weights are
    exact over rows, micro-batches and ranks: sums of weighted losses over the sum of the weights. Several records in a row
    are weighed as in rows of their own.

    Logged: `accuracy`, the share of answer tokens that are the most probable ones, and `token_loss`, the mean over tokens whatever
    the weights.

    Args:
        weigh: What weighs the same: "token", "answer", a run of labels within a record, or "conversation", a record.
        noise: alpha of NEFTune: in training, embeddings get uniform noise within alpha / sqrt(L C), of a record of L tokens and C
            features; 5 in the paper, 0: none. It is drawn from torch's generator, which is seeded for each micro-batch.
        chunk_tokens: Positions whose logits are computed at a time, as in `CausalLM`; None: all.

    Raises:
        ConfigError: If a value is out of range, or the network does not give out its embeddings.

    Example:
        model:
          objective:
            class_path: SupervisedFineTuning
            init_args: {weigh: conversation}
        data:
          class_path: InstructionDataModule
          init_args:
            source: chats.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 1024
            batch_size: 4
    """

    def __init__(
        self,
        weigh: Literal["token", "answer", "conversation"] = "token",
        noise: float = 0.0,
        chunk_tokens: ChunkTokens = "auto",
    ) -> None:
        super().__init__()
        if weigh not in WEIGHTS:
            raise ConfigError(f"SupervisedFineTuning takes weigh={', '.join(WEIGHTS)}, not {weigh!r}.")
        if not 0 <= noise < float("inf"):
            raise ConfigError(f"SupervisedFineTuning takes noise from 0 upwards, not {noise}.")
        check_chunk_tokens("SupervisedFineTuning", chunk_tokens)
        self.weigh, self.noise, self.chunk_tokens = weigh, noise, chunk_tokens

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error for a network that sees later tokens, and where a strategy takes rows or network apart."""
        for item in run.selected:
            if "bidirectional" in item.declaration.offers:
                yield f"{item.name} sees the tokens that follow, which SupervisedFineTuning predicts: take a decoder such as Llama"
        for name, argument in (
            ("context", own.arguments.get("weigh", "token") != "token"),
            ("pipeline", own.arguments.get("noise")),
        ):
            if argument and any((item.arguments.get(name) or 1) > 1 for item in run.selected):
                what = "weights of whole answers" if name == "context" else "noise on the embeddings"
                yield f"SupervisedFineTuning needs whole rows and blocks for {what}: set {name} to 1"

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the weighted sum of the losses with the weights, and accuracy and loss of the tokens."""
        labels = batch["labels"].flatten()
        tokens = (labels != IGNORED_LABEL).sum()
        weights = None if self.weigh == "token" else self._weights(batch).flatten()
        hidden = self._hidden(network, batch)

        def parts(logits: Tensor, places: Tensor) -> Tensor:
            logits, wanted = logits.float(), labels[places]
            losses = full_tensor(
                F.cross_entropy(logits, wanted, reduction="none", ignore_index=IGNORED_LABEL)
            )
            weighted = losses if weights is None else losses * weights[places]
            right = (most_probable(logits.detach()) == wanted).to(losses)
            return torch.stack((weighted.sum(), losses.detach().sum(), right.sum()))

        places = torch.arange(len(labels), device=labels.device).view_as(batch["labels"])
        sums = sums_over_positions(parts, network, hidden, places, self.chunk_tokens)
        total, plain, right = sums.unbind()
        figures = {
            "accuracy": TokenSum(right.detach(), tokens),
            "token_loss": TokenSum(plain.detach(), tokens),
        }
        return TokenSum(total, tokens, None if weights is None else weights.sum()), figures

    def _weights(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns for each label one over the number of labels of its answer or conversation, (B, T); 0 where there is none."""
        seen = batch["labels"] != IGNORED_LABEL
        documents = batch.get("document_ids")
        documents = torch.zeros_like(batch["labels"]) if documents is None else documents
        begins = torch.ones_like(seen)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        if self.weigh == "answer":
            begins[:, 1:] |= seen[:, 1:] != seen[:, :-1]
        counts = _per_part(seen.float(), begins)
        return torch.where(seen, 1 / counts.clamp(min=1), 0.0)

    def _hidden(self, network: Network, batch: Mapping[str, Tensor]) -> Tensor:
        if not (self.training and self.noise):
            return network(batch)
        if type(network).forward_blocks is Network.forward_blocks:
            raise ConfigError(
                f"SupervisedFineTuning: {type(network).__name__} does not give out its embeddings: set --model.objective.noise=0."
            )
        embedded = network.forward_blocks(batch, None, range(0))
        documents = batch.get("document_ids")
        begins = torch.ones_like(batch["labels"], dtype=torch.bool)
        begins[:, 1:] = False if documents is None else documents[:, 1:] != documents[:, :-1]
        lengths = _per_part(torch.ones_like(embedded[..., 0]), begins)
        most = self.noise / (lengths * embedded.shape[-1]).sqrt()
        noisy = embedded + torch.empty_like(embedded).uniform_(-1, 1) * most[..., None]
        return network.forward_blocks(batch, noisy, range(len(network.blocks)))


def most_probable(logits: Tensor) -> Tensor:
    """Returns the first of the tokens with the largest logit, (n,); where ranks share a vocabulary, without gathering logits.

    Args:
        logits: (n, V), or a DTensor of them that is sharded along V.
    """
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(logits, DTensor):
        return logits.argmax(-1)
    own, mesh = logits.to_local(), logits.device_mesh
    _, (_, first) = compute_local_shape_and_global_offset(logits.shape, mesh, logits.placements)
    is_best = own == full_tensor(logits.amax(-1))[:, None]
    ids = torch.arange(first, first + own.shape[-1], device=own.device)
    found = (
        torch.where(is_best, ids, logits.shape[-1]).amin(-1)
        if len(ids)
        else ids.new_full(own.shape[:1], logits.shape[-1])
    )
    return DTensor.from_local(found, mesh, [Partial("min")] * mesh.ndim).full_tensor()


def _per_part(values: Tensor, begins: Tensor) -> Tensor:
    """Returns at each position the sum of the values of its part of the row, (B, T).

    Args:
        values: (B, T).
        begins: Where parts begin, (B, T), also at position 0.
    """
    parts = begins.cumsum(1) - 1
    sums: Any = torch.zeros_like(values).scatter_add(1, parts, values)
    return sums.gather(1, parts)
