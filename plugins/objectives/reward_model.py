"""A reward model: a number for each answer, so that the preferred one of two has the larger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.technique import Feature, technique
from plugins.objectives.heads import Head, new_head

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

PADDING = -1
"""`document_ids` of padding."""


@technique(
    paper="Bradley-Terry; InstructGPT, arXiv:2203.02155, equation 1; margin: Llama 2, arXiv:2307.09288, equation 2; centre: "
    "arXiv:2312.09244, section 2",
    needs=(Feature("preference_pairs"),),
    offers=("reward_objective", "keeps_weights"),
)
class RewardModel(Objective):
    """Learns a reward for answers from pairs of them: -log sigmoid(r_chosen - r_rejected - margin), in nats per pair.

    A head of C weights on the hidden state at the last token of an answer, the one that ends it, gives its reward. Rows
    2 i and 2 i + 1 of a batch are the chosen and the rejected answer of a pair, as `PreferenceDataModule` has them; the margin
    is the record's field `margin`, or 0. Every pair weighs the same, however long its answers are. A pair of which one row
    has no label does not count. Logged: `accuracy`, the share of pairs whose chosen answer has the larger reward, and `margin`,
    the mean of r_chosen - r_rejected.

    The network's own output weight, unless it is that of its embedding, is frozen and not used. The head is a parameter of the
    objective, saved with it: `plugins.checkpoints.stored_objective.load_objective` and :meth:`score` give the reward of a text.

    Args:
        centre: Coefficient c of c (r_chosen + r_rejected)^2, which keeps rewards around 0; 0.01 in the paper.

    Raises:
        ConfigError: If the coefficient is below 0, the network returns logits, or a batch has an odd number of rows.

    Example:
        model:
          objective:
            class_path: RewardModel
            init_args: {centre: 0.01}
        data:
          class_path: PreferenceDataModule
          init_args:
            source: pairs.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 1024
            batch_size: 4
    """

    loss_unit = "nats/pair"

    def __init__(self, centre: float = 0.0) -> None:
        super().__init__()
        if not 0 <= centre < float("inf"):
            raise ConfigError(f"RewardModel takes centre from 0 upwards, not {centre}.")
        self.centre = centre
        self.head: Head | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error where rows are taken apart, where answers have no pair, and for `predict`."""
        for name in ("pipeline", "context"):
            if any((item.arguments.get(name) or 1) > 1 for item in run.selected):
                yield f"RewardModel needs whole rows, and its head on one rank: set {name} to 1"
        if run.argument("data.paired") is False:
            yield "RewardModel compares two answers to a prompt: set data.paired to true"
        if run.command == "predict":
            yield "predict writes log-probabilities of tokens, which RewardModel does not learn; validate has its accuracy"

    def change_network(self, network: Network) -> None:
        """Makes the head, of the size of a network that was just built."""
        self.head = new_head(network, "RewardModel", 1, bias=False)

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss of the pairs, weighted by their number, with accuracy and margin."""
        labels = batch["labels"]
        if len(labels) % 2:
            raise ConfigError(
                f"RewardModel: a batch has {len(labels)} rows, but pairs have two: take --data=PreferenceDataModule with paired: true."
            )
        answered = labels != IGNORED_LABEL
        places = torch.arange(labels.shape[1], device=labels.device)
        # the last token of the answer is the one behind the last label; of a row that was cut, the last one
        ends = (places * answered).amax(1).add(1).clamp(max=labels.shape[1] - 1)
        chosen, rejected = self.rewards(network, batch, ends).view(-1, 2).unbind(1)
        counted = answered.any(1).view(-1, 2).all(1)
        margins = batch["margin"].amax(1)[::2] if "margin" in batch else torch.zeros_like(chosen)
        losses = -F.logsigmoid(chosen - rejected - margins) + self.centre * (chosen + rejected).square()
        tokens, pairs = answered.sum(), counted.sum()
        figures = {"accuracy": chosen > rejected, "margin": chosen - rejected}

        def summed(values: Tensor) -> TokenSum:
            return TokenSum(torch.where(counted, values, 0.0).sum(), tokens, pairs)

        return summed(losses), {name: summed(values.detach().float()) for name, values in figures.items()}

    def rewards(self, network: Network, batch: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        """Returns the reward of each row, (B,), at the positions `ends` (B,), float32 or wider.

        Raises:
            ConfigError: If there is no head yet.
        """
        if self.head is None:
            raise ConfigError("RewardModel has no head: call change_network(network) before training.")
        hidden = network(batch)
        return self.head(hidden[torch.arange(len(ends), device=ends.device), ends]).squeeze(-1)

    @torch.no_grad()
    def score(self, network: Network, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns the rewards of texts, (B,), float32, on the network's device.

        Args:
            network: In eval mode, that the head belongs to.
            rows: Token ids of each prompt with its answer, and the token that ends the answer.
        """
        device = next(network.parameters()).device
        ends = torch.tensor([len(row) - 1 for row in rows], device=device)
        if not len(rows) or int(ends.min()) < 0:
            raise ConfigError("RewardModel scores texts of at least one token.")
        padded = nn.utils.rnn.pad_sequence(
            [torch.tensor(row, device=device) for row in rows], batch_first=True
        )
        batch = {"input_ids": padded}
        if len({len(row) for row in rows}) > 1:
            places = torch.arange(padded.shape[1], device=device).expand_as(padded)
            inside = places <= ends[:, None]
            batch["document_ids"] = torch.where(inside, 0, PADDING)
            batch["position_ids"] = torch.where(inside, places, 0)
        return self.rewards(network, batch, ends)
