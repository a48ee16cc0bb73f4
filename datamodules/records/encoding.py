"""Rendered texts as ids and labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.contracts import IGNORED_LABEL
from datamodules.preparation.tokenizers.library_tokenizer import threads
from datamodules.records.chats import Rendered
from toolkit.generation.prompts import PromptEncoder

Labelled = tuple[np.ndarray, np.ndarray]
"""Ids and labels of a sequence."""


class TextEncoder:
    """Encodes rendered texts; a token is trained on if a character of it is in a span.

    Args:
        tokenizer_json: The tokenizer.
        end_of_text_id: What ends a text that no template renders.

    Attributes:
        tokenizer_json: As given.
        prompts: Marks texts of users, so that no special token is read in them.
    """

    def __init__(self, tokenizer_json: str, end_of_text_id: int) -> None:
        self.tokenizer_json = tokenizer_json
        self.prompts = PromptEncoder(tokenizer_json)
        self.prompts.tokenizer.post_processor = None  # some leave spaces out of the offsets
        self.end = end_of_text_id

    def encode(self, texts: Sequence[Rendered]) -> list[Labelled]:
        """Returns ids and labels of each text; the label of a token is the next one, where that is trained on."""
        with threads():
            found = self.prompts.tokenizer.encode_batch([one.text for one in texts], add_special_tokens=False)
        return [self._labelled(one, encoding) for one, encoding in zip(texts, found, strict=True)]

    def _labelled(self, text: Rendered, encoding: object) -> Labelled:
        ids = np.array(encoding.ids, np.int64)  # type: ignore[attr-defined]
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T  # type: ignore[attr-defined]
        trained = np.zeros(len(ids), bool)
        for begin, end in text.spans:
            trained |= (begins < end) & (ends > begin)
        if text.whole:
            leading = np.array(self.prompts.leading, np.int64)
            ids = np.concatenate([leading, ids, [self.end]])
            trained = np.concatenate([np.zeros(len(leading), bool), trained, [True]])
        labels = np.full(len(ids), IGNORED_LABEL, np.int64)
        labels[:-1][trained[1:]] = ids[1:][trained[1:]]
        return ids, labels
