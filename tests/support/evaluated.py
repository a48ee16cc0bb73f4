"""Networks whose predictions follow from a rule, with a tokenizer of bytes, as evaluations see them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from core.contracts import Network
from toolkit.evaluation import EvaluatedModel

END = "<|end|>"


def byte_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """Returns a tokenizer of bytes; some pairs of them are one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelt = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(spelt)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


class Ruled(Network):
    """Gives logits that a function computes from the ids before.

    Args:
        rule: Takes the ids up to a position, and returns the logits of the next one, (V,).
        vocab_size: V.
        max_sequence_length: The longest row.
    """

    def __init__(
        self, rule: Callable[[list[int]], Tensor], vocab_size: int, max_sequence_length: int | None = None
    ) -> None:
        super().__init__()
        self.rule, self.vocab_size, self.max_sequence_length = rule, vocab_size, max_sequence_length
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Mapping[str, Tensor], cache: Any = None) -> Tensor:
        rows = batch["input_ids"].tolist()
        return torch.stack(
            [torch.stack([self.rule(row[: end + 1]) for end in range(len(row))]) for row in rows]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def init_weights(self) -> None:
        pass

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return []

    @property
    def output_weight(self) -> None:
        return None

    def flops_per_token(self, sequence_length: int) -> int:
        return 0


def model(
    rule: Callable[[list[int]], Tensor],
    *,
    tokenizer: Tokenizer | None = None,
    max_sequence_length: int | None = None,
    batch_size: int = 4,
    begins: bool = True,
) -> EvaluatedModel:
    """Returns a network of a rule; texts begin behind the end-of-text token unless told otherwise."""
    tokenizer = tokenizer or byte_tokenizer()
    size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id(END) if begins else None
    network = Ruled(rule, size, max_sequence_length).eval()
    return EvaluatedModel(network, tokenizer.to_str(), end, [] if end is None else [end], batch_size)


def drawn(size: int, window: int | None = None) -> Callable[[list[int]], Tensor]:
    """Returns a rule of random logits, the same for the same last `window` ids."""

    def rule(ids: list[int]) -> Tensor:
        seed = hash(tuple(ids if window is None else ids[-window:])) % 2**31
        return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))

    return rule


def certain(size: int, follows: Callable[[list[int]], int]) -> Callable[[list[int]], Tensor]:
    """Returns a rule that is sure of the next id."""

    def rule(ids: list[int]) -> Tensor:
        return torch.zeros(size).index_fill(0, torch.tensor(follows(ids)), 30.0)

    return rule


def measure(evaluation: Any, given: EvaluatedModel) -> dict[str, float]:
    """Returns the figures of an evaluation of a model."""
    with torch.no_grad():
        found = evaluation.measure(given, list(evaluation.items(given)))
    names = {name for one in found for name in one.sums}
    return dict(evaluation.figures({n: sum(one.sums.get(n, 0.0) for one in found) for n in names}))
