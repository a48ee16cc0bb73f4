"""A sample of the web in archives: pages with menus, footers and advertisements around text that is installed here.

The text is Python's help, the docstrings of installed packages and the messages of their translations. The same packages give
the same bytes.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import html
import random
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

DATE = "2026-11-24T00:00:00Z"
SPAM = [
    "cheap",
    "pills",
    "buy",
    "now",
    "best",
    "price",
    "casino",
    "bonus",
    "free",
    "spins",
    "click",
    "here",
    "limited",
    "offer",
    "win",
    "cash",
]
_PLAIN = re.compile(r"[A-Z][^\n]*[a-z)][.!?]$")


class Paragraphs(NamedTuple):
    """What pages are made of.

    Attributes:
        prose: Sentences of English.
        rough: Lists, tables, code, what is no sentence.
        foreign: Sentences in other languages, by the language.
    """

    prose: list[str]
    rough: list[str]
    foreign: dict[str, list[str]]


@cache
def paragraphs(megabytes: float) -> Paragraphs:
    """Returns paragraphs of at least so much text, if there is so much."""
    found: dict[bool, dict[str, None]] = {True: {}, False: {}}
    size = 0
    for text in _texts():
        for block in re.split(r"\n\s*\n", text):
            lines = [line.strip() for line in block.strip().splitlines()]
            joined = " ".join(lines)
            plain = len(joined) > 120 and _PLAIN.match(joined) is not None and _sentences(joined)
            one = joined if plain else "\n".join(lines)
            if 20 < len(one) < 4000 and one not in found[plain]:
                found[plain][one] = None
                size += len(one) if plain else 0
        if size > megabytes * 1e6:
            break
    return Paragraphs([*found[True]], [*found[False]], _translations())


def _sentences(text: str) -> bool:
    """Returns whether nine of ten words have letters alone."""
    words = text.split()
    return 10 * sum(word.strip(".,;:()'\"").isalpha() for word in words) >= 9 * len(words)


def _texts() -> Iterator[str]:
    yield from (topics[name] for name in sorted(topics))
    packages = Path(sysconfig.get_path("purelib"))
    paths = [*sorted(packages.rglob("*.py")), *sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    random.Random(0).shuffle(paths)
    for path in paths:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def _translations() -> dict[str, list[str]]:
    """Returns the translated messages of packages, by language."""
    found: dict[str, dict[str, None]] = {}
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("LC_MESSAGES/*.po")):
        for message in re.findall(r'msgstr ((?:"[^\n]*"\s*)+)', path.read_text("utf-8", errors="ignore")):
            text = "".join(re.findall(r'"([^\n]*)"', message))
            if len(text) > 25 and "\\" not in text:
                found.setdefault(path.parents[1].name, {})[text] = None
    return {name: [*texts] for name, texts in sorted(found.items()) if len(texts) > 40}


def write_web_sample(
    folder: Path, megabytes: float, files: int = 8, seed: int = 0, broken: bool = True
) -> int:
    """Writes archives NUMBER.warc.gz of so many megabytes of records in all; returns the number of records.

    Of the pages, 8% are exact and 10% near duplicates of earlier ones, 8% spam, 8% short, 8% of other languages; 4% have
    addresses and numbers of people; 12% of the records are no pages, and one in each archive is broken (`broken`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, draw = paragraphs(min(megabytes / 20, 1.5)), random.Random(seed)
    size = number = 0
    earlier: list[str] = []
    streams = [(folder / f"{file:03}.warc.gz").open("wb") for file in range(files)]
    while size < megabytes * 1e6:
        record = _record(source, earlier, draw, number)
        member = gzip.compress(record, 6, mtime=0)
        if broken and files <= number < 2 * files:
            member = member[: len(member) // 2]
        streams[number % files].write(member)
        size, number = size + len(record), number + 1
    for stream in streams:
        stream.close()
    return number


def _record(source: Paragraphs, earlier: list[str], draw: random.Random, number: int) -> bytes:
    kind, url = draw.random(), f"https://site-{draw.randrange(2000)}.example/{number}.html"
    if kind < 0.04:
        return _response(url, b"", "301 Moved Permanently")
    if kind < 0.08:
        return _response(url, draw.randbytes(draw.randint(500, 5000)), kind="image/png")
    if kind < 0.12:
        return _archived("request", f"GET /{number}.html HTTP/1.1\r\n\r\n".encode(), url, "request")
    return _response(url, _page(_body(source, earlier, draw), draw, number).encode())


def _body(source: Paragraphs, earlier: list[str], draw: random.Random) -> str:
    """Returns the text of a page."""
    kind = draw.random()
    if earlier and kind < 0.18:
        text = draw.choice(earlier)
        if kind < 0.08:
            return text
        words = text.split(" ")
        for at in draw.sample(range(len(words)), max(1, len(words) // 120)):
            words[at] = draw.choice(SPAM)
        return " ".join(words)
    if kind < 0.26:
        return "\n".join(
            " ".join(draw.choices(SPAM, k=draw.randint(5, 40))) for _ in range(draw.randint(3, 30))
        )
    if kind < 0.34:
        return " ".join(draw.choice(source.prose).split()[: draw.randint(2, 25)])
    if kind < 0.42 and source.foreign:
        return "\n".join(draw.choices(source.foreign[draw.choice([*source.foreign])], k=draw.randint(8, 30)))
    parts = draw.choices(source.prose, k=min(60, int(draw.lognormvariate(2.2, 0.8)) + 2))
    if kind > 0.75:
        parts += draw.choices(source.rough, k=draw.randint(1, 8))
        draw.shuffle(parts)
    if kind < 0.46:
        parts.insert(
            1,
            f"Write to anna.{draw.randrange(10**6)}@mail-{draw.randrange(99)}.org or call +49 30 {draw.randrange(10**7, 10**8)}.",
        )
    text = "\n".join(parts)
    if len(earlier) < 5000:
        earlier.append(text)
    return text


def _page(text: str, draw: random.Random, number: int) -> str:
    """Returns a page around a text."""
    menu = "".join(
        f'<li class="menu-item"><a href="/{one}">{one.title()}</a></li>' for one in draw.sample(SPAM, 10)
    )
    style = "".join(f".c{one}{{margin:{one}px;color:#{draw.randrange(1 << 24):06x}}}\n" for one in range(20))
    body = "".join(f"<p>{html.escape(part)}</p>\n" for part in text.split("\n"))
    advertisement = f'<div class="ad banner"><a href="/ad?{draw.randrange(999)}">Buy one, get one free today only!</a></div>'
    related = "".join(
        f'<li><a href="/{draw.randrange(10**6)}.html">Read more number {one}</a></li>' for one in range(8)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Page {number}</title><style>{style}</style>'
        f"<script>var page={number};function track(a){{return a+page}}</script></head><body>"
        f'<header><nav><ul class="menu">{menu}</ul></nav></header>{advertisement}'
        f"<main><article><h1>Page {number}</h1>\n{body}</article></main>"
        f'<aside class="sidebar"><h3>Related</h3><ul>{related}</ul></aside>'
        '<footer class="footer"><p>All rights reserved. Terms of use. Privacy policy. We use cookies.</p></footer>'
        "</body></html>"
    )


def _response(url: str, body: bytes, status: str = "200 OK", kind: str = "text/html; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return _archived("response", head.encode() + body, url, "response")


def _archived(kind: str, content: bytes, url: str, message: str) -> bytes:
    digest = base64.b32encode(hashlib.sha1(content).digest()).decode()
    name = hashlib.sha1(url.encode()).hexdigest()
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{name[:8]}-{name[8:12]}-{name[12:16]}-{name[16:20]}-{name[20:32]}>\r\n"
        f"WARC-Date: {DATE}\r\nWARC-Target-URI: {url}\r\nWARC-Block-Digest: sha1:{digest}\r\n"
        f"Content-Type: application/http; msgtype={message}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"
