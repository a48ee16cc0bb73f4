"""Proofs for the kind `data`: the same text gives the same tokens, and what is written is read back."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.case import Case, at
from conformance.proof import proof, require
from conformance.workshop import VARIED, WORDS, varied_text, workshop
from conformance.workshop import text as plain_text
from core.contracts import DocumentSource, Engine, Packing, Reader, Tokenizer, TokenWriter, Transform
from plugins.cli.configuration.signatures import Argument, accepts, literals, parameters

POSITIONS: Mapping[type, tuple[str, Any]] = {
    DocumentSource: ("data.init_args.reader", Callable[[str], DocumentSource]),
    Tokenizer: ("data.init_args.tokenizer", Tokenizer),
    TokenWriter: ("data.init_args.writer", TokenWriter),
    Packing: ("data.init_args.packing", Packing),
    Transform: ("data.init_args.transforms", Sequence[Transform]),
    Engine: ("data.init_args.engine", Engine),
}
"""Contract -> where the part stands in a configuration, and its type there."""

UNUSUAL = VARIED[:5]

Variant = tuple[str, Any, Callable[[], Any]]
"""The name of an argument, another value of it, and what builds the part with that."""

NUMBERS = (0, 1, 2, 10, 50, 300, 0.0, 0.1, 0.5, 0.9, 1.0)
"""On the scale of the texts: characters, words and lines; shares of them."""


def build(case: Case, contract: type, init_args: Mapping[str, Any] | None = None) -> Any:
    """Builds the part, a reader on the text of the run; with other arguments if there are any."""
    position, hint = POSITIONS[contract]
    if init_args is not None:
        case = Case(case.entry, init_args, config=case.config)
    made = case.build(position, hint)
    if contract is Transform:
        return next(part for part in made if type(part) is case.target)
    return made(source_of(case)) if contract is DocumentSource else made


def source_of(case: Case) -> str:
    """The text that the case's runs read, or, in place of the kit's, one on which options matter."""
    source = str(at(case.values, "data.init_args.source"))
    return str(varied_text()) if source == str(plain_text()) else source


@proof("data", contract="DocumentSource")
def reads_the_same_each_time(case: Case) -> None:
    """A document source yields the same documents, in the same order, each time and from each instance."""
    source = build(case, DocumentSource)
    first = list(source.documents())
    require(
        first and all(isinstance(text, str) and text for text in first), "it yields no text, or an empty one"
    )
    for what, again in {"second pass": source, "new instance": build(case, DocumentSource)}.items():
        found = list(again.documents())
        apart = next((n for n, (a, b) in enumerate(zip(first, found, strict=False)) if a != b), len(first))
        require(
            found == first,
            f"{what}: {len(found)} documents for {len(first)}, the first other is number {apart}",
        )


@proof("data", contract="DocumentSource")
def its_fingerprint_tells_texts_apart(case: Case) -> None:
    """The fingerprint is JSON, the same for the same text and arguments, and another where the documents are."""
    tells_apart(case, DocumentSource, _result, [*variants(case, DocumentSource), *_other_text(case)])


@proof("data", contract="Tokenizer")
def its_fingerprint_tells_tokens_apart(case: Case) -> None:
    """The fingerprint is JSON, the same for the same arguments, and another where the tokens are."""
    tells_apart(case, Tokenizer, _result, variants(case, Tokenizer))


def tells_apart(case: Case, contract: type, result: Callable[[Any], Any], others: Iterable[Variant]) -> None:
    """Requires that what gives another result has another fingerprint.

    Args:
        case: The part.
        contract: Its contract.
        result: Returns what a part gives.
        others: The part with other arguments, or on another text; those of one argument behind each other.
    """
    part = build(case, contract)
    try:
        told = _told(part)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"it is not JSON: {error}") from None
    require(_told(build(case, contract)) == told, "two instances with the same arguments have different ones")
    usual = result(part)
    seen = ""
    for name, value, build_other in others:
        if name == seen:
            continue
        try:
            other = build_other()
            found = result(other)
        except Exception:  # this argument cannot be that: a ConfigError, or whatever a library raises
            continue
        if found == usual:
            continue
        seen = name  # it matters, and the fingerprint has it: the further values can be spared
        what = "the same fingerprint" if _told(other) == told else ""
        if isinstance(part, Reader) and not what and _pieces(other) == _pieces(part):
            what = "the same `options` and `tasks`, by which a preparation that goes on knows its reader"
        require(
            not what,
            f"with {name} = {value!r} it gives another result and {what}: {told[:200]}.\nLikely: {name} is left out "
            "of it: a folder that was prepared with another value is then taken for this one's.",
        )


def _told(part: Any) -> str:
    return json.dumps(dict(part.fingerprint()), sort_keys=True)


def _pieces(reader: Reader) -> str:
    return json.dumps([dict(reader.options()), reader.tasks()], sort_keys=True)


def _result(part: Any) -> Any:
    if isinstance(part, DocumentSource):
        return list(part.documents())
    part.prepare(_texts())
    return part.encode_batch([*_texts(), *VARIED]), part.to_json()


def variants(case: Case, contract: type) -> Iterator[Variant]:
    """Yields the part with one argument changed, to several values each, those likely to matter."""
    position, _ = POSITIONS[contract]
    stands = at(case.values, position) or {}
    if isinstance(stands, list):
        stands = next(item for item in stands if item["class_path"] == case.entry.class_path)
    given = dict(stands.get("init_args") or {})
    for name, argument in parameters(case.target)[0].items():
        value = given.get(name, argument.default)
        for other in _others(argument, value, _words(case) if contract is DocumentSource else []):
            changed = {**given, name: other}
            yield name, other, lambda changed=changed: build(case, contract, changed)  # type: ignore[misc]


def _others(argument: Argument, value: Any, words: list[str]) -> list[Any]:
    """Returns other values of an argument: choices, truth values, numbers and strings, as far as its type takes them."""
    tried: list[Any] = [*literals(argument.hint)]
    if isinstance(value, bool) or (value is None and accepts(argument.hint, True)):
        return [*tried, not value]
    if isinstance(value, int | float) and math.isfinite(value):
        tried += [value + 1, value - 1, value / 2 if isinstance(value, float) else value // 2]
    if isinstance(value, list | tuple):
        tried += [list(value[:-1]), [*value, "a"]]
    if value is None or isinstance(value, int | float | str):
        texts = [] if literals(argument.hint) else ["a", "e", *words]
        candidates = [None, *NUMBERS, *texts]
        tried += [other for other in candidates if accepts(argument.hint, other)]
    return [other for number, other in enumerate(tried) if other != value and other not in tried[:number]]


def _words(case: Case) -> list[str]:
    """The keys of the source's first line of JSON, or the first words of its header."""
    path = Path(source_of(case))
    if not path.is_file():
        return []
    with path.open("rb") as file:
        begin = file.read(4096).decode("utf-8", errors="ignore")
    line = begin.partition("\n")[0]
    keys = re.findall(r'"(\w+)"\s*:', line)
    return list(dict.fromkeys(keys or re.findall(r"[A-Za-z_]\w*", line)))[:6]


