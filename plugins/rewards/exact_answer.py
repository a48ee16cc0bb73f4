"""Rewards an answer whose result is that of the record."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from core.technique import technique
from toolkit.rewards import Reward, Sample, field

_MOST_CHARACTERS = 200
"""Limit of a result; a longer one is compared as text."""

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d{1,3})?"
_QUANTITY = re.compile(rf"(?P<sign>[-+]?)(?P<before>[$€£¥]?)\s*(?P<number>{_NUMBER})(?:\s*/\s*(?P<below>{_NUMBER}))?"
                       r"\s*(?P<unit>[^\W\d_]*(?:[ /][^\W\d_]+)?|%|°[cf]?)")  # fmt: skip
_LAST_NUMBER = re.compile(rf"(?<![\w.,])[-+]?[$€£¥]?{_NUMBER}(?:\s*/\s*\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:left|right|[!,;: ])")
_SAID = re.compile(r"\banswer\s*(?:is|:)[\s:]*", re.IGNORECASE)
_ASCII = {0x2212: "-", 0x2044: "/"}  # minus sign; fraction slash, which NFKC makes of one half
_SYMBOLS = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}


@technique(
    paper="GSM8K, arXiv:2110.14168, section 2: final answers after ####; MATH, arXiv:2103.03874, section 3: in \\boxed"
)
class ExactAnswer(Reward):
    r"""Gives `right` to an answer whose result is that of the record, and `wrong` to any other.

    The result is what stands in the last `\boxed{...}`, else behind the last `####` of a line, else behind the last "answer
    is" or "answer:" up to the end of its sentence; of a text that marks none `unmarked` says what counts. The record's
    field is read in the same way, and may be a number, or a list of which any is right; without a mark all of it counts.

    Numbers are compared exactly, as fractions: 1,234.50 is 1234.5, and \frac{1}{2} is 0.5. A unit ("$18", "18 dollars",
    "50%") counts only where both have one. Other texts are compared without regard to case, spaces, compatibility forms,
    dollar signs and a full stop at the end.

    Args:
        field: The record's field with the right result.
        right: Value of a right answer.
        wrong: Value of any other.
        unmarked: What counts of an answer that marks no result: its last number (without one, all of it), all of it, or
            nothing: it is wrong.

    Raises:
        ConfigError: If a record lacks the field.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward:
                  class_path: ExactAnswer
                  init_args: {field: answer}
    """

    def __init__(
        self,
        field: str = "answer",
        right: float = 1.0,
        wrong: float = 0.0,
        unmarked: Literal["last_number", "whole", "wrong"] = "last_number",
    ) -> None:
        self.field, self.right, self.wrong, self.unmarked = field, right, wrong, unmarked

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns `right` or `wrong` for each sample."""
        return [self.right if self._is_right(sample) else self.wrong for sample in samples]

    def _is_right(self, sample: Sample) -> bool:
        truth = field(sample, self.field, "ExactAnswer.field")
        found = result(sample.answer, self.unmarked)
        if found is None:
            return False
        wanted = truth if isinstance(truth, list) else [truth]
        return any(same(found, result(str(one), "whole") or "") for one in wanted)


def result(text: str, unmarked: Literal["last_number", "whole", "wrong"]) -> str | None:
    """Returns the result that a text gives; None if it gives none."""
    marked = _boxed(text)
    if marked is None and "####" in text:
        marked = text.rpartition("####")[2].strip().partition("\n")[0]
    if marked is None and (said := list(_SAID.finditer(text))):
        marked = re.split(r"\n|[.!?](?=\s|$)", text[said[-1].end() :], maxsplit=1)[0]
    if marked is None and unmarked == "last_number":
        numbers = _LAST_NUMBER.findall(text.translate(_ASCII))
        marked = numbers[-1] if numbers else text
    if marked is None and unmarked == "whole":
        marked = text
    return marked if marked and marked.strip() else None


def _boxed(text: str) -> str | None:
    r"""Returns what is in the last \boxed{...}, braces within it balanced."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start:at]
    return None  # cut off


def same(one: str, other: str) -> bool:
    """Returns whether two results are the same, as numbers with units or as texts."""
    one, other = _plain(one), _plain(other)
    if one == other:
        return bool(one)
    quantities = _quantity(one), _quantity(other)
    if None in quantities:
        return one.replace(" ", "").replace("$", "") == other.replace(" ", "").replace("$", "") != ""
    (value, unit), (other_value, other_unit) = quantities  # type: ignore[misc]
    return value == other_value and (not unit or not other_unit or unit == other_unit)


def _plain(text: str) -> str:
    """Returns a result in lower case and without TeX, one space between words, no full stop."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("**", "").translate(_ASCII)
    text = _SPACING.sub("", text.replace("\\$", "$").replace("\\%", "%"))
    text = _TEXT.sub(r" \1", _FRACTION.sub(r"\1/\2", text))
    text = text.strip().removeprefix("\\(").removesuffix("\\)").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$")
    return " ".join(text.split()).rstrip(".").rstrip()


def _quantity(text: str) -> tuple[Fraction, str] | None:
    """Returns a number and its unit, which may be empty; None if it is something else."""
    found = _QUANTITY.fullmatch(text) if len(text) <= _MOST_CHARACTERS else None
    if not found:
        return None
    value = Fraction(found["number"].replace(",", ""))
    below = Fraction((found["below"] or "1").replace(",", ""))
    if not below:
        return None
    unit = _SYMBOLS.get(found["before"]) or found["unit"]
    return (-1 if found["sign"] == "-" else 1) * value / below, unit.removesuffix("s")
