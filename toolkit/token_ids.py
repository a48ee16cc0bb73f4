"""Whether two tokenizers mean the same tokens by their ids, and who has to know that of a run."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tokenizers import Tokenizer

__all__ = ["ChecksTokenizer", "other_ids"]


@runtime_checkable
class ChecksTokenizer(Protocol):
    """An objective that needs data of a certain tokenizer."""

    def check_tokenizer(self, tokenizer_json: str) -> None:
        """Compares the tokenizer of the data with its own; called once before a run trains, when that of the data is known.

        Raises:
            ConfigError: If ids mean other tokens.
        """


def other_ids(here: str, there: str) -> str | None:
    """Says which ids two tokenizers both have and mean other tokens by; None: there are none.

    Args:
        here: The JSON of a tokenizer.
        there: That of another one.

    Raises:
        ValueError: If one of them is damaged.
    """
    if here == there:
        return None
    try:
        one, other = (
            {number: token for token, number in Tokenizer.from_str(text).get_vocab().items()}
            for text in (here, there)
        )
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(str(error).partition("\n")[0][:200]) from error
    odd = sorted(number for number in one.keys() & other.keys() if one[number] != other[number])
    if not odd:
        return None
    return (
        f"of {len(one):,} token ids here and {len(other):,} there, {len(odd):,} mean another token "
        f"({odd[0]}: {one[odd[0]]!r}, there {other[odd[0]]!r})"
    )
