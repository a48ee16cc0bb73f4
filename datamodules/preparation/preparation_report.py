"""Writes the report of a prepared folder: report.md, report.html, report.json and a histogram of document lengths."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core import durable
from datamodules.preparation.diversity import MEASURED_WORDS
from datamodules.preparation.report_page import as_page, in_order
from toolkit import pictures
from toolkit.prepared import read_manifest, splits_of

FILES = ("report.md", "report.html", "report.json", "lengths.png")
_MOST_SOURCES = 100
_BY_VALUE = ("language_tokens", "license_tokens")
_IF_COUNTED = (
    *_BY_VALUE,
    "left_out",
    "skipped",
    "validation_tails_from_bytes",
    "flow",
    "source_bytes",
    "lost_bytes",
    "diversity",
)


def write_report(folder: Path, manifest: Mapping[str, Any] | None = None) -> None:
    """Writes the report from the manifest, but what is there; the same manifest gives the same bytes.

    Args:
        folder: The prepared folder.
        manifest: Content of a manifest that is not written yet, for a new report; None: read it, if a file is missing.
    """
    missing = [name for name in FILES if manifest is not None or not (folder / name).exists()]
    if missing and manifest is None:
        manifest = read_manifest(folder)
    for name in missing:
        durable.write(folder / name, _CONTENT[name](manifest))


def figures(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of the report."""
    names = [f"{split}_{what}" for split in splits_of(manifest) for what in ("documents", "tokens")]
    names += ["text_bytes", "vocab_size", "unigram_loss", "sources", "lengths", "rejected", "blank"]
    # Manifests of earlier versions have the former name.
    transforms = manifest["transforms"] if "transforms" in manifest else manifest["stages"]
    labels = [f"{number}. {transform['name']}" for number, transform in enumerate(transforms, 1)]
    dropped = {label: transform["dropped"] for label, transform in zip(labels, transforms, strict=True)}
    counted = {
        label: part["counted"] for label, part in zip(labels, transforms, strict=True) if "counted" in part
    }
    examples = {
        label: transform.get("examples", {}) for label, transform in zip(labels, transforms, strict=True)
    }
    tokens = sum(manifest[f"{split}_tokens"] for split in splits_of(manifest))
    sizes = [f"{split}_bytes" for split in splits_of(manifest)]
    names += [name for name in (*_IF_COUNTED, *sizes) if name in manifest]
    return {name: manifest[name] for name in names} | {
        "dropped": dropped,
        "dropped_examples": examples,
        "counted": counted,
        "bytes_per_token": manifest["text_bytes"] / tokens,
    }


