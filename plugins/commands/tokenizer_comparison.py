"""What `compare-tokenizers` measures, and how it shows it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from core.contracts import DocumentSource, Tokenizer
from toolkit import pictures
from toolkit.sizes import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EVERY = 10  # one document of so many is measured
_MOST_BYTES = 32 << 20  # that are measured of a source
_BATCH = 64  # documents that are encoded together
Rows = list[tuple[str, ...]]


@dataclass
class Sample:
    """The documents of a source that are measured, and the others, from which tokenizers learn."""

    source: DocumentSource
    texts: list[str]

    @classmethod
    def of(cls, source: DocumentSource) -> Sample:
        """Takes every tenth document, up to 32 MiB; the only one where there is one.

        Raises:
            ConfigError: If the source cannot be read.
        """
        texts, size = [], 0
        for number, text in enumerate(source.documents()):
            if number % _EVERY == 0 and size < _MOST_BYTES:
                texts.append(text)
                size += len(text.encode())
        return cls(source, texts)

    def training(self) -> Iterator[str]:
        """Yields the documents that are not measured; where there are none, the one that is."""
        others = 0
        for number, text in enumerate(self.source.documents()):
            if number % _EVERY:
                others += 1
                yield text
        if not others:
            yield from self.texts


@dataclass
class Part:
    """What a tokenizer made of the texts of one source."""

    documents: int
    bytes: int
    words: int
    tokens: int
    exact: int


@dataclass
class Measured:
    """A tokenizer's figures.

    Attributes:
        name: As the user called it.
        vocab_size: Number of ids.
        used: How many of them occur.
        seconds: Time of one thread for encoding all texts.
        parts: Source -> its counts.
    """

    name: str
    vocab_size: int
    used: int
    seconds: float
    parts: dict[str, Part]

    def total(self, what: str) -> int:
        """Returns a count over all sources."""
        return sum(getattr(part, what) for part in self.parts.values())

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text for each token."""
        return self.total("bytes") / self.total("tokens")

    @property
    def megabytes_per_second(self) -> float:
        """Text that one thread encodes."""
        return self.total("bytes") / 1e6 / self.seconds

    @property
    def exact_share(self) -> float:
        """Share of the documents that come back exactly."""
        return self.total("exact") / self.total("documents")

    def sequences(self, length: int) -> int:
        """Returns how many sequences of a length the texts fill, each document with its end-of-text token."""
        return -(-(self.total("tokens") + self.total("documents")) // length)


def measure(
    name: str, tokenizer: Tokenizer, documents: Iterable[str], texts: Mapping[str, Sequence[str]]
) -> Measured:
    """Trains or loads a tokenizer and measures it.

    Args:
        name: What it is called.
        tokenizer: Not yet prepared.
        documents: What it may learn from.
        texts: Source -> what it is measured on.

    Raises:
        ConfigError: If it cannot be trained on the documents.
    """
    from tokenizers import Tokenizer as Implementation

    tokenizer.prepare(documents)
    # Encodes as the tokenizer does, on one thread where that is set.
    stored = Implementation.from_str(tokenizer.to_json())
    stored.encode_special_tokens = True
    used = np.zeros(tokenizer.vocab_size, bool)
    seconds, parts = 0.0, {}
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        for source, own in texts.items():
            part = parts[source] = Part(0, 0, 0, 0, 0)
            for first in range(0, len(own), _BATCH):
                batch = own[first : first + _BATCH]
                begin = time.perf_counter()
                encodings = stored.encode_batch_fast(batch, add_special_tokens=False)
                seconds += time.perf_counter() - begin
                for text, encoding in zip(batch, encodings, strict=True):
                    _count(part, text, encoding.ids, stored)
                    used[encoding.ids] = True
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
    return Measured(name, tokenizer.vocab_size, int(used.sum()), seconds, parts)


def _count(part: Part, text: str, ids: Sequence[int], stored: Any) -> None:
    part.documents += 1
    part.bytes += len(text.encode())
    part.words += len(text.split())
    part.tokens += len(ids)
    part.exact += stored.decode(ids, skip_special_tokens=False) == text


def table(measured: Sequence[Measured], length: int) -> Rows:
    """Returns a row for each tokenizer, the header first."""
    sources = list(measured[0].parts)
    fertilities = [f"tokens/word, {source}" if len(sources) > 1 else "tokens/word" for source in sources]
    rows: Rows = [
        ("tokenizer", "ids", "used", "bytes/token", *fertilities, "MB/s", "exact", "sequences", "relative")
    ]
    for one in measured:
        count = one.sequences(length)
        rows.append(
            (
                one.name,
                f"{one.vocab_size:,}",
                f"{one.used / one.vocab_size:.1%}",
                f"{one.bytes_per_token:.3f}",
                *(f"{part.tokens / max(part.words, 1):.3f}" for part in one.parts.values()),
                f"{one.megabytes_per_second:.2f}",
                f"{one.exact_share:.1%}",
                f"{count:,}",
                f"{one.total('tokens') / measured[0].total('tokens'):.1%}",
            )
        )
    return rows


def notes(samples: Mapping[str, Sample], length: int) -> str:
    """Returns what was measured, and how."""
    sizes = (
        f"{name}: {len(sample.texts):,} documents, {readable(sum(len(text.encode()) for text in sample.texts))}"
        for name, sample in samples.items()
    )
    return (
        f"Measured on every tenth document ({'; '.join(sizes)}); trained on the others.\n"
        "used: share of the ids that occur. tokens/word: fertility; words are what white space separates. MB/s: text\n"
        "that one thread encodes. exact: share of the documents whose very text is decoded. sequences: of "
        f"{length:,} tokens,\nwith end-of-text tokens. relative: number of tokens, the first tokenizer's being 100%."
    )


def draw_png(measured: Sequence[Measured], length: int) -> bytes:
    """Returns bars for each figure of the table, a colour for each tokenizer, as a PNG file."""
    figure = pictures.new_figure(11, 2.4 + 0.7 * len(measured))
    panels = figure.subplots(2, 3, sharey=True).flat
    names = [one.name for one in measured]
    _bars(next(panels), names, [one.bytes_per_token for one in measured], "bytes per token", "{:.2f}")
    _fertilities(next(panels), measured)
    _bars(
        next(panels),
        names,
        [one.sequences(length) for one in measured],
        f"sequences of {length:,}",
        "{:,.0f}",
    )
    _bars(next(panels), names, [one.megabytes_per_second for one in measured], "MB/s on one thread", "{:.2f}")
    _bars(next(panels), names, [100 * one.exact_share for one in measured], "exact round trips (%)", "{:.1f}")
    _bars(
        next(panels), names, [100 * one.used / one.vocab_size for one in measured], "ids used (%)", "{:.1f}"
    )
    return pictures.as_png(figure)


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], title: str, shown: str) -> None:
    bars = axes.barh(range(len(names)), values, color=[f"C{index % 10}" for index in range(len(names))])
    axes.bar_label(bars, [shown.format(value) for value in values], padding=3, fontsize=8)
    _style(axes, names, title)


