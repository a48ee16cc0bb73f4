"""StreamingTextDataModule: rows of text that is tokenised while it is read, against stored tokens, and resumed anywhere."""

import json
import subprocess
import sys
from collections import Counter
from itertools import chain, islice

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from conformance.runs import run
from core.data.token_loader import TokenLoader
from core.errors import ConfigError
from datamodules.packing import streamed
from datamodules.packing.concatenate import Concatenate
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.litdata_documents import LitdataDocuments
from datamodules.preparation.readers.mds_documents import MDSDocuments
from datamodules.preparation.readers.parquet_documents import ParquetDocuments
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from datamodules.preparation.transforms.normalise import Normalise
from datamodules.preparation.writers.token_shards import TokenShards
from datamodules.streaming_text_datamodule import StreamingTextDataModule
from tests.conformance.conftest import bytes_tokenizer
from tests.conftest import HOUSE
from tests.support.corpus import texts
from tests.support.raw_folders import write_mds, write_texts

TEXTS = texts(240)
END = 0


def write_parquet(folder):
    folder.mkdir()
    for part in range(6):
        table = pyarrow.table({"text": TEXTS[part * 40 : part * 40 + 40]})
        parquet.write_table(table, folder / f"part-{part}.parquet", row_group_size=10)


def write_lines(folder):
    folder.mkdir()
    for part in range(6):
        lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[part * 40 : part * 40 + 40]]
        (folder / f"part-{part}.jsonl").write_text("".join(lines))


