"""What objectives on preferences share: log-probabilities of whole answers, their reference, checks of the run.

Shapes: R rows, two for each of B records: see PreferenceDataModule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from core.contracts import Network, TokenSum
from core.errors import ConfigError
from toolkit.log_probabilities import log_probabilities, row_sums
from toolkit.references import REFERENCE

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

SPLITS_PAIRS = {"OOMGuard": "it splits a batch between any two rows, also between those of a record"}
"""For `@technique(conflicts=...)`."""


class Answers(NamedTuple):
    """Log-probabilities of answers.

    Attributes:
        sums: Log-probability of each answer in nats, (R,) float32.
        counts: Its tokens, (R,); 0 for a row that only fills the batch.
    """

    sums: Tensor
    counts: Tensor

    @property
    def means(self) -> Tensor:
        """Mean log-probability of an answer's tokens, (R,)."""
        return self.sums / self.counts.clamp(min=1)

    @property
    def tokens(self) -> Tensor:
        """Label tokens of all rows, 0-d."""
        return self.counts.sum()


def answers(network: Network, batch: Mapping[str, Tensor], chunk_tokens: int) -> Answers:
    """Returns the log-probabilities of the answers of a batch."""
    return Answers(*row_sums(log_probabilities(network, batch, chunk_tokens), batch["labels"]))


def check_whole(batch: Mapping[str, Tensor]) -> None:
    """Raises a ConfigError if a batch has half a record."""
    if (rows := len(batch["labels"])) % 2:
        raise ConfigError(
            f"A batch of {rows} rows has half a record: rows 2 i and 2 i + 1 belong together.\n"
            "Split batches after an even number of rows."
        )


def pairs_of(network: Network, batch: Mapping[str, Tensor], chunk_tokens: int) -> tuple[Answers, Tensor]:
    """Returns the log-probabilities of a batch of pairs, and which are pairs, (B,) bool: others only fill the batch."""
    check_whole(batch)
    found = answers(network, batch, chunk_tokens)
    return found, found.counts.view(-1, 2).amin(1) > 0


def references(batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the log-probability of each answer under the reference, (R,).

    Raises:
        ConfigError: If the batch has none.
    """
    if REFERENCE not in batch:
        raise ConfigError(
            "The batch has no reference log-probabilities.\nAdd the callback that computes them before the first step: "
            "--trainer.callbacks+=ReferenceLogProbabilities"
        )
    return batch[REFERENCE][:, 0]


def pair_figures(chosen: Tensor, rejected: Tensor, pairs: Tensor) -> dict[str, TokenSum]:
    """Returns the mean rewards of both answers, their margin, and how often the chosen one has the higher reward.

    Args:
        chosen: Rewards (B,).
        rejected: Rewards (B,).
        pairs: Which of them are pairs, (B,) bool; others only fill the batch.
    """
    count = pairs.sum()
    chosen, rejected = chosen.detach(), rejected.detach()
    figures = {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": (chosen > rejected).float(),
    }
    return {name: TokenSum(values.where(pairs, 0.0).sum(), count) for name, values in figures.items()}


def check_at_least(who: str, least: float, **values: float) -> None:
    """Raises a ConfigError if one of the values is below the least, or is not finite."""
    for name, value in values.items():
        if not least <= value < float("inf"):
            raise ConfigError(f"{who} takes {name} from {least:g} upwards, not {value}.")


def check_above_0(who: str, **values: float) -> None:
    """Raises a ConfigError if one of the values is not above 0 and finite."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{who} takes {name} above 0, not {value}.")


def faults(run: Run, own: Selected, paired: bool, stored: bool = False) -> Iterator[str]:
    """Yields, for a `preflight`, what does not fit an objective on answers.

    Args:
        run: The run.
        own: The objective in it.
        paired: Whether it takes pairs, or single answers.
        stored: Whether it takes references that a callback computes.
    """
    if run.argument("data.paired") not in (None, paired):
        others = "DPO, ORPO and SimPO take them" if run.argument("data.paired") else "KTO takes them"
        what = ("single answers", "pairs") if paired else ("pairs", "single answers")
        yield (
            f"{own.name} takes {what[1]}, and data.paired={run.argument('data.paired')} has {what[0]}: {others}. "
            f"Set --data.paired={str(paired).lower()}, with records of that form, or take that objective."
        )
    for name in ("pipeline", "context"):
        if any((item.arguments.get(name) or 1) > 1 for item in run.selected):
            yield f"{own.name} needs whole answers, of both rows of a record, on one rank: set {name} to 1"
    offered = {feature for item in run.selected for feature in item.declaration.offers}
    if stored and "reference_log_probabilities" not in offered:
        yield (
            f"{own.name} compares with the network that the run starts from: add "
            "--trainer.callbacks+=ReferenceLogProbabilities"
        )
