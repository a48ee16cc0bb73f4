"""What an evaluation is: it measures a network on items, as sums that add up over items and ranks."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective
from core.errors import ConfigError
from toolkit.chat_template import ChatTemplate
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling
from toolkit.generation.prompts import PromptEncoder
from toolkit.generation.texts import TextStream
from toolkit.log_probabilities import log_probabilities

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EvaluatedModel", "Evaluation", "Generated", "Item", "Measured", "Row"]


class Item(NamedTuple):
    """What an evaluation measures one by one: a document, a question, a prompt.

    Attributes:
        id: Its name, of its own within the evaluation.
        content: JSON values that do not depend on the network or its tokenizer. Two checkpoints are compared pair by pair
            over the items that have the same id and content.
        group: The domain or source that it counts under besides; "": none.
    """

    id: str
    content: Any
    group: str = ""

    @property
    def digest(self) -> str:
        """What identifies the content: the first 16 digits of a SHA-256."""
        text = json.dumps(self.content, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Measured(NamedTuple):
    """What was measured of an item.

    Attributes:
        sums: Name -> finite number; a name that is missing is 0. Those of several items are added.
        shown: JSON values that are stored beside it for people to read, such as the answer that was generated.
    """

    sums: Mapping[str, float]
    shown: Mapping[str, Any] = {}


class Row(NamedTuple):
    """Token ids, of which those from `begin` on are predicted; `begin` is at least 1."""

    ids: Sequence[int]
    begin: int = 1


class Generated(NamedTuple):
    """A continuation: its token ids, without the one that ended it, and its text, which ends before a stop text."""

    ids: list[int]
    text: str


class Evaluation(ABC):
    """Measures a network. Items are shared among the ranks, and their sums are stored.

    Figures are computed from sums over items, so that those of a group, of a resampled set and of all ranks follow from the
    same function. An instance keeps no state between calls, draws random numbers from generators of its own, and leaves the
    network as it is. The network is in eval mode, without gradients.
    """

    @abstractmethod
    def items(self, model: EvaluatedModel) -> Sequence[Item]:
        """Returns what is measured, on each rank the same, each time the same.

        Called before training as well, so that mistakes of the user show before it begins.

        Raises:
            ConfigError: If files cannot be read, or the model does not have what is needed.
        """

    @abstractmethod
    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> Sequence[Measured]:
        """Returns what is measured of each item, in their order; the items of this rank, maybe none.

        No collectives: ranks have different numbers of items. The result of an item depends on it and the model alone, up
        to rounding.
        """

    @staticmethod
    @abstractmethod
    def figures(sums: Mapping[str, float]) -> Mapping[str, float]:
        """Returns the figures that follow from sums over items: name -> value.

        Called for all items, for those of each group, and often for resampled ones; by `compare` also without an instance, so
        what it needs to know is in the sums or their names. Sums that are 0 may be missing. A figure that they do not define,
        such as a mean of nothing, is left out. Names are lower case and carry the unit, if there is one:
        `loss_nats_per_token`.
        """

    def draw(self, items: Sequence[Item], measured: Sequence[Measured]) -> Figure | None:
        """Returns a picture for the report; None: there is none."""
        return None


@dataclass(frozen=True)
class EvaluatedModel:
    """The network that is evaluated, with what it needs to read and write text.

    Attributes:
        network: In eval mode, on its device.
        tokenizer_json: Its tokenizer, for `tokenizers.Tokenizer.from_str`.
        end_of_text_id: The id that ends every document; None: there is none.
        stop_ids: Ids that end a generated text.
        batch_size: Rows that are computed at once.
        objective: What it was trained for, in eval mode; None: not known.
        data: What the checkpoint keeps of the data module, such as names of classes.
        template: Of conversations; None: it continues texts.
    """

    network: Network
    tokenizer_json: str
    end_of_text_id: int | None = None
    stop_ids: Sequence[int] = ()
    batch_size: int = 16
    objective: Objective | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    template: ChatTemplate | None = None

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Encodes texts; special tokens that they spell are text."""
        return PromptEncoder(self.tokenizer_json)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, for decoding."""
        return self.encoder.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.network.parameters()).device

    @cached_property
    def beginning(self) -> list[int]:
        """The ids that a text begins behind: those of the tokenizer (BOS), else the end-of-text id; else none."""
        end = [] if self.end_of_text_id is None else [self.end_of_text_id]
        return list(self.encoder.leading) or end

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without :attr:`beginning`."""
        count = len(self.encoder.leading)
        return [ids[count:] for ids in self.encoder.encode_prompts(texts)]

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of prompts up to where an answer begins: messages of a user where there is a template, else texts.

        Raises:
            ConfigError: If one has no tokens, or the template refuses it.
        """
        if self.template is None:
            found = [[*self.beginning, *ids] for ids in self.encode(texts)]
        else:
            chats = [[{"role": "user", "content": self.encoder.as_text(text)}] for text in texts]
            found = [self.encoder.encode(self.template.render(one), leading=False) for one in chats]
        for text, ids in zip(texts, found, strict=True):
            if not ids:
                raise ConfigError(
                    f"The prompt {text[:40]!r} has no tokens, and the tokenizer none that begins a text."
                )
        return found

    def batches(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yields indexes of rows, those of similar length together, and their batch on the device.

        `input_ids` and `labels` are (B, T), of labels those before `begin` are ignored. Shorter rows are filled up behind their
        end, where a causal network does not look.
        """
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
        for start in range(0, len(order), self.batch_size):
            which = order[start : start + self.batch_size]
            shape = len(which), max(len(rows[which[0]].ids) - 1, 1)
            ids = torch.zeros(shape, dtype=torch.int64)
            labels = torch.full(shape, IGNORED_LABEL)
            for place, index in enumerate(which):
                row = torch.tensor(rows[index].ids, dtype=torch.int64)
                ids[place, : len(row) - 1] = row[:-1]
                labels[place, rows[index].begin - 1 : len(row) - 1] = row[rows[index].begin :]
            yield which, {"input_ids": ids.to(self.device), "labels": labels.to(self.device)}

    def log_probabilities(self, rows: Sequence[Row]) -> list[Tensor]:
        """Returns the log-probability of each predicted token in nats: of each row (its length - begin,), float64, on the CPU."""
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        for which, batch in self.batches(rows):
            values = log_probabilities(self.network, batch).double().cpu()
            for place, index in enumerate(which):
                found[index] = values[place, rows[index].begin - 1 : len(rows[index].ids) - 1].clone()
        return found

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        samples: int = 1,
        seed: int = 0,
        stops: Sequence[str] = (),
    ) -> list[list[Generated]]:
        """Returns what continues each prompt, `samples` of each.

        Args:
            prompts: Token ids of each, such as those of :meth:`encode_prompts`.
            max_new_tokens: The most tokens of a continuation.
            sampling: How tokens are chosen; None: always the likeliest.
            samples: Continuations of each prompt.
            seed: Sample n of every prompt is drawn with `seed + n`, in whatever company.
            stops: Texts that end a continuation, of which they are no part.
        """
        sampling = sampling or Sampling(temperature=0)
        found: list[list[Generated]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        size = max(1, self.batch_size // samples)
        for start in range(0, len(order), size):
            which = order[start : start + size]
            decoding = Decoding(
                self.network,
                [prompts[index] for index in which],
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                seeds=[seed + number for _ in which for number in range(samples)],
                samples=samples,
                stop_ids=self.stop_ids,
                inference_mode=False,
            )
            rows = [index for index in which for _ in range(samples)]
            streams = [TextStream(self.tokenizer, list(prompts[index])[-8:], stops) for index in rows]
            ids: list[list[int]] = [[] for _ in rows]
            for token in decoding:
                ids[token.row].append(token.id)
                streams[token.row].add(token.id)
                if streams[token.row].stopped:
                    decoding.finish(token.row)
            for index, own, stream in zip(rows, ids, streams, strict=True):
                stream.end()
                found[index].append(Generated(own, stream.text))
        return found