def as_markdown(manifest: Mapping[str, Any]) -> str:
    """Returns the report as Markdown."""
    values = figures(manifest)
    lines = [f"# {manifest['source']}", "", "| split | documents | tokens |", "| --- | ---: | ---: |"]
    for split in splits_of(values):
        lines.append(f"| {split} | {values[f'{split}_documents']:,} | {values[f'{split}_tokens']:,} |")
    lines += [
        "",
        f"{values['text_bytes']:,} bytes of text, {values['bytes_per_token']:.3f} bytes per token, vocabulary of "
        f"{values['vocab_size']:,}; {values['unigram_loss']:.3f} nats per token under token frequencies alone.",
        "",
        "| source | documents | tokens | share of tokens | bytes per token |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    total = sum(values[f"{split}_tokens"] for split in splits_of(values))
    largest = sorted(values["sources"].items(), key=lambda item: -item[1]["tokens"])
    for name, n in largest[:_MOST_SOURCES]:
        cells = f"{n['documents']:,} | {n['tokens']:,} | {n['tokens'] / total:.2%} | {n['bytes'] / n['tokens']:.3f}"
        lines.append(f"| {name} | {cells} |")
    if len(largest) > _MOST_SOURCES:
        lines.append(f"| {len(largest) - _MOST_SOURCES:,} more, see report.json | | | | |")
    for name in _BY_VALUE:
        lines += _by_value(name.partition("_")[0], values[name]) if name in values else []
    lines += _diversity(values["diversity"]) if "diversity" in values else []
    lines += ["", "| left out | reason | documents |", "| --- | --- | ---: |"]
    left_out = [("blank", "", values["blank"])] if values["blank"] else []
    left_out += [("skipped", reason, n) for reason, n in values.get("skipped", {}).items()]
    left_out += [("rejected", reason, n) for reason, n in values["rejected"].items()]
    left_out += [(name, reason, n) for name, of in values["dropped"].items() for reason, n in of.items()]
    left_out += [("not read", reason, n) for reason, n in values.get("left_out", {}).items()]
    lines += [f"| {who} | {reason} | {n:,} |" for who, reason, n in left_out or [("nothing", "", 0)]]
    if values["counted"]:
        lines += ["", "| transform | counted | number |", "| --- | --- | ---: |"]
        lines += [
            f"| {who} | {what} | {of[what]:,} |"
            for who, of in values["counted"].items()
            for what in in_order(of)
        ]
    lines += ["", "![Documents by length in tokens](lengths.png)", ""]
    for who, reasons in values["dropped_examples"].items():
        for reason, examples in reasons.items():
            lines += [f"## Dropped by {who}: {reason}", ""]
            lines += [f"- {code(name)}: {code(' '.join(text.split()))}" for _, name, text in examples]
            lines.append("")
    return "\n".join(lines)


def _by_value(name: str, tokens: Mapping[str, int]) -> list[str]:
    """Returns a table of the tokens by the values of a column of metadata, the most frequent ones first."""
    largest = sorted(tokens.items(), key=lambda one: (-one[1], one[0]))
    lines = ["", f"| {name} | tokens | share of tokens |", "| --- | ---: | ---: |"]
    total = max(sum(tokens.values()), 1)
    for value, n in largest[:_MOST_SOURCES]:
        lines.append(f"| {code(value.replace('|', ' '))} | {n:,} | {n / total:.2%} |")
    if len(largest) > _MOST_SOURCES:
        lines.append(f"| {len(largest) - _MOST_SOURCES:,} more, see report.json | | |")
    return lines


def _diversity(found: Mapping[str, Any]) -> list[str]:
    """Returns a table of how diverse the training text is, of all sources and of each."""
    lines = [
        "",
        f"Diversity of {MEASURED_WORDS:,} words of training text of each source, of documents chosen by a hash:",
        "",
    ]
    lines += [
        "| source | different 3-grams | different words | compression ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, of in [
        ("**all**", found["all"]),
        *((code(name.replace("|", " ")), of) for name, of in found["sources"].items()),
    ]:
        lines.append(
            f"| {name} | {of['distinct_3']:.1%} | {of['type_token']:.1%} | {of['compression']:.2f} |"
        )
    return lines


def code(text: str) -> str:
    """Returns a text as code in Markdown, whatever it holds."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence} {''.join(c if c.isprintable() else '�' for c in text)} {fence}"


def _picture(lengths: Mapping[str, int]) -> bytes:
    exponents = range(min(map(int, lengths)), max(map(int, lengths)) + 1)
    figure = pictures.new_figure(7, 3.5)
    axes = figure.add_subplot()
    axes.bar(range(len(exponents)), [lengths.get(str(key), 0) for key in exponents], width=0.9)
    axes.set_xticks(range(len(exponents)), [f"{2**key:,}" for key in exponents], rotation=45)
    axes.set(xlabel="tokens in a document, from this number on", ylabel="documents")
    return pictures.as_png(figure)


_CONTENT: dict[str, Callable[[Any], str | bytes]] = {
    "report.md": as_markdown,
    "report.html": as_page,
    "report.json": lambda manifest: json.dumps(figures(manifest), indent=2) + "\n",
    "lengths.png": lambda manifest: _picture(manifest["lengths"]),
}