def _fertilities(axes: Axes, measured: Sequence[Measured]) -> None:
    """Draws a bar for each tokenizer and source; sources are lighter the later they come."""
    sources = list(measured[0].parts)
    height = 0.8 / len(sources)
    for index, source in enumerate(sources):
        parts = [one.parts[source] for one in measured]
        places = [row + (index - (len(sources) - 1) / 2) * height for row in range(len(measured))]
        bars = axes.barh(
            places,
            [part.tokens / max(part.words, 1) for part in parts],
            height,
            color=[f"C{row % 10}" for row in range(len(measured))],
            alpha=1 - 0.7 * index / len(sources),
        )
        labels = [f"{part.tokens / max(part.words, 1):.2f}" for part in parts]
        named = [f"{label} {source}" for label in labels] if len(sources) > 1 else labels
        axes.bar_label(bars, named, padding=3, fontsize=8 if len(sources) == 1 else 6)
    _style(axes, [one.name for one in measured], "tokens per word")


def _style(axes: Axes, names: Sequence[str], title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.25)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def as_markdown(rows: Rows, said: str) -> str:
    """Returns the comparison as Markdown, with the picture beside it."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    body = "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
    picture = "![Tokenizers compared](compare-tokenizers.png)"
    return "\n\n".join(["# Comparison of tokenizers", picture, body, said]) + "\n"
