"""C4's rules: lines that are no sentences are removed, pages of few sentences or of code are dropped."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow

from core.contracts import Transform
from core.technique import technique
from toolkit.arrow_columns import flags, strings
from toolkit.document_filter import check_thresholds
from toolkit.english_words import count_sentences

CLOSING = (".", "?", "!", '"', "'")
POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_POLICY = re.compile("|".join(POLICIES))


@technique(paper="C4, Raffel et al. 2019, arXiv:1910.10683, section 2.2")
class C4Quality(Transform):
    """Removes lines that are no sentences, and drops pages of few sentences, of code or of placeholder text.

    A line is stripped, then removed if it has a word that is too long, does not end in `. ? ! " '` or ends in `...`, has
    too few words between spaces, names JavaScript or a policy (of privacy, cookies, use). The page is dropped for "lorem
    ipsum" and for a curly bracket in a line that is left up to there, and for too few sentences in what is left. The list
    of bad words is not applied: that is a filter of its own. A rule whose argument is None or false is left out.

    Decisions and texts are those of datatrove's `C4QualityFilter`, save for one: a page of which nothing is left is
    dropped as empty, also without a least number of sentences. As there, an apostrophe ends a line, and sentences are
    spaCy's (those of the paper are NLTK's).

    Args:
        min_sentences: Least number of sentences; 5 in datatrove, 3 in the code that made C4.
        min_line_words: Least number of words of a line; 3 in datatrove, 5 in the code that made C4.
        max_word_characters: Largest length of a word in a line, in characters; 1,000 in the code that made C4.
        closed_lines: Whether lines have to end in one of the five marks.
        citations: Whether `[1]`, `[edit]` and `[citation needed]` are removed from lines.
        javascript: Whether lines that name JavaScript are removed.
        policies: Whether lines that name a policy are removed.
        lorem_ipsum: Whether pages with "lorem ipsum" are dropped.
        curly_brackets: Whether pages with `{` are dropped.

    Raises:
        ConfigError: If a number is negative.

    Example:
        data:
          init_args:
            transforms:
              - class_path: C4Quality
                init_args: {min_sentences: 5, min_line_words: 3}
    """

    def __init__(
        self,
        min_sentences: int | None = 5,
        min_line_words: int | None = 3,
        max_word_characters: int | None = 1000,
        closed_lines: bool = True,
        citations: bool = True,
        javascript: bool = True,
        policies: bool = True,
        lorem_ipsum: bool = True,
        curly_brackets: bool = True,
    ) -> None:
        self.min_sentences, self.min_line_words = min_sentences, min_line_words
        self.max_word_characters, self.closed_lines = max_word_characters, closed_lines
        self.citations, self.javascript, self.policies = citations, javascript, policies
        self.lorem_ipsum, self.curly_brackets = lorem_ipsum, curly_brackets
        check_thresholds(self)

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options and the version of the Unicode tables, on which words depend."""
        return vars(self) | {"unicode": unicodedata.unidata_version}

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Cleans each text; drops those that break a rule."""
        found = [self.cleaned(text) for text in batch["text"].to_pylist()]
        column = strings([text for text, _ in found])
        batch = batch.set_column(batch.schema.get_field_index("text"), "text", column)
        rows = defaultdict(list)
        for row, (_, reason) in enumerate(found):
            if reason is not None:
                rows[reason].append(row)
        for reason, dropped in rows.items():
            drop(reason, dropped)
        return batch.filter(flags([reason is None for _, reason in found])) if rows else batch

    def cleaned(self, text: str) -> tuple[str, str | None]:
        """Returns what is left of a document, and why it is dropped; None: it is kept."""
        lowered = text.lower()
        policies = self.policies and _POLICY.search(lowered) is not None  # seldom: no need to look at lines
        javascript = self.javascript and "javascript" in lowered
        lorem_ipsum = self.lorem_ipsum and "lorem ipsum" in lowered
        left = []
        for raw in text.splitlines():
            line = self._line(raw.strip())
            if line is None:
                continue
            if lorem_ipsum and "lorem ipsum" in line.lower():
                return "", "lorem ipsum"
            if javascript and "javascript" in line.lower():
                continue
            if self.curly_brackets and "{" in line:
                return "", "curly bracket"
            if policies and _POLICY.search(line.lower()):
                continue
            left.append(line)
        if self._has_few_sentences(left):
            return "", "few sentences"
        cleaned = "\n".join(left).strip()
        return cleaned, None if cleaned else "empty"

    def _line(self, line: str) -> str | None:
        most, least = self.max_word_characters, self.min_line_words
        if most is not None and len(line) > most and max(map(len, line.split()), default=0) > most:
            return None
        shown = _CITATION.sub("", line) if self.citations and "[" in line else line
        if self.closed_lines and (not shown.endswith(CLOSING) or shown.endswith("...")):
            return None
        return None if least is not None and len(line.split(None, least)) < least else shown

    def _has_few_sentences(self, lines: list[str]) -> bool:
        least = self.min_sentences
        if least is None or len(lines) >= least:
            return False  # each line is at least one
        return sum(max(1, count_sentences(line, enough=least)) for line in lines) < least
