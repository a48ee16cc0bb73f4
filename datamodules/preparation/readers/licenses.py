"""Finds the license of source code: SPDX headers, license files, and whether a license is among those allowed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator

from core.errors import ConfigError, nearest
from core.technique import Package
from datamodules.preparation.readers.programming_languages import language_of

PACKAGES = (Package("licenseclassifier>=2026.8", extra="code"), Package("packaging>=24.2", extra="code"))

PERMISSIVE = (
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSD-3-Clause-Clear",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unlicense",
    "Zlib",
)
"""Licenses that ask for no more than a notice."""

UNKNOWN = "unknown"
SUFFIXES = tuple(
    f"{name}{ending}"
    for name in (
        "license",
        "licence",
        "copying",
        "copying.lesser",
        "license-mit",
        "license-apache",
        "unlicense",
    )
    for ending in ("", ".txt", ".md", ".rst")
)
"""Usual names of license files, in lower case; :func:`is_license_file` knows more."""

_FILE = re.compile(r"(?:[a-z0-9.]+-)?(?:un)?licen[sc]e(?:[-_.].{1,40})?|copying\d?(?:[-_.].{1,40})?", re.I)
_PROSE = {None, "Markdown", "reStructuredText"}
_HEADER = re.compile(r"SPDX-License-Identifier:[ \t]*([^\r\n]{1,200})")
_HEADER_CHARACTERS = 4000
_LONGEST = 1 << 19

_NOTICE_WORDS, _LLVM_WORDS = 80, 160
"""Of 291 license files of installed packages, 275 have no passage of over 50 words between license texts; a Commons Clause has
135."""


def is_license_file(name: str) -> bool:
    """Returns whether a file, named without its folder, holds a license: LICENSE-MIT, COPYING.LESSER, MIT-LICENSE.txt."""
    return _FILE.fullmatch(name) is not None and language_of(name) in _PROSE


def licenses_in(data: bytes) -> list[str]:
    """Returns the SPDX identifiers of the license texts in a file, sorted.

    `UNKNOWN` is one of them if they cover less than three quarters of it, or leave out a passage that is long enough for
    terms of its own, such as a Commons Clause.
    """
    from licenseclassifier import identify_license

    text = data[:_LONGEST].decode("utf-8", "replace")
    found = identify_license(text)
    places = [(0, 0), *((one.start, one.end) for one in found), (len(text), len(text))]
    between = [text[begin:end] for (_, begin), (end, _) in itertools.pairwise(places)]
    more = {UNKNOWN} if not found or any(map(_may_have_terms, between)) else set()
    return sorted({one.id for one in found} | more)


def _may_have_terms(passage: str) -> bool:
    """Returns whether a passage is longer than notices are, and not LLVM's exception, which only permits more."""
    words = len(passage.split())
    return words > (_LLVM_WORDS if "LLVM Exceptions" in passage else _NOTICE_WORDS)


def joined(licenses: Collection[str]) -> str:
    """Returns several licenses, all of which count, as one SPDX expression."""
    return " AND ".join(sorted(set(licenses)))


def header_of(text: str) -> str:
    """Returns the SPDX expression of a file's header, `UNKNOWN` if it is not valid, an empty string if there is none."""
    found = _HEADER.search(text, 0, _HEADER_CHARACTERS)
    return _canonical(re.sub(r"\s*(?:\*+/|-->|#}|\*\)|\"+|'+).*$", "", found[1]).strip()) if found else ""


def _canonical(expression: str) -> str:
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return str(canonicalize_license_expression(expression))
    except (InvalidLicenseExpression, RecursionError, ValueError):
        return UNKNOWN


def checked(owner: str, licenses: Collection[str]) -> tuple[str, ...]:
    """Returns identifiers in their usual spelling.

    Raises:
        ConfigError: If SPDX has no such license, or there is none.
    """
    if not licenses:
        raise ConfigError(f"{owner}: licenses is empty; name at least one, such as MIT.")
    for one in licenses:
        if _canonical(one) == UNKNOWN or " " in one:
            hint = nearest(one, set(PERMISSIVE))
            raise ConfigError(
                f"{owner}: SPDX has no license {one!r}.{hint}\nIdentifiers are listed at spdx.org/licenses."
            )
    return tuple(sorted({_canonical(one) for one in licenses}))


def is_allowed(expression: str, allowed: Collection[str]) -> bool:
    """Returns whether an SPDX expression can be met with the licenses that are allowed.

    One side of an OR is enough. Versions "only" and "or later" of GNU's licenses count as the same; an exception
    (WITH) only permits more.
    """
    names = {_family(one) for one in allowed}
    words = iter(re.findall(r"[()]|[^\s()]+", expression))
    return _alternatives(words, names)


def _alternatives(words: Iterator[str], allowed: set[str]) -> bool:
    """Evaluates up to the closing parenthesis; AND binds closer than OR."""
    some, every = False, True
    for word in words:
        if word == ")":
            break
        if word == "OR":
            some, every = some or every, True
        elif word == "WITH":
            next(words, "")
        elif word == "(":
            every = _alternatives(words, allowed) and every
        elif word != "AND":
            every = every and _family(word) in allowed
    return some or every


def _family(name: str) -> str:
    return re.sub(r"(?:-only|-or-later|\+)$", "", name.lower())
