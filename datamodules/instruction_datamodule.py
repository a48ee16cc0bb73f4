"""Conversations, and prompts with their answers, for fine-tuning on the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from datamodules.records.chat_datamodule import ChatDataModule
from datamodules.records.chats import (
    Rendered,
    WrongRecord,
    check_answers,
    messages_of,
    plain,
    plain_sides,
    renderer_of,
    tools_of,
)
from datamodules.records.encoding import TextEncoder
from datamodules.records.parallel_files import ParallelFiles, is_parallel
from datamodules.records.prompts import Prompts
from datamodules.records.record_files import Placed, Record, RecordFiles
from datamodules.records.record_store import Encoded
from datamodules.records.templates import find_template


@technique(
    paper="InstructGPT, arXiv:2203.02155, section 3.5: trained on demonstrations; rows of several by best-fit decreasing, "
    "arXiv:2404.10830",
    offers=("exact_resume", "answer_labels"),
)
class InstructionDataModule(ChatDataModule):
    """Conversations as rows whose labels are the answers alone, for `CausalLM` as it is.

    A record is one of

    - `{"messages": [{"role": ..., "content": ...}, ...]}`, also with `tools`,
    - `{"conversations": [{"from": "human", "value": ...}, ...]}`, as ShareGPT has it,
    - `{"prompt": ..., "completion": ...}`, each a text or a list of messages,
    - `{"instruction": ..., "input": ..., "output": ...}`, as Alpaca has it,
    - `{"context": ..., "question": ..., "answers": {"text": [...]}}`, a question of SQuAD, or an article of its files with
      many: the prompt is that of lm-eval, the answer the first one, or "unanswerable",
    - with `translate`, `{"translation": {"de": ..., "en": ...}}`, or a pair of lines of WMT's files.

    The chat template renders it, and the answers with the token that ends a turn have labels; all other positions have
    -100. Where a template has blocks `generation`, these say what an answer is. Special tokens spelt in a message stay text.
    The records of a row do not see each other (`document_ids`, `position_ids`).

    Args:
        template: `chatml`; `plain`, in which the answer follows the prompt without a template, and the end-of-text token
            the answer; or a file or folder with a template. None: the tokenizer's own.
        roles: Whose messages are trained on.
        last_turn_only: Whether the last of them is the only one.
        translate: Codes and names of two languages, {de: German, en: English} from German to English. `source` may then be a
            file `NAME.de` beside `NAME.en` (also .gz, .zst), `NAME.de.sgm` beside `NAME.en.sgm`, or `NAME.de-en.tsv`.
        pack: Whether several records share a row, which is `sequence_length` wide; else there is one a row, with others of
            similar length.

    Raises:
        ConfigError: If there is no template, no such file, or `translate` does not name two languages.

    Example:
        data:
          class_path: InstructionDataModule
          init_args:
            source: chats.jsonl
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
            sequence_length: 1024
            batch_size: 4
    """

    def __init__(
        self,
        *args: Any,
        template: str | None = None,
        roles: Sequence[str] = ("assistant",),
        last_turn_only: bool = False,
        pack: bool = True,
        translate: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.translate = translate or {}
        if self.translate and (len(self.translate) != 2 or not all(self.translate)):
            raise ConfigError(
                f"data.translate is {translate}; it has two languages, from and to: {{de: German, en: English}}."
            )
        if not roles:
            raise ConfigError("data.roles is empty: name whose messages are trained on, such as [assistant].")
        self.template = find_template(template, self.tokenizer)
        self.roles, self.last_turn_only, self.pack = tuple(roles), last_turn_only, pack

    def files_of(self, source: str) -> RecordFiles:
        """Returns the records of a source: articles and translations as prompts."""
        prompts = Prompts(self.translate, joined=self.template is None)
        if self.translate and is_parallel(source, tuple(self.translate)):
            return ParallelFiles(source, tuple(self.translate), prompts)
        return RecordFiles(source, self.columns, prompts)

    def options(self) -> Mapping[str, Any]:
        """Returns the template and what is trained on."""
        options = {
            "template": self.described_template(),
            "roles": self.roles,
            "last_turn_only": self.last_turn_only,
        }
        return options | ({"translate": list(self.translate.items())} if self.translate else {})

    def begin(self, encoder: TextEncoder, records: Iterable[Placed]) -> None:
        """Takes the encoder for texts of users.

        Raises:
            ConfigError: If the special tokens of ChatML are none of the tokenizer's.
        """
        self._encoder = encoder.prompts
        self._renderer = self.template and renderer_of(
            self.template, encoder.prompts, self.roles, self.last_turn_only
        )

    def encode(self, record: Record) -> Rendered:
        """Returns the text of a record and where its answers are."""
        if not self._renderer:
            prompt, answer = plain_sides(record)
            if not answer.strip():
                raise WrongRecord("an answer is empty")
            return plain(self._encoder, prompt, answer)
        messages = messages_of(record)
        check_answers(messages[-1:] if self.last_turn_only else messages, self.roles)
        return self._renderer.render(messages, tools_of(record))

    def finish(self, encoder: TextEncoder, found: Sequence[Rendered]) -> Iterator[Encoded]:
        """Yields a sequence of each text that has labels."""
        for ids, labels in encoder.encode(found):
            yield Encoded([(ids, labels)] if (labels >= 0).any() else [])