KINDS = {
    "MDS": (MDSDocuments, lambda folder: write_mds(folder, TEXTS, 4000)),
    "litdata": (LitdataDocuments, lambda folder: write_texts(folder, TEXTS, 4000)),
    "litdata, dicts": (LitdataDocuments, lambda folder: write_texts(folder, [{"text": text} for text in TEXTS], 4000)),
    "Parquet": (ParquetDocuments, write_parquet),
    "JSON lines": (JSONLinesDocuments, write_lines),
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    for name, (_, write) in KINDS.items():
        write(root / name)
    return root


@pytest.fixture(scope="module")
def tokenizer():
    return bytes_tokenizer()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of one file or row group, and windows of a few documents, so that small sources have many."""
    monkeypatch.setattr("datamodules.preparation.readers.source_files.LEAST", 1)
    monkeypatch.setattr(streamed, "SHUFFLED", 3000)
    monkeypatch.setattr(streamed, "_ENCODED", 500)


@pytest.fixture
def build(sources, tokenizer):
    def make(kind="MDS", **options):
        options = {"tokenizer": PretrainedTokenizer(tokenizer), "sequence_length": 16, "batch_size": 4,
                   "validation_documents": 10, "validation_fraction": 0.5} | options  # fmt: skip
        data = StreamingTextDataModule(str(sources / kind), options.pop("reader", KINDS[kind][0]), **options)
        data.setup()
        return data

    return make


def loader(data, rank=0, world_size=1, batch_size=4, num_workers=0, **order):
    order = {"shuffle": True, "seed": 0} | order
    batches = data.packed(
        "train", sequence_length=16, batch_size=batch_size, rank=rank, world_size=world_size, **order
    )
    return TokenLoader(batches, num_workers, vocab_size=data.vocab_size)


def endless(loader):
    while True:
        yield from loader


def taken(loader, count):
    return list(islice(endless(loader), count))


def stream(batches):
    """Returns the tokens of unmasked batches, whose labels are the tokens that follow."""
    rows = torch.cat([batch["input_ids"].flatten() for batch in batches])
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    assert torch.equal(rows[1:], labels[:-1])
    return [*rows.tolist(), int(labels[-1])]


def ids_of(data, documents):
    return [*chain.from_iterable([*ids, END] for ids in data.tokenizer.encode_batch(list(documents)))]


def held_out(data):
    ids = data._validation.ids.tolist()
    return {data.tokenizer.decode(part) for part in split(ids)}


def split(ids):
    """Returns documents that are complete in a stream of ids."""
    found, part = [], []
    for number in ids:
        if number == END:
            found.append(part)
            part = []
        else:
            part.append(number)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_without_shuffling_it_is_the_text_of_the_folder_again_and_again(build, kind):
    data = build(kind)
    training = [text for text in TEXTS if text not in held_out(data)]
    assert len(training) == len(TEXTS) - 10
    epoch = ids_of(data, training)
    batches = taken(loader(data, shuffle=False), 2 * len(epoch) // 64 + 1)
    expected = (epoch * 3)[: len(batches) * 64 + 1]
    assert stream(batches) == expected


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.ci] * (kind == "Parquet")) for kind in KINDS]
)
def test_each_epoch_has_each_document_once_in_another_order(build, kind):
    data = build(kind)
    training = [text for text in TEXTS if text not in held_out(data)]
    size = len(ids_of(data, training))
    found = [data.tokenizer.decode(ids) for ids in split(stream(taken(loader(data), 3 * size // 64)))]
    epochs = [found[number * len(training) : (number + 1) * len(training)] for number in range(2)]
    assert [Counter(epoch) for epoch in epochs] == [Counter(training)] * 2
    assert epochs[0] != epochs[1]
    assert (
        taken(loader(data, seed=1), 1)[0]["input_ids"].tolist()
        != taken(loader(data), 1)[0]["input_ids"].tolist()
    )
    places = [training.index(text) for text in epochs[0]]
    steps = np.abs(np.diff(places))
    assert np.median(steps) > 8  # neighbours come from different files


@pytest.mark.parametrize("mask", [False, True])
def test_batches_are_those_of_stored_tokens(build, tmp_path, mask):
    data = build(mask_documents=mask)
    training = [text for text in TEXTS if text not in held_out(data)]
    ids = [[*ids, END] for ids in data.tokenizer.encode_batch(training)]
    TokenShards().write(ids, tmp_path / "tokens", data.vocab_size)
    stored = Concatenate(mask_documents=mask).batches(tmp_path / "tokens", sequence_length=16, batch_size=4)
    count = sum(map(len, ids)) // 64 - 1  # in the next epoch the last token has a label here
    for (_, one), other in zip(islice(stored, count), taken(loader(data, shuffle=False), count), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    validation = data.packed("validation", sequence_length=16, batch_size=4, pad=True)
    texts = [text for text in TEXTS if text in held_out(data)]
    TokenShards().write(
        [[*i, END] for i in data.tokenizer.encode_batch(texts)], tmp_path / "val", data.vocab_size
    )
    padded = Concatenate(mask_documents=mask).batches(
        tmp_path / "val", sequence_length=16, batch_size=4, pad=True
    )
    assert len(validation) == len(padded)
    for (_, one), (_, other) in zip(padded, validation, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def same(one, other):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("MDS", 0),
        *(pytest.param(kind, 2, marks=pytest.mark.ci) for kind in ("MDS", "Parquet")),
        pytest.param("Parquet", 0, marks=pytest.mark.slow),
    ],
)
def test_it_resumes_anywhere_with_any_number_of_workers_and_ranks(build, kind, workers):
    data = build(kind)
    expected = taken(loader(data), 200)  # more than an epoch
    for at in (1, 7, 60, 117, 150):
        begun = loader(data, num_workers=workers)
        assert same(taken(begun, at), expected[:at])
        state = json.loads(json.dumps(begun.state_dict()))
        assert state["cursor"]["tokens"] == at * 64
        resumed = loader(build(kind), num_workers=2 - workers)
        resumed.load_state_dict(state)
        assert same(taken(resumed, 40), expected[at : at + 40])
        for rank in range(2):
            part = loader(build(kind), rank, 2, batch_size=2)
            part.load_state_dict(state)
            rows = [
                {name: rows[rank * 2 : rank * 2 + 2] for name, rows in b.items()}
                for b in expected[at : at + 9]
            ]
            assert same(taken(part, 9), rows)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.ci)])
def test_rows_may_change_in_mid_run(build, workers):
    data = build("JSON lines")
    whole = stream(taken(loader(data), 40))
    begun = loader(data, num_workers=workers)
    first = stream(taken(begun, 5))[:-1]
    begun.reshape(sequence_length=10, batch_size=3)
    second = stream(taken(begun, 4))[:-1]
    begun.skip(2)
    third = stream(taken(begun, 3))
    assert first + second == whole[: 5 * 64 + 4 * 30]
    assert third == whole[5 * 64 + 6 * 30 :][: 3 * 30 + 1]


def test_resuming_does_not_tokenise_what_was_before(build):
    data = build()
    begun = loader(data)
    taken(begun, 100)
    state = begun.state_dict()
    resumed = build()
    encode, encoded = resumed._stream.encode, []
    resumed._stream.encode = lambda texts: encoded.extend(texts) or encode(texts)
    later = loader(resumed)
    later.load_state_dict(state)
    taken(later, 1)
    assert sum(map(len, encoded)) < 2 * (streamed._ENCODED + max(map(len, TEXTS)))


def test_no_more_is_held_than_is_shuffled(build, sources):
    class Counting(MDSDocuments):
        """Notes how many characters were read."""

        read_so_far = 0

        def read(self, task, reject):
            for batch in super().read(task, reject):
                for row in range(len(batch)):  # a document at a time
                    Counting.read_so_far += len(batch["text"][row].as_py())
                    yield batch.slice(row, 1)

    data = build(reader=Counting)
    Counting.read_so_far = given = most = 0
    place = (0, 0, 0)
    for _, ids in islice(data._stream.documents(place, True, 0), 200):
        given += len(data.tokenizer.decode(ids[:-1].tolist()))
        most = max(most, Counting.read_so_far - given)
    held = streamed.SHUFFLED + streamed._ENCODED + 20 * max(map(len, TEXTS))  # and documents for validation
    assert most < held < sum(map(len, TEXTS)) // 2


def test_another_order_is_refused(build, sources, tmp_path):
    state = loader(build()).state_dict()
    for other in (loader(build(), seed=1), loader(build(), shuffle=False), loader(build("Parquet")),
                  loader(build(transforms=[Normalise(lower=True)])), loader(build(validation_documents=20))):  # fmt: skip
        with pytest.raises(ConfigError, match="another order"):
            other.load_state_dict(state)
    write_mds(tmp_path / "moved", TEXTS, 4000)  # a copy in another folder, of another time
    moved = StreamingTextDataModule(
        str(tmp_path / "moved"),
        MDSDocuments,
        PretrainedTokenizer(bytes_tokenizer()),
        validation_documents=10,
        validation_fraction=0.5,
    )
    moved.setup()
    loader(moved).load_state_dict(state)


def test_transforms_and_a_source_for_validation(build, sources, tmp_path):
    write_mds(tmp_path / "val", ["Only  THIS.\r\n", " ", "And THAT."])
    data = build(transforms=[Normalise(lower=True)], validation_source=str(tmp_path / "val"))
    assert held_out(data) == {"only  this.", "and that."}
    size = len(ids_of(data, [text.lower() for text in TEXTS]))
    found = [data.tokenizer.decode(ids) for ids in split(stream(taken(loader(data), size // 64 + 2)))]
    assert {text.lower() for text in TEXTS} <= {*found}


def test_the_length_of_an_epoch_is_about_right(build):
    for kind in KINDS:
        data = build(kind)
        assert data.train_tokens == pytest.approx(len(ids_of(data, TEXTS)), rel=0.25)
    loaded = loader(data)
    assert len(list(loaded)) == len(loaded) == data.train_tokens // 64
    assert loaded.epochs() == {"all": pytest.approx(1, abs=64 / data.train_tokens)}


def test_of_long_documents_a_share_is_held_out_too(tmp_path, tokenizer):
    (tmp_path / "books").mkdir()
    for number, text in enumerate(TEXTS[:40]):
        (tmp_path / "books" / f"{number:02}.txt").write_text(text)
    data = StreamingTextDataModule(
        str(tmp_path / "books"), TextDocuments, PretrainedTokenizer(tokenizer), validation_fraction=0.25
    )
    data.setup()
    assert len(held_out(data)) == 4  # of the 16 pieces that are looked at


def test_mistakes_are_explained(build, sources, tmp_path):
    def refused(said, **options):
        with pytest.raises(ConfigError, match=said) as caught:
            build(**options)
        assert len(str(caught.value).splitlines()) <= 4

    refused("trained on all text first", tokenizer=BPETokenizer(300))
    refused("ExactDuplicates has to see all documents", transforms=[ExactDuplicates()])
    refused("validation_fraction is 0.7", validation_fraction=0.7)
    refused("validation_documents is 0", validation_documents=0)
    for reader in (MDSDocuments, ParquetDocuments):
        with pytest.raises(ConfigError, match=r"data\.source=s3://bucket/text is a URL"):
            reader("s3://bucket/text")
    write_mds(tmp_path / "blank", [" ", ""])
    refused("no document for validation", validation_source=str(tmp_path / "blank"))
    write_mds(tmp_path / "one", ["Only one."])
    data = StreamingTextDataModule(
        str(tmp_path / "one"), MDSDocuments, PretrainedTokenizer(bytes_tokenizer())
    )
    data.setup()
    with pytest.raises(ConfigError, match="no document is left for training"):
        next(iter(loader(data).batches))
    folder = write_mds(tmp_path / "damaged", TEXTS, 4000)
    path = sorted(folder.glob("*.mds"))[1]
    path.write_bytes(path.read_bytes()[:-7])
    data = StreamingTextDataModule(str(folder), MDSDocuments, PretrainedTokenizer(bytes_tokenizer()))
    with pytest.raises(ConfigError, match=r"shard.00001.mds: broken chunk: .*\n.*`prepare` the source"):
        data.setup()


@pytest.mark.ci
def test_a_process_ends_quietly_in_the_middle_of_the_text(sources):
    code = f"""
from datamodules.preparation.readers.mds_documents import MDSDocuments
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.streaming_text_datamodule import StreamingTextDataModule
data = StreamingTextDataModule({str(sources / "MDS")!r}, MDSDocuments, PretrainedTokenizer({bytes_tokenizer()!r}))
data.setup()
batches = data.packed("train", sequence_length=16, batch_size=4, shuffle=True)
batches.take(batches.cursor, 4)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HOUSE)
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stderr


