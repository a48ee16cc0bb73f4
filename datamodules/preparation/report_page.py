"""The report of a prepared folder as one HTML page, which needs no network, no script and no other file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from datamodules.preparation.diversity import MEASURED_WORDS
from datamodules.preparation.flow import SHOWN
from toolkit.prepared import splits_of
from toolkit.sizes import readable

_MOST_SOURCES, _MOST_LANGUAGES, _MOST_OPTION = 30, 20, 120
_JOINERS = "\n\t\u200c\u200d"  # not printable for Python, and parts of texts
_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c2126;--faint:#5b6570;--line:#dde2e7;--soft:#f4f6f8;--one:#2a6fb0;
--two:#d98a1f;--lost:#b3383a}
@media(prefers-color-scheme:dark){:root{--back:#14181c;--text:#e4e8ec;--faint:#9aa5b0;--line:#323a42;--soft:#1d2329;
--one:#5a9fe0;--two:#e5a849;--lost:#ee7f7c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:60rem;background:var(--back);color:var(--text);
font:1rem/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.5rem 0 1rem}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:1rem 0 .2rem}
p{margin:.3rem 0}.faint,small,dt{color:var(--faint)}.lost{color:var(--lost)}small{font-size:.85rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.5rem;margin:0}
dl div{background:var(--soft);border-radius:.4rem;padding:.5rem .7rem}dt{font-size:.8rem}dd{margin:0;font-size:1.15rem}
ol,ul{list-style:none;margin:0;padding:0}
.flow>li{border-left:3px solid var(--line);padding:.1rem 0 .6rem .8rem}.flow>.drop{padding-bottom:.8rem}
.row{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 1rem}.row span{font-variant-numeric:tabular-nums}
svg{display:block;width:100%;height:.5rem;margin:.1rem 0}.back{fill:var(--soft)}
.one{fill:var(--one)}.two{fill:var(--two)}.key{display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin:0 .3em 0 .8em}
.key.one{background:var(--one)}.key.two{background:var(--two)}
details{border:1px solid var(--line);border-radius:.4rem;margin:.4rem 0;padding:0 .7rem}summary{cursor:pointer;padding:.5rem 0}
blockquote{margin:.5rem 0;padding:.5rem .7rem;background:var(--soft);border-radius:.4rem;font-size:.9rem}
blockquote p{white-space:pre-wrap;unicode-bidi:plaintext;max-height:14rem;overflow:auto}
""".strip().replace("\n", "")
_CLUSTER = re.compile(r"(documents in )?clusters of (\d[\d,]*(?: to [\d,]+)?)")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def as_page(manifest: Mapping[str, Any]) -> str:
    """Returns the page; the same manifest gives the same bytes.

    Texts, ids, sources and reasons come from documents that anybody may have written: each is escaped, and characters
    that are not printable, such as those that turn the direction of writing, are replaced.

    Args:
        manifest: Content of a manifest; those of earlier versions give a page without what these did not count.
    """
    sections = [
        _summary(manifest),
        _funnel(manifest),
        _lengths(manifest),
        _sources(manifest),
        _languages(manifest),
        _diversity(manifest),
        _clusters(manifest),
        _changes(manifest),
        _samples(manifest),
    ]
    title = _safe(manifest.get("source", "Prepared text"))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def _summary(manifest: Mapping[str, Any]) -> str:
    splits = splits_of(manifest)
    documents, tokens = (
        sum(manifest[f"{split}_{what}"] for split in splits) for what in ("documents", "tokens")
    )
    found = [
        ("documents", f"{documents:,}"),
        ("tokens", f"{tokens:,}"),
        ("text", readable(manifest["text_bytes"])),
        ("bytes per token", f"{manifest['text_bytes'] / max(tokens, 1):.3f}"),
        ("vocabulary", f"{manifest['vocab_size']:,}"),
        ("nats per token, by frequencies", f"{manifest['unigram_loss']:.3f}"),
    ]
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in found) + "</dl>"


# Funnel -------------------------------------------------------------------------------------------------


