"""Records for fine-tuning, and data modules over them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from tests.support.chat_checkpoint import bytes_tokenizer


def chat(*turns):
    """Returns messages: turns of user and assistant, one after the other."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]


def write_lines(path, records):
    """Writes JSON Lines; returns the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def tokenizer(folder: Path) -> PretrainedTokenizer:
    """Returns one of bytes, with special tokens of chats."""
    path = folder / "tokenizer" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(bytes_tokenizer(), encoding="utf-8")
    return PretrainedTokenizer(str(path))


def build(kind, folder, records, **options):
    """Returns a data module over records that has been set up."""
    source = write_lines(folder / "records.jsonl", records)
    options = {"cache_dir": str(folder / "cache"), "sequence_length": 64, "batch_size": 4} | options
    data = kind(source, tokenizer(folder), **options)
    data.setup()
    return data


def answers(data, batch):
    """Returns the text that each row of a batch is trained on."""
    decoder = Tokenizer.from_str(data.tokenizer_json)
    rows = batch["labels"].tolist()
    return [decoder.decode([id for id in row if id >= 0], skip_special_tokens=False) for row in rows]


def rows_of(batches, count=None):
    """Returns the rows of the next batches as tuples, batch by batch."""
    found = []
    for number, item in enumerate(batches):
        if number == count:
            break
        batch = item[1] if isinstance(item, tuple) else item
        names = sorted(batch)
        found.append([tuple(tuple(map(str, batch[n][row].flatten().tolist())) for n in names) for row in range(len(batch["input_ids"]))])  # fmt: skip
    return found
