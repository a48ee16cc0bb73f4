"""A small corpus, and the whole preparation of it, for the tests of this folder."""

import json
import random
from pathlib import Path

from datamodules.preparation import prepare as command
from datamodules.preparation.bpe_tokenizer import BPETokenizer
from datamodules.preparation.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.normalise import Normalise
from datamodules.preparation.token_preparation import TokenPreparation
from datamodules.preparation.token_shards import TokenShards

WORDS = [
    "the",
    "model",
    "learns",
    "from",
    "text",
    "and",
    "words",
    "token",
    "batch",
    "loss",
    "of",
    "is",
    "was",
    "naïve",
    "北京",
    "🙂",
    "don't",
]


def texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 60))) + f" {number}" for number in range(count)]


def write_lines(path, documents, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, **more}, ensure_ascii=False) + "\n" for text in documents]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def corpus(folder, documents=120, files=6):
    """Writes files of documents, some of them in a subfolder; returns the folder."""
    everything = texts(documents)
    for number in range(files):
        below = folder / "books" if number % 2 else folder
        write_lines(below / f"part-{number:03}.jsonl", everything[number::files])
    return folder


def preparation(source, reader=JSONLinesDocuments, **options):
    options = {"stages": [Normalise()], "validation_fraction": 0.2, **options}
    tokenizer, writer = options.pop("tokenizer", None), options.pop("writer", None)
    return TokenPreparation(
        reader(str(source)), tokenizer or BPETokenizer(300), writer or TokenShards(900), **options
    )


def prepare(source, folder, overwrite=False, **options):
    """Does what the command does, in this process unless an engine is given; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with command._claimed(folder):
        command._prepare(preparation(source, **options), "corpus", folder, overwrite)
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