def _other_text(case: Case) -> Iterator[Variant]:
    """Yields a document source on the file without its last line."""
    path = Path(source_of(case))
    if path.is_file():
        shorter = workshop() / "shorter" / path.name
        shorter.parent.mkdir(exist_ok=True)
        shutil.copy(path, shorter)
        shorter.write_bytes(b"".join(shorter.read_bytes().splitlines(keepends=True)[:-1]))
        yield (
            "the source",
            "the text without its last line",
            lambda: case.build(*POSITIONS[DocumentSource])(str(shorter)),
        )


@proof("data", contract="Tokenizer")
def its_tokens_are_its_text(case: Case) -> None:
    """Text that is encoded and decoded comes back, and the JSON encodes it as the tokenizer does."""
    from tokenizers import Tokenizer as Implementation

    tokenizer: Tokenizer = build(case, Tokenizer)
    tokenizer.prepare(_texts())
    texts = [*_texts(), *UNUSUAL]
    ids = tokenizer.encode_batch(texts)
    stored = Implementation.from_str(tokenizer.to_json())
    stored.encode_special_tokens = True  # no part of the JSON: as text, as documents have it
    for text, row in zip(texts, ids, strict=True):
        own = stored.encode(text, add_special_tokens=False).ids
        require(row == own, f"{text[:40]!r}: encode_batch gives {row[:10]}, its JSON {own[:10]}")
        outside = [token for token in row if not 0 <= token < tokenizer.vocab_size]
        require(not outside, f"{text[:40]!r}: id {outside[:1]} with a vocab_size of {tokenizer.vocab_size}")
        require(tokenizer.end_of_text_id not in row, f"{text[:40]!r}: the end-of-text id is within the text")
        back = stored.decode(row, skip_special_tokens=False)
        if text in UNUSUAL:  # a tokenizer may normalise: then to what it leaves as it is
            text, back = back, stored.decode(stored.encode(back, add_special_tokens=False).ids)
        require(back.strip() == text.strip(), f"{text[:40]!r} comes back as {back[:40]!r}")
    require(
        0 <= tokenizer.end_of_text_id < tokenizer.vocab_size, "end_of_text_id is outside of the vocabulary"
    )


@proof("data", contract="Tokenizer")
def trains_the_same_tokenizer(case: Case) -> None:
    """The same documents give the same tokenizer."""
    found = []
    for _ in range(2):
        tokenizer: Tokenizer = build(case, Tokenizer)
        tokenizer.prepare(_texts())
        found.append(tokenizer.to_json())
    require(found[0] == found[1], "its JSON is another the second time")


def _texts() -> Iterator[str]:
    for number in range(40):
        yield " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 12))
