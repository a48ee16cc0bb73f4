"""Recall of a sentence from a long text, by its place and the length of the text."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from core.contracts import Reader
from core.errors import ConfigError
from core.technique import technique
from plugins.evaluations.documents import documents
from toolkit import pictures
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CITIES = ("Oslo", "Lima", "Cairo", "Delhi", "Paris", "Quito", "Tunis", "Hanoi")
NEEDLE = "The secret number of {city} is {number}."
QUESTION = "\n\nWhat is the secret number of {city}? The secret number of {city} is"
ROOM = 12
"""Tokens of an answer."""

MOST_DOCUMENTS = 10_000
_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")


class Cell(NamedTuple):
    """A question: where its needle is, and what has to be found."""

    length: int
    depth: float
    city: str
    number: str


@technique(
    paper="needle in a haystack: Kamradt 2023, github.com/gkamradt/LLMTest_NeedleInAHaystack; numbers as needles: RULER, arXiv:2404.06654"
)
class NeedleInHaystack(Evaluation):
    """Hides a sentence with a number in the user's text, at several depths and lengths, and asks for the number.

    The haystack is the beginning of the documents one after another, as long as fits into `lengths` with needle and
    question. The needle stands between two sentences, `depth` of the way from the beginning (0) to the end (1). The question ends
    with the words of the needle before its number, so that a network without training on instructions continues it.

    Figures: `recall`, the share of answers that begin with the number; `needle_loss_nats_per_token`, of the number's tokens, which
    moves long before a small network finds it; `recall_at_DEPTH` in percent of the way. Each length is a group, which makes the
    table of depth by length; the picture shows the same.

    Args:
        documents: Reads the text.
        lengths: Tokens of the whole prompt.
        depths: Where the needle is, 0 to 1.
        trials: Needles for each length and depth.
        seed: Of the numbers.

    Raises:
        ConfigError: If a value is out of range, a length is more than the network sees, or the text is too short for it.

    Example:
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                evaluations:
                  recall:
                    class_path: NeedleInHaystack
                    init_args:
                      documents: {class_path: TextDocuments, init_args: {source: books}}
                      lengths: [128, 256]
    """

    def __init__(
        self,
        documents: Reader,
        lengths: Sequence[int] = (256, 512, 1024),
        depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
        trials: int = 4,
        seed: int = 0,
    ) -> None:
        if not lengths or min(lengths) < 1 or trials < 1:
            raise ConfigError("NeedleInHaystack takes lengths >= 1 (tokens) and trials >= 1.")
        if not depths or not all(0 <= depth <= 1 for depth in depths):
            raise ConfigError(f"NeedleInHaystack.depths: {list(depths)} are not all from 0 to 1.")
        self.documents, self.lengths, self.depths = documents, sorted(set(lengths)), sorted(set(depths))
        self.trials, self.seed = trials, seed

    def items(self, model: EvaluatedModel) -> Sequence[Item]:
        """Returns length, depth, city and number of each needle, and the text around it."""
        most, longest = model.network.max_sequence_length, self.lengths[-1]
        if most is not None and longest + ROOM > most:
            raise ConfigError(
                f"NeedleInHaystack.lengths: {longest} tokens and {ROOM} of an answer are more than the network sees ({most})."
            )
        text = self._text(model)
        return [
            Item(
                f"{cell.length}/{cell.depth:g}/{number}",
                _prompt(model, text, cell),
                f"{cell.length}_tokens",
            )
            for number, cell in enumerate(self._cells())
        ]

    def _cells(self) -> Iterator[Cell]:
        for length in self.lengths:
            for depth in self.depths:
                for trial in range(self.trials):
                    rng = random.Random(f"{self.seed}/{length}/{depth}/{trial}")
                    yield Cell(length, depth, rng.choice(CITIES), str(rng.randrange(10_000, 100_000)))

    def _text(self, model: EvaluatedModel) -> str:
        """Returns as much text as the longest haystack takes."""
        text = ""
        for item in documents(self.documents, MOST_DOCUMENTS, None, "NeedleInHaystack"):
            text += ("\n\n" if text else "") + item.content
            if len(text) > 32 * self.lengths[-1]:
                break
        if (found := len(model.encode([text])[0])) < self.lengths[-1]:
            raise ConfigError(
                f"NeedleInHaystack: the text has {found:,} tokens, a haystack of {self.lengths[-1]:,} needs more."
            )
        return text

    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
        """Returns whether each number was found, and the loss of its tokens."""
        prompts = [
            [*model.beginning, *ids] for ids in model.encode([item.content["prompt"] for item in items])
        ]
        answers = model.generate(prompts, max_new_tokens=ROOM)
        numbers = model.encode([f" {item.content['number']}" for item in items])
        rows = [Row([*ids, *number], len(ids)) for ids, number in zip(prompts, numbers, strict=True)]
        found = []
        given = zip(items, answers, model.log_probabilities(rows), strict=True)
        for item, (answer,), values in given:
            right = float(answer.text.lstrip().startswith(item.content["number"]))
            depth = f"{100 * item.content['depth']:g}"
            sums = {
                "needles": 1.0,
                "found": right,
                "nats": -float(values.sum()),
                "tokens": float(len(values)),
                f"needles_at_{depth}": 1.0,
                f"found_at_{depth}": right,
            }
            shown = {"answer": answer.text, "number": item.content["number"]}
            found.append(Measured(sums, shown))
        return found

    @staticmethod
    def figures(sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the figures; none without needles."""
        if not (count := sums.get("needles")):
            return {}
        found = {"recall": sums.get("found", 0.0) / count}
        if tokens := sums.get("tokens"):
            found["needle_loss_nats_per_token"] = sums.get("nats", 0.0) / tokens
        depths = [name.removeprefix("needles_at_") for name in sums if name.startswith("needles_at_")]
        for depth in sorted(depths, key=float):
            if own := sums[f"needles_at_{depth}"]:
                found[f"recall_at_{depth}"] = sums.get(f"found_at_{depth}", 0.0) / own
        return found

    def draw(self, items: Sequence[Item], measured: Sequence[Measured]) -> Figure:
        """Draws recall by length and depth."""
        shares = [
            [
                _mean(
                    one.sums["found"]
                    for item, one in zip(items, measured, strict=True)
                    if (item.content["length"], item.content["depth"]) == (length, depth)
                )
                for length in self.lengths
            ]
            for depth in self.depths
        ]
        figure = pictures.new_figure(1.6 + 0.9 * len(self.lengths), 1.4 + 0.5 * len(self.depths))
        axes = figure.subplots()
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for row, values in enumerate(shares):
            for column, value in enumerate(values):
                axes.text(
                    column,
                    row,
                    f"{value:.0%}",
                    ha="center",
                    va="center",
                    color="white" if value > 0.6 else "black",
                )
        axes.set_xticks(range(len(self.lengths)), [f"{length:,}" for length in self.lengths])
        axes.set_yticks(range(len(self.depths)), [f"{depth:.0%}" for depth in self.depths])
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel("depth of the needle")
        figure.colorbar(image, ax=axes, label="recall", format="{x:.0%}")
        return figure


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _prompt(model: EvaluatedModel, text: str, cell: Cell) -> dict[str, str | int | float]:
    """Returns the content of an item: a prompt of as many tokens as fit into the length, or a few fewer."""
    needle = NEEDLE.format(city=cell.city, number=cell.number)
    question = QUESTION.format(city=cell.city)
    room = cell.length - len(model.beginning)
    offsets = model.tokenizer.encode(text[: 32 * cell.length], add_special_tokens=False).offsets
    take = min(room, len(offsets))
    while take > 0:
        prompt = _hidden(text[: offsets[take - 1][1]], needle, cell.depth) + question
        excess = len(model.encode([prompt])[0]) - room
        if excess <= 0:
            return {"length": cell.length, "depth": cell.depth, "number": cell.number, "prompt": prompt}
        take -= excess
    raise ConfigError(
        f"NeedleInHaystack.lengths: {cell.length} tokens leave no room beside needle and question; take longer ones."
    )


def _hidden(haystack: str, needle: str, depth: float) -> str:
    """Returns the haystack with the needle between two of its sentences."""
    ends = [0, *(found.end() for found in _ENDS.finditer(haystack)), len(haystack)]
    at = min(ends, key=lambda end: abs(end - depth * len(haystack)))
    before = haystack[:at] if not haystack[:at] or haystack[at - 1].isspace() else f"{haystack[:at]} "
    return f"{before}{needle} {haystack[at:]}" if at < len(haystack) else f"{before}{needle}"