@pytest.mark.ci
def test_fit_from_the_command_line_and_resume(sources, tmp_path):
    words = ["--config=quickstart", "--config=data/streaming", "--config=techniques/warmup_constant", f"--data.source={sources / 'MDS'}",
             f"--data.tokenizer.path={bytes_tokenizer()}", "--model.network.vocab_size=320", "--data.batch_size=2",
             "--data.sequence_length=32", "--model.lr_scheduler.warmup_steps=1", "--trainer.log_every_n_steps=1",
             "--callbacks.TextSamples.max_new_tokens=2", "--data.validation_documents=5", "--trainer.limit_val_batches=1"]  # fmt: skip

    def fit(name, steps, *more):
        done = run(
            [
                "fit",
                *words,
                f"--trainer.max_steps={steps}",
                f"--trainer.default_root_dir={tmp_path / name}",
                *more,
            ],
            tmp_path,
        )
        assert done.code == 0, done.error_text
        newest = max(tmp_path.glob(f"{name}*/**/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        return torch.load(newest, weights_only=True)["state_dict"]

    whole = fit("whole", 8)
    fit("part", 4)
    resumed = fit("part", 8, "--ckpt_path=last")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow  # a source large enough to tell
def test_memory_does_not_grow_with_the_source(tmp_path):
    code = f"""
import json
import resource
from pathlib import Path

from datamodules.packing import streamed
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.mds_documents import MDSDocuments
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.streaming_text_datamodule import StreamingTextDataModule
from tests.support.raw_folders import write_mds

streamed.SHUFFLED = 1 << 20

def write_lines(folder, texts, _):
    folder.mkdir()
    with open(folder / "part.jsonl", "w") as lines:
        lines.writelines(json.dumps({{"text": text}}) + "\\n" for text in texts)

def epoch(reader, source, megabytes):
    data = StreamingTextDataModule(str(source), reader, PretrainedTokenizer({bytes_tokenizer()!r}))
    data.setup()
    read, most = 0, 0
    def encode(texts):  # to read it is what takes memory
        nonlocal read, most
        read += sum(map(len, texts))
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        most = max(most, resident)
        return [[1] for _ in texts]
    data._stream.encode = encode
    batches = data.packed("train", sequence_length=16, batch_size=4, shuffle=True)
    cursor = batches.cursor
    while cursor["epoch"] == 0:
        rows, cursor = batches.take(cursor, 4)
    assert read > 0.9 * megabytes * 1e6
    return most

root = Path({str(tmp_path)!r})
peaks = []
for reader, write in ((MDSDocuments, write_mds), (JSONLinesDocuments, write_lines)):
    for megabytes in (10, 40):
        source = root / f"{{reader.__name__}}{{megabytes}}"
        write(source, (f"{{number:9}} " * 1000 for number in range(megabytes * 100)), 1 << 20)
        peaks.append(epoch(reader, source, megabytes))
print(json.dumps(peaks))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HOUSE)
    assert done.returncode == 0, done.stderr
    small, large, small_lines, large_lines = json.loads(done.stdout)
    assert large - small < 15e6  # of 30 MB more
    assert large_lines - small_lines < 15e6
