"""Corpora in all formats, and the whole preparation of one, for the tests of data."""

import json
import random
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow
from pyarrow import parquet
from tokenizers import Tokenizer

from datamodules.packing.token_store import TokenStore
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.token_preparation import TokenPreparation
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.transforms.normalise import Normalise
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.commands import prepare as command

HEAVY = {
    "lightning",
    "litdata",
    "matplotlib",
    "pandas",
    "scipy",
    "torch",
    "torchmetrics",
    "torchvision",
    "transformers",
}
"""What takes hundreds of MB, and no part in a preparation."""

PLAIN_WORDS = [
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
]
WORDS = [*PLAIN_WORDS, "naïve", "北京", "🙂", "don't"]


TOPICS = tuple(topics[name] for name in sorted(topics)[:60] if topics[name])
"""A quarter of a megabyte of English: the first topics of Python's `help()`."""


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


def articles(folder, count=200):
    """Writes documents with an address, a date of most, and a number."""
    folder.mkdir()
    for part in range(4):
        lines = [
            {"text": text, "url": f"https://site{number % 7}.example/{number}", "year": 2000 + number % 5}
            | ({"date": f"2024-{number % 12 + 1:02}-03"} if number % 9 else {"date": None})
            for number, text in list(enumerate(texts(count)))[part::4]
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def with_metadata(*names):
    return lambda source: JSONLinesDocuments(source, metadata=names)


def preparation(source, reader=JSONLinesDocuments, **options):
    options = {"transforms": [Normalise()], "validation_fraction": 0.2, **options}
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


def documents_of(folder, split):
    """The texts of a prepared folder, decoded."""
    store, tokenizer = TokenStore(folder / split), Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [store.read(a, b).tolist() for a, b in pairwise([*store.document_starts(), len(store)])]
    assert all(document[-1] == 0 for document in ids)
    return [tokenizer.decode(document[:-1]) for document in ids]


def rows_of(reader, rejects=None):
    """All rows of all tasks, and the tasks' number."""
    noted = rejects if rejects is not None else []
    tasks = json.loads(json.dumps(reader.tasks()))
    read = [b for task in tasks for b in reader.read(task, lambda *reject: noted.append(reject))]
    assert rejects is not None or not noted
    return [row for batch in read for row in batch.to_pylist()], len(tasks)


def texts_of(reader, rejects=None):
    return [row["text"] for row in rows_of(reader, rejects)[0]]


def write_parquet(path, documents, group=50, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({"text": documents, **columns}), path, row_group_size=group)
    return path


def write_hugging_face(folder, documents, files=3):
    """Writes what `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{files:05}.arrow" for number in range(files)]
    size = -(-len(documents) // files)
    for number, name in enumerate(names):
        table = pyarrow.table({"id": list(range(size))[: len(documents[number * size :][:size])],
                               "text": documents[number * size :][:size]})  # fmt: skip
        path = str(folder / name)
        with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder
