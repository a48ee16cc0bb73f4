"""Prompts as token ids: what begins a text, and texts that spell special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

__all__ = ["PromptEncoder", "is_library_error", "leading_ids"]

_MARK = "\ufdd0"  # a noncharacter of Unicode, for internal use: no text has a meaning for it
_PROBES = ("a", "0", ".", "你")


def is_library_error(error: BaseException) -> bool:
    """Returns whether an error may be one of `tokenizers`: its Rust code panics over some files, which is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def leading_ids(tokenizer: Any) -> list[int]:
    """Returns the ids that a tokenizer's post-processor puts in front of a text, such as that of a BOS token.

    What it puts behind a text is no part of a beginning, and is not returned.

    Args:
        tokenizer: A tokenizer of the library `tokenizers`.
    """
    if not tokenizer.num_special_tokens_to_add(False):
        return []
    text = next((one for one in _PROBES if tokenizer.encode(one, add_special_tokens=False).ids), "")
    found = tokenizer.encode(text)
    own = found.special_tokens_mask
    return found.ids[: own.index(0)] if 0 in own else []


class PromptEncoder:
    """Encodes prompts; a special token is read as one only where it was not marked as text.

    A text that spells a special token, `<|endoftext|>` say, would otherwise become that token: what a user
    writes could end a turn of a chat. :meth:`as_text` marks such places, :meth:`encode` reads marked ones as text. The
    ids of any other text are those of the library.

    Args:
        tokenizer_json: The tokenizer, for `tokenizers.Tokenizer.from_str`.

    Attributes:
        tokenizer: It, for decoding; what it encodes may have marks.
        leading: Ids in front of a text; see :func:`leading_ids`.
        special: The special tokens, and the id of each.

    Raises:
        Exception: As the library does, if the JSON is no tokenizer's.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self.leading = leading_ids(Tokenizer.from_str(tokenizer_json))
        described = json.loads(tokenizer_json)
        for token in described.get("added_tokens") or ():
            if token["special"]:
                token["normalized"] = False  # found before normalisation, which removes the marks
        steps = [
            {"type": "Replace", "pattern": {"String": _MARK}, "content": ""},
            described.get("normalizer"),
        ]
        described["normalizer"] = {"type": "Sequence", "normalizers": [step for step in steps if step]}
        described["truncation"] = described["padding"] = None
        self.tokenizer = Tokenizer.from_str(json.dumps(described))
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.special = {token.content: id for id, token in added if token.special}
        spelt = sorted((one for one in self.special if len(one) > 1), key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, spelt)) or r"(?!)")

    def as_text(self, value: Any) -> Any:
        """Returns a text, or JSON values with texts, marked so that no special token is read in them."""
        if isinstance(value, str):
            value = value.replace(_MARK, "")
            while self._spelt.search(value):
                value = self._spelt.sub(lambda found: found[0][0] + _MARK + found[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {self.as_text(key): self.as_text(one) for key, one in value.items()}
        return [self.as_text(one) for one in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, leading: bool = True) -> list[int]:
        """Returns the ids of a text; unless marked, special tokens in it are read as such.

        Args:
            text: The prompt; it may contain marks.
            leading: Whether the tokens that begin a text stand in front.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*self.leading, *ids] if leading else ids

    def encode_prompts(self, prompts: Sequence[str], special_tokens: bool = False) -> list[list[int]]:
        """Returns the ids of each prompt.

        Args:
            prompts: Texts.
            special_tokens: Whether special tokens are read in them; else they are text.
        """
        texts = prompts if special_tokens else [self.as_text(prompt) for prompt in prompts]
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[*self.leading, *encoding.ids] for encoding in encodings]