def _funnel(manifest: Mapping[str, Any]) -> str:
    """Documents and bytes from the source to the splits, with what was left out between them."""
    transforms, passed = _transforms(manifest), _passed(manifest)
    rejected, skipped, blank = manifest["rejected"], manifest.get("skipped", {}), manifest["blank"]
    most = [
        passed[0][0] + sum(rejected.values()) + sum(skipped.values()) + blank,
        max(size or 0 for _, size in passed),
    ]
    source = f"files of {readable(manifest['source_bytes'])}" if manifest.get("source_bytes") else ""
    lines = [_place("Read", most[0], None, most, note=source)]
    lost = [(f"skipped: {reason}", count) for reason, count in skipped.items()]
    lost += [(f"rejected: {reason}", count) for reason, count in rejected.items()]
    lines += [_losses([*lost, ("blank", blank)] if blank else lost, most[0])]
    if lost_bytes := manifest.get("lost_bytes"):
        lines.append(f'<li class="drop lost">{readable(lost_bytes)} of the files could not be read</li>')
    lines.append(_place("Documents with text", *passed[0], most))
    for number, (label, transform) in enumerate(transforms):
        before, (documents, size) = passed[number][1], passed[number + 1]
        lines.append(_losses(transform["dropped"].items(), passed[number][0]))
        note = _options(transform)
        if before and size is not None and size != before:
            note = f"{(size - before) / before:+.2%} of the bytes" + (f"; {note}" if note else "")
        lines.append(_place(f"After {label}", documents, size, most, note=note))
    parts = ", parts of documents" if "validation_tails_from_bytes" in manifest else ""
    for split in splits_of(manifest):
        counts = manifest[f"{split}_documents"], manifest.get(f"{split}_bytes")
        lines.append(
            _place(f"Split {split}", *counts, most, note=f"{manifest[f'{split}_tokens']:,} tokens{parts}")
        )
    keys = '<span class="key one"></span>documents'
    keys += '<span class="key two"></span>bytes of text' if most[1] else ""
    left = "".join(
        f'<p class="faint">{count:,} files were not read: {_safe(reason)}</p>'
        for reason, count in manifest.get("left_out", {}).items()
    )
    return f'<h2>From source to splits</h2>\n<p class="faint">{keys}</p>{left}\n<ol class="flow">{"".join(lines)}</ol>'


def _place(name: str, documents: int, size: int | None, most: Sequence[int], note: str = "") -> str:
    """Returns a place of the funnel: its figures, and a bar for documents and one for bytes."""
    figures = f"{documents:,} documents" + ("" if size is None else f", {readable(size)}")
    figures += f" ({documents / most[0]:.1%})" if most[0] else ""
    bars = _bar(documents, most[0], "one") + ("" if size is None else _bar(size, most[1], "two"))
    more = f"<small>{_safe(note)}</small>" if note else ""
    return f'<li><div class="row"><b>{_safe(name)}</b><span>{figures}</span></div>{bars}{more}</li>'


def _losses(lost: Iterable[tuple[str, int]], entered: int) -> str:
    lines = [
        f'<div class="row"><span class="lost">&minus; {_safe(reason)}</span>'
        f"<span>{count:,} ({count / max(entered, 1):.2%})</span></div>"
        for reason, count in sorted(lost, key=lambda one: (-one[1], one[0]))
    ]
    return f'<li class="drop">{"".join(lines)}</li>' if lines else ""


