"""What data modules of conversations share: the chat template, and what ends an answer."""

from __future__ import annotations

from abc import ABC
from typing import Any

from datamodules.records.chats import WrongRecord, renderer_of
from datamodules.records.record_datamodule import RecordDataModule
from toolkit.chat_template import ChatTemplate
from toolkit.generation.prompts import PromptEncoder

PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
"""A conversation whose end shows what ends a turn."""


class ChatDataModule(RecordDataModule, ABC):
    """Records that a chat template renders.

    Attributes:
        template: The template; None: texts follow each other without one.
        stop_ids: The ids that end an answer, after `setup`. Checkpoints keep both, so that `chat`, `serve` and `export` have them.
    """

    template: ChatTemplate | None = None
    stop_ids: list[int]

    def described_template(self) -> Any:
        """Returns the template as JSON values, for :meth:`options`."""
        return (self.template.source, self.template.special) if self.template else None

    def setup(self, stage: str | None = None) -> None:
        """Finds what ends an answer; see the base class."""
        super().setup(stage)
        encoder = PromptEncoder(self.tokenizer_json)
        self.stop_ids = sorted({self.end_of_text_id, *turn_end(self.template, encoder)})


def turn_end(template: ChatTemplate | None, encoder: PromptEncoder) -> list[int]:
    """Returns the id of the special token with which an answer ends under a template, if it does."""
    if template is None:
        return []
    try:
        answer = renderer_of(template, encoder, ("assistant",), last_only=True).render(PROBE)
    except WrongRecord:  # a template that takes other conversations only
        return []
    begin, end = answer.spans[-1]
    text = answer.text[begin:end].rstrip()
    longest = max((one for one in encoder.special if text.endswith(one)), key=len, default=None)
    return [] if longest is None else [encoder.special[longest]]
