"""Prompts without answers, for training on rewards: the network itself answers them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from core.contracts import IGNORED_LABEL
from core.errors import ConfigError
from core.technique import technique
from datamodules.records.chat_datamodule import ChatDataModule
from datamodules.records.chats import Rendered, WrongRecord, check_special_tokens, field, side_of, tools_of
from datamodules.records.encoding import TextEncoder
from datamodules.records.prompt_batches import PromptBatches
from datamodules.records.record_files import Placed, Record
from datamodules.records.record_store import Encoded
from datamodules.records.templates import find_template
from toolkit.rollouts import Prompted


class _Prompt(NamedTuple):
    """A rendered prompt, whether the tokens that begin a text stand in front of it, and what is kept of its record."""

    text: str
    leading: bool
    note: str


@technique(
    paper="InstructGPT, arXiv:2203.02155, section 3.5: a data set of prompts, answered by the policy",
    offers=("exact_resume", "prompts"),
)
class PromptDataModule(ChatDataModule):
    """Prompts, one a row, which the callback `Rollouts` has the network answer.

    A record has the prompt in `prompt_field`, a text or a list of messages, and any further fields: rewards see the whole
    record. The chat template renders the prompt up to where the answer begins.

    A batch has the prompts as `input_ids` (B, T) with `document_ids` -1 in padding, no labels, the numbers of their records
    (B,) and how often the batch was there before (B,). `sequence_length` is the length of the longest prompt, in tokens;
    longer ones are left out. The network needs room for the answer behind it.

    Args:
        template: As for InstructionDataModule.
        prompt_field: Name of the field with the prompt, such as `question`.

    Raises:
        ConfigError: If there is no template, or no such file.

    Example:
        data:
          class_path: PromptDataModule
          init_args:
            source: problems.jsonl
            prompt_field: question
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 256
            batch_size: 8
    """

    notes = True

    def __init__(
        self, *args: Any, template: str | None = None, prompt_field: str = "prompt", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.cut_long:
            raise ConfigError(
                "data.too_long is cut: a prompt without its end is another prompt. Set data.too_long=drop."
            )
        self.template, self.prompt_field = find_template(template, self.tokenizer), prompt_field
        self.turns = 1

    def options(self) -> Mapping[str, Any]:
        """Returns the template and the field of the prompt."""
        return {"template": self.described_template(), "prompt_field": self.prompt_field}

    def begin(self, encoder: TextEncoder, records: Iterable[Placed]) -> None:
        """Takes the encoder for texts of users.

        Raises:
            ConfigError: If the special tokens of ChatML are none of the tokenizer's.
        """
        self._encoder = encoder.prompts
        if self.template:
            check_special_tokens(self.template, encoder.prompts)

    def encode(self, record: Record) -> _Prompt:
        """Returns the prompt of a record.

        Raises:
            WrongRecord: If there is none, or it is empty.
        """
        note = json.dumps(record, ensure_ascii=False, default=str)
        messages = isinstance(record.get(self.prompt_field), list)
        if not messages and not field(record, self.prompt_field).strip():
            raise WrongRecord(f'the field "{self.prompt_field}" is empty', "a prompt has at least one token")
        if not self.template:
            return _Prompt(self._encoder.as_text(field(record, self.prompt_field)), True, note)
        given: Any = self._encoder.as_text(side_of(record, self.prompt_field, "user"))
        tools = tools_of(record)
        further = {"tools": self._encoder.as_text(tools)} if tools else {}
        try:
            return _Prompt(self.template.render(given, add_generation_prompt=True, **further), False, note)
        except ConfigError as error:
            raise WrongRecord("the chat template refuses these messages", str(error)) from error

    def finish(self, encoder: TextEncoder, found: Sequence[_Prompt]) -> Iterator[Encoded]:
        """Yields the ids of each prompt, without labels."""
        texts = encoder.encode([Rendered(one.text, []) for one in found])
        leading = np.array(encoder.prompts.leading, np.int64)
        for (ids, _), one in zip(texts, found, strict=True):
            whole = np.concatenate([leading, ids]) if one.leading else ids
            yield Encoded([(whole, np.full(len(whole), IGNORED_LABEL))], note=one.note)

    def repeat_batches(self, turns: int) -> None:
        """Deals out each training batch so many times in succession; called before training."""
        self.turns = turns

    def prompted(self, split: str, record: int) -> Prompted:
        """Returns the record of a prompt, and the prompt as a text: of a chat the last message of the user."""
        fields = json.loads(self._stores[split].note(record))
        prompt = fields[self.prompt_field]
        if isinstance(prompt, list):
            said = [str(one.get("content", "")) for one in prompt if one.get("role") == "user"]
            prompt = said[-1] if said else ""
        return Prompted(prompt, fields)

    def packed(self, split: str, **order: Any) -> PromptBatches:
        """Returns the batches of a split."""
        turns = self.turns if split == "train" else 1
        return PromptBatches(self._stores[split], turns=turns, **order)
