"""Fine-tunes on several tasks at once, mixed in given shares."""

from __future__ import annotations

from typing import Any

from core.contracts import PackedBatches
from core.data.token_datamodule import TokenDataModule
from core.errors import ConfigError
from core.technique import technique
from datamodules.instruction_datamodule import InstructionDataModule
from datamodules.packing.mixture import MixedBatches


@technique(
    paper="multi-task fine-tuning: T0, arXiv:2110.08207, and FLAN, arXiv:2109.01652; shares by deficit, as in weighted round robin "
    "(Katevenis et al., 1991)",
    offers=("exact_resume",),
)
class TaskMixtureDataModule(TokenDataModule):
    """Rows of several sources of conversations, mixed in shares that may change over the run.

    Each task reads its own records in its own form, template and split; all share the shape of the rows, the seed and the
    tokenizer. A row has records of one task. After n rows each task has given its share to within one row, and each has its own
    epochs (`epoch/NAME`). Validation reads the held-out records of all tasks, one after the other; `test` their test records, if
    all have some.

    Args:
        tasks: Name -> its records. `sequence_length`, `batch_size`, `shuffle`, `seed` and `num_workers` of a task are not used.
        weights: Name -> its share of the rows, relative to the others; or points [tokens, weight] with linear interpolation
            over the tokens of the run.
        sequence_length: Tokens in a row.
        batch_size: Rows in a micro-batch, on each rank.
        shuffle: Whether each epoch of a task takes its records in a new order.
        seed: Seed of these orders.
        num_workers: Processes that read ahead, on each rank; 0 is fastest for most.

    Raises:
        ConfigError: If there is no task, one does not pack its rows, tokenizers differ, or weights do not fit the tasks.

    Example:
        data:
          class_path: TaskMixtureDataModule
          init_args:
            tasks:
              chats:
                class_path: InstructionDataModule
                init_args: {source: chats.jsonl, tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}}
              code:
                class_path: InstructionDataModule
                init_args: {source: code.jsonl, tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}}
            weights: {chats: 0.7, code: 0.3}
            sequence_length: 1024
            batch_size: 4
    """

    def __init__(
        self,
        tasks: dict[str, InstructionDataModule],
        weights: dict[str, float | list[tuple[int, float]]],
        sequence_length: int = 256,
        batch_size: int = 8,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(sequence_length, batch_size, shuffle, seed, num_workers)
        if not tasks:
            raise ConfigError("data.tasks is empty: name at least one task, with its records.")
        if tasks.keys() != weights.keys():
            raise ConfigError(
                f"data.weights has {', '.join(weights) or 'none'} for the tasks {', '.join(tasks)}."
            )
        self.tasks, self.weights, self._mark = tasks, weights, False
        for name, task in tasks.items():
            task.sequence_length = sequence_length
            if not task.pack:
                raise ConfigError(
                    f"data.tasks.{name}: pack is false. Rows of several tasks have one width: set it to true."
                )

    def prepare_data(self) -> None:
        """Encodes the records of each task unless that has been done."""
        for task in self.tasks.values():
            task.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Maps the encoded records.

        Raises:
            ConfigError: If the tokenizers differ, or records are missing on this machine.
        """
        super().setup(stage)
        found: dict[tuple[str, int], str] = {}
        for name, task in self.tasks.items():
            task.trainer = self.trainer
            task.setup(stage)
            found.setdefault((task.tokenizer_json, task.end_of_text_id), name)
        if len(found) > 1:
            one, other = list(found.values())[:2]
            raise ConfigError(
                f"data.tasks: {one} and {other} have different tokenizers: token ids would mean different text.\nName the same file "
                "in both: tokenizer: {class_path: PretrainedTokenizer, init_args: {path: .../tokenizer.json}}."
            )
        [(self.tokenizer_json, self.end_of_text_id)] = found
        first, *_ = tasks = list(self.tasks.values())
        self.source_tokens = {name: task.train_tokens for name, task in self.tasks.items()}
        self.vocab_size, self.train_tokens = first.vocab_size, sum(self.source_tokens.values())
        everywhere = all(task.test_split == "test" for task in tasks)
        self.test_split = "test" if everywhere else "validation"

    def mark_sources(self) -> None:
        """Adds the source of each row to all batches."""
        self._mark = True

    def packed(self, split: str, **order: Any) -> PackedBatches:
        """Returns the mixed batches of a split."""
        return MixedBatches(
            {name: task.packed(split, **order) for name, task in self.tasks.items()},
            self.weights,
            self._mark,
        )