def _passed(manifest: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    """Returns documents and bytes as read and after each transform; of earlier versions the documents alone."""
    if "flow" in manifest:
        return [(place["documents"], place["bytes"]) for place in manifest["flow"]]
    found = [sum(manifest[f"{split}_documents"] for split in splits_of(manifest))]
    for _, transform in reversed(_transforms(manifest)):
        found.append(found[-1] + sum(transform["dropped"].values()))
    return [(documents, None) for documents in reversed(found)]


def _transforms(manifest: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the transforms with their numbers and names; manifests of earlier versions have the former name."""
    transforms = manifest["transforms"] if "transforms" in manifest else manifest.get("stages", [])
    return [(f"{number}. {one['name']}", one) for number, one in enumerate(transforms, 1)]


def _options(transform: Mapping[str, Any]) -> str:
    """Returns the options of a transform in one line, each of them short."""
    ours = ("name", "class", "version", "dropped", "examples", "counted")
    texts = []
    for name, value in transform.items():
        if name not in ours:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            texts.append(f"{name}: {text[:_MOST_OPTION]}{'…' if len(text) > _MOST_OPTION else ''}")
    return ", ".join(texts)


# Other sections -----------------------------------------------------------------------------------------


def _lengths(manifest: Mapping[str, Any]) -> str:
    lengths = {int(key): count for key, count in manifest["lengths"].items()}
    if not lengths:
        return ""
    places = range(min(lengths), max(lengths) + 1)
    rows = [(f"{2**key:,} to {2 ** (key + 1) - 1:,}", (lengths.get(key, 0),)) for key in places]
    return f"<h2>Documents by length in tokens</h2>\n{_bars(rows)}"


def _sources(manifest: Mapping[str, Any]) -> str:
    """Tokens of the largest sources, and of all others together; and by language and license, where documents say these."""
    by_name = {"source": {name: counts["tokens"] for name, counts in manifest["sources"].items()}}
    for name in ("language", "license"):
        if found := manifest.get(f"{name}_tokens"):
            by_name[name] = found
    return "\n".join(f"<h2>Tokens by {name}</h2>\n{_shares(tokens)}" for name, tokens in by_name.items())


def _shares(tokens: Mapping[str, int]) -> str:
    """Returns the names with the most tokens, with their shares, and all others together."""
    total = max(sum(tokens.values()), 1)
    largest = sorted(tokens.items(), key=lambda one: (-one[1], one[0]))
    if len(largest) > _MOST_SOURCES:
        rest = largest[_MOST_SOURCES:]
        largest[_MOST_SOURCES:] = [(f"{len(rest):,} more", sum(count for _, count in rest))]
    return _bars([(f"{name} ({count / total:.1%})", (count,)) for name, count in largest])


def _languages(manifest: Mapping[str, Any]) -> str:
    """Documents by language, kept and dropped, as each LanguageFilter counted them."""
    sections = []
    for label, transform in _transforms(manifest):
        if transform["name"] != "LanguageFilter":
            continue
        counts: dict[str, list[int]] = {}
        for text, number in transform.get("counted", {}).items():
            if found := re.fullmatch(r"language (\S+) kept", text):
                counts.setdefault(found[1], [0, 0])[0] += number
        for text, number in transform["dropped"].items():
            counts.setdefault(text.removeprefix("language "), [0, 0])[1] += number
        largest = sorted(counts.items(), key=lambda one: (-sum(one[1]), one[0]))
        if len(largest) > _MOST_LANGUAGES:
            rest = largest[_MOST_LANGUAGES:]
            both = [sum(pair[side] for _, pair in rest) for side in (0, 1)]
            largest[_MOST_LANGUAGES:] = [(f"{len(rest):,} more", both)]
        rows = [(name, tuple(pair)) for name, pair in largest]
        keys = '<p class="faint"><span class="key one"></span>kept<span class="key two"></span>dropped</p>'
        sections.append(f"<h2>Documents by language ({_safe(label)})</h2>\n{keys}{_bars(rows)}")
    return "\n".join(sections)


def _diversity(manifest: Mapping[str, Any]) -> str:
    """How diverse the training text is, of all sources and of each; the bar is the share of different 3-grams."""
    found = manifest.get("diversity")
    if not found:
        return ""
    lines = []
    for name, of in [("all", found["all"]), *found["sources"].items()]:
        figures = f"{of['distinct_3']:.1%} / {of['type_token']:.1%} / {of['compression']:.2f}"
        bar = _bar(round(1000 * of["distinct_3"]), 1000, "one")
        lines.append(f'<li><div class="row"><span>{_safe(name)}</span><span>{figures}</span></div>{bar}</li>')
    note = (
        f"Of {MEASURED_WORDS:,} words of each source, from training documents chosen by a hash: different n-grams of three "
        "words / different words / compression ratio. A lower ratio, and higher shares, are more diverse."
    )
    return f'<h2>Diversity of training text</h2>\n<p class="faint">{note}</p>\n<ul>{"".join(lines)}</ul>'


def _clusters(manifest: Mapping[str, Any]) -> str:
    """Clusters of duplicates by their size, and the documents in them, as each transform counted them."""
    sections = []
    for label, transform in _transforms(manifest):
        counted = transform.get("counted", {})
        found = [match for what in in_order(counted) if (match := _CLUSTER.fullmatch(what))]
        sizes = [match[2] for match in found if not match[1]]
        if sizes:
            rows = [
                (size, (counted[f"clusters of {size}"], counted.get(f"documents in clusters of {size}", 0)))
                for size in sizes
            ]
            keys = '<p class="faint"><span class="key one"></span>clusters<span class="key two"></span>documents in them</p>'
            sections.append(
                f"<h2>Duplicates by documents in a cluster ({_safe(label)})</h2>\n{keys}{_bars(rows)}"
            )
    return "\n".join(sections)


def in_order(counts: Mapping[str, int]) -> list[str]:
    """Returns what was counted, in the order of the words and numbers in it."""
    return sorted(counts, key=lambda what: re.sub(r"\d[\d,]*", lambda number: number[0].rjust(20), what))


def _changes(manifest: Mapping[str, Any]) -> str:
    """What transforms counted beside the documents that they dropped, such as placeholders."""
    sections = []
    for label, transform in _transforms(manifest):
        counted = transform.get("counted", {})
        counted = {what: n for what, n in counted.items() if not _CLUSTER.fullmatch(what)}
        if counted and transform["name"] != "LanguageFilter":
            rows = sorted(counted.items(), key=lambda one: (-one[1], one[0]))
            sections.append(f"<h3>{_safe(label)}</h3>{_bars([(what, (count,)) for what, count in rows])}")
    return "<h2>What was cut or replaced</h2>\n" + "\n".join(sections) if sections else ""


def _samples(manifest: Mapping[str, Any]) -> str:
    """Documents as read, and those that each transform kept and dropped, folded up."""
    flow, found = manifest.get("flow", []), []
    if flow:
        found.append(_documents("As read", flow[0]["samples"]))
    for number, (label, transform) in enumerate(_transforms(manifest), 1):
        if flow:
            found.append(_documents(f"Kept by {label}", flow[number]["samples"]))
        for reason, samples in transform.get("examples", {}).items():
            found.append(_documents(f"Dropped by {label}: {reason}", samples))
    note = '<p class="faint">Chosen by a hash, not by what they say. Each shows how a document begins.</p>'
    return f"<h2>Samples</h2>\n{note}{''.join(found)}" if any(found) else ""


def _documents(title: str, samples: Sequence[Sequence[str]]) -> str:
    quotes = [
        f'<blockquote><small>{_safe(name)}</small><p dir="auto">{_safe(text.replace(chr(13), ""))}{"…" if len(text) >= SHOWN else ""}</p>'
        "</blockquote>"
        for _, name, text in samples
    ]
    return f"<details><summary>{_safe(title)}</summary>{''.join(quotes)}</details>" if quotes else ""


# Parts of the page --------------------------------------------------------------------------------------


def _bars(rows: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Returns a list of names with a bar for each of their numbers, the longest as wide as the page."""
    most = max((number for _, numbers in rows for number in numbers), default=0)
    lines = []
    for name, numbers in rows:
        bars = "".join(
            _bar(number, most, kind) for number, kind in zip(numbers, ("one", "two"), strict=False)
        )
        figures = " / ".join(f"{number:,}" for number in numbers)
        lines.append(
            f'<li><div class="row"><span>{_safe(name)}</span><span>{figures}</span></div>{bars}</li>'
        )
    return f"<ul>{''.join(lines)}</ul>"


def _bar(number: int, most: int, kind: str) -> str:
    """Returns a picture of a share; what is more than nothing is seen."""
    width = max(1000 * number / most, 2) if number and most else 0
    return (
        '<svg viewBox="0 0 1000 8" preserveAspectRatio="none" aria-hidden="true"><rect class="back" width="1000" height="8"/>'
        f'<rect class="{kind}" width="{width:.1f}" height="8"/></svg>'
    )


def _safe(text: str) -> str:
    """Returns a text for the page: escaped, and without what is not printable."""
    shown = "".join(c if c.isprintable() or c in _JOINERS else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return escape(shown)
