import inspect
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from multiprocessing import get_context

import numpy as np
import pyarrow
import pytest
from litdata import StreamingDataset, TokensLoader

from core import durable
from core.__main__ import main
from core.contracts import Transform
from core.errors import ConfigError
from core.pretrain_datamodule import PretrainDataModule
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.token_preparation import TokenPreparation
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.transforms.personal_data import PersonalData
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.commands.prepare import _OF_READING
from tests.conftest import HOUSE
from tests.support.corpus import (
    HEAVY,
    contents,
    corpus,
    documents_of,
    preparation,
    prepare,
    texts,
    write_lines,
)
from tests.support.full_disk import small_disk
from toolkit.document_filter import DocumentFilter


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """Cuts sources of a few kB into many tasks."""
    monkeypatch.setattr(source_files, "LEAST", 700)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("source"))


@pytest.fixture
def undisturbed(source, tmp_path):
    return contents(prepare(source, tmp_path / "undisturbed"))


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.ci
def test_nothing_heavy_is_imported_and_least_of_all_for_a_finished_folder(tmp_path):
    write_lines(tmp_path / "text.jsonl", texts(60))
    command = [
        "prepare",
        "--config",
        "data/text",
        f"--data.source={tmp_path}/text.jsonl",
        f"--output={tmp_path}/out",
    ]
    command += ["--data.tokenizer.vocab_size=300", "--data.engine=null"]
    script = f"import sys\nfrom core.__main__ import main\nassert main({command}) == 0\n"
    script += f"heavy = {HEAVY} & sys.modules.keys()\n"
    script += "heavy -= {'torchmetrics'} - {name.partition('.')[0] for name in sys.modules if '.' in name}\n"  # its stand-in alone
    script += "print('heavy:', *sorted(heavy))"
    for most in ({"matplotlib"}, set()):  # the report has a picture
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=HOUSE, capture_output=True, text=True, check=True
        )
        assert set(done.stdout.splitlines()[-1].split()[1:]) <= most


# What comes out -----------------------------------------------------------------------------------------


def test_every_document_is_stored_once_and_in_order(source, tmp_path):
    folder = prepare(source, tmp_path / "out")
    everything = list(JSONLinesDocuments(str(source)).documents())
    train, validation = documents_of(folder, "train"), documents_of(folder, "validation")
    assert sorted(train + validation) == sorted(everything) == sorted(texts(120))
    assert [text for text in everything if text in set(train)] == train
    assert [text for text in everything if text in set(validation)] == validation
    assert 10 < len(validation) < 45


def test_the_manifest_counts_what_is_there(source, tmp_path):
    folder = prepare(source, tmp_path / "out")
    manifest, stores = manifest_of(folder), {s: TokenStore(folder / s) for s in ("train", "validation")}
    for split, store in stores.items():
        assert manifest[f"{split}_tokens"] == len(store)
        assert manifest[f"{split}_documents"] == store.number_of_documents
    assert set(manifest["sources"]) == {"part", "books"}
    total = Counter()
    for counts in manifest["sources"].values():
        total.update(counts)
    assert total["tokens"] == sum(map(len, stores.values()))
    assert total["documents"] == 120
    assert total["bytes"] == manifest["text_bytes"] == sum(len(text.encode()) for text in texts(120))
    assert sum(manifest["lengths"].values()) == 120
    sizes = [np.diff([*store.document_starts(), len(store)]) for store in stores.values()]
    expected = Counter(int(np.log2(size)) for size in np.concatenate(sizes))
    assert manifest["lengths"] == {str(key): expected[key] for key in sorted(expected)}
    listed = {
        *manifest["files"],
        "manifest.json",
        "plan.json",
        "report.md",
        "report.html",
        "report.json",
        "lengths.png",
    }
    assert set(contents(folder)) == listed


def test_litdata_reads_the_joined_index(source, tmp_path):
    folder = prepare(source, tmp_path / "out")
    index = json.loads((folder / "train" / "index.json").read_text())
    assert len(index["chunks"]) > 10
    rows = list(StreamingDataset(str(folder / "train"), item_loader=TokensLoader(block_size=4)))
    assert len(rows) == sum(chunk["dim"] // 4 for chunk in index["chunks"])
    assert np.array_equal(np.concatenate(rows[:3]), TokenStore(folder / "train").read(0, 12))


def test_shards_have_about_the_size_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 1 << 20)
    path = write_lines(tmp_path / "one.jsonl", texts(400))
    folder = prepare(path, tmp_path / "out", writer=TokenShards(4000))
    sizes = [chunk.stat().st_size for chunk in sorted((folder / "train").glob("*.bin"))]
    assert len(sizes) > 4
    assert sorted(size > 3500 for size in sizes) == [False] + [True] * (len(sizes) - 1)
    assert max(sizes) < 4600


def test_on_first_use_and_by_command_the_tokens_are_the_same(source, tmp_path):
    folder = prepare(source, tmp_path / "out", transforms=[])
    stages = JSONLinesDocuments, BPETokenizer(300), TokenShards(900), Concatenate()
    data = PretrainDataModule(
        *stages, source=str(source), cache_dir=str(tmp_path / "cache"), validation_fraction=0.2
    )
    data.prepare_data()
    by_command, on_use = contents(folder), contents(data.folder)
    assert set(by_command) - set(on_use) == {
        "plan.json",
        "report.md",
        "report.html",
        "report.json",
        "lengths.png",
    }
    changed = {name for name, content in on_use.items() if by_command[name] != content}
    assert changed == {"manifest.json"}  # the label in it, and the digests of what no run reads
    command, use = (
        {key: value for key, value in manifest_of(where).items() if key not in ("extras", "sha256")}
        for where in (folder, data.folder)
    )
    assert {**command, "source": str(source)} == use


def test_a_prepared_folder_is_trained_on_as_it_is(source, tmp_path):
    folder = prepare(source, tmp_path / "out")
    other = JSONLinesDocuments, BPETokenizer(2000), TokenShards(), Concatenate()
    data = PretrainDataModule(*other, source=str(folder), cache_dir=str(tmp_path / "cache"))
    assert data.vocab_size == manifest_of(folder)["vocab_size"]
    data.prepare_data()
    data.setup()
    assert data.folder == folder
    assert data.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert next(iter(data.train_dataloader()))["input_ids"].shape == (8, 256)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_no_byte(source, tmp_path, undisturbed, workers):
    assert contents(prepare(source, tmp_path / "out", engine=LocalEngine(workers))) == undisturbed


def test_large_vocabularies_are_stored_as_uint32(source, tmp_path):
    class Wide(BPETokenizer):
        """Claims more ids than there are."""

        vocab_size = property(lambda self: 70_000, lambda self, value: None)

    folder = prepare(source, tmp_path / "out", tokenizer=Wide(300))
    assert TokenStore(folder / "train").read(0, 1).dtype == np.uint32


def test_a_tokenizer_that_leaves_its_vocabulary_is_named(source, tmp_path):
    class Narrow(BPETokenizer):
        """Claims fewer ids than there are."""

        vocab_size = property(lambda self: 270, lambda self, value: None)

    with pytest.raises(ConfigError, match=r"gives the id 2\d\d with a vocab_size of 270"):
        prepare(source, tmp_path / "out", tokenizer=Narrow(300))


def test_a_damaged_shard_is_named_when_it_is_trained_on(source, tmp_path):
    folder = prepare(source, tmp_path / "out")
    shard = sorted((folder / "train").glob("*.bin"))[3]
    shard.write_bytes(shard.read_bytes()[:-1])
    data = PretrainDataModule(TextDocuments, BPETokenizer(), TokenShards(), Concatenate(), source=str(folder))
    data.setup()
    with pytest.raises(ConfigError, match=rf"{shard}.*damaged.*\n.*verify-data"):
        data.train_dataloader()
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"{shard}"):
        data.train_dataloader()


# Rejects and stages -------------------------------------------------------------------------------------


def broken(tmp_path):
    path = write_lines(tmp_path / "in" / "a.jsonl", texts(98))
    with path.open("ab") as stream:
        stream.write(b'{"text": "\xff"}\n{"text": 1}\n \n{"text": " "}\n')
    return path


def test_what_cannot_be_used_is_counted_and_listed(tmp_path):
    path = broken(tmp_path)
    folder = prepare(path, tmp_path / "out", max_reject_fraction=0.05)
    manifest = manifest_of(folder)
    assert manifest["rejected"] == {"not UTF-8": 1, 'the field "text" is not a string': 1}
    assert manifest["blank"] == 1
    assert manifest["train_documents"] + manifest["validation_documents"] == 98
    lines = [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines] == list(manifest["rejected"])
    assert all(line["source"] == "a" and str(path) in line["place"] for line in lines)
    assert "| rejected | not UTF-8 | 1 |" in (folder / "report.md").read_text()


def test_too_many_rejects_stop_the_run_and_a_higher_limit_goes_on(tmp_path):
    path = broken(tmp_path)
    with pytest.raises(ConfigError, match=r"2 of 100 documents .*max_reject_fraction=0.01.*\n.*a.jsonl"):
        prepare(path, tmp_path / "out", max_reject_fraction=0.01)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert prepare(path, tmp_path / "out", max_reject_fraction=0.02)
    with pytest.raises(ConfigError, match=r"a.jsonl.*not UTF-8.*\n.*max_reject_fraction"):
        prepare(path, tmp_path / "strict")


class FirstOfItsKind(Transform):
    """Drops a document whose first word began another before it, anywhere."""

    needs_all_documents = True

    def fingerprint(self):
        return {}

    def map(self, batches, findings):
        found = {row["text"].split()[0]: row["id"] for b in batches for row in reversed(b.to_pylist())}
        findings.write_text(json.dumps(found))

    def reduce(self, findings, conclusion):
        first = {}
        for path in reversed(findings):
            first |= json.loads(path.read_text())
        conclusion.write_text(json.dumps(first))

    def load(self, conclusion):
        self.first = json.loads(conclusion.read_text())

    def apply(self, batch, drop):
        keep = [self.first[row["text"].split()[0]] == row["id"] for row in batch.to_pylist()]
        drop("seen before", keep.count(False))
        return batch.filter(pyarrow.array(keep))


@pytest.mark.parametrize("engine", [None, pytest.param(LocalEngine(2), marks=pytest.mark.ci)])
def test_a_stage_may_look_at_all_documents_first(source, tmp_path, engine):
    folder = prepare(source, tmp_path / "out", transforms=[FirstOfItsKind()], engine=engine)
    kept = documents_of(folder, "train") + documents_of(folder, "validation")
    words = {text.split()[0] for text in texts(120)}
    assert Counter(text.split()[0] for text in kept) == dict.fromkeys(words, 1)
    [stage] = manifest_of(folder)["transforms"]
    assert stage["dropped"] == {"seen before": 120 - len(words)}


class NoQuick(DocumentFilter):
    """Drops a document that has a word."""

    def __init__(self, word):
        self.word = word

    def reason(self, text):
        return f"has {self.word}" if self.word in text.split() else None


def test_examples_of_what_was_dropped_do_not_depend_on_the_tasks(source, tmp_path):
    """Two filters of one class are told apart, and each example is a document that it dropped."""
    word, other = texts(120)[3].split()[0], "``|<b>"
    more = tmp_path / "more"
    shutil.copytree(source, more)
    (more / "last.jsonl").write_text(json.dumps({"text": f"{other} at the end"}) + "\n")
    found = []
    for engine in (None, LocalEngine(2)):
        filters = [NoQuick(word), NoQuick(other)]
        folder = prepare(more, tmp_path / f"out-{len(found)}", transforms=filters, engine=engine)
        found.append(json.loads((folder / "report.json").read_text())["dropped_examples"])
        text = (folder / "report.md").read_text()
        assert f"## Dropped by 2. NoQuick: has {other}" in text
        assert f"``` {other} at the end ```" in text
    assert found[0] == found[1]
    assert list(found[0]) == ["1. NoQuick", "2. NoQuick"]
    shown = found[0]["1. NoQuick"][f"has {word}"]
    assert 1 <= len(shown) <= 5
    assert all(word in text.split() for _, _, text in shown)


def test_what_was_replaced_is_counted_in_the_report(source, tmp_path):
    """The same number for any number of workers; the stored text has placeholders in place of the addresses."""
    more = tmp_path / "more"
    shutil.copytree(source, more)
    rows = [json.dumps({"text": f"write to anna{n}@example.org or bob@example.org"}) for n in range(8)]
    (more / "last.jsonl").write_text("\n".join(rows[:5]) + "\n")
    (more / "least.jsonl").write_text("\n".join(rows[5:]) + "\n")
    for engine in (None, LocalEngine(2)):
        transforms = [PersonalData(["EMAIL", "PHONE"])]
        folder = prepare(more, tmp_path / f"out-{engine is None}", transforms=transforms, engine=engine)
        report = json.loads((folder / "report.json").read_text())
        assert report["counted"] == {"1. PersonalData": {"EMAIL replaced": 16}}
        assert "| 1. PersonalData | EMAIL replaced | 16 |" in (folder / "report.md").read_text()
        assert not [
            text for split in ("train", "validation") for text in documents_of(folder, split) if "@" in text
        ]


# Interruptions ------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_killed_at_20_random_points_it_ends_in_the_same_bytes(source, tmp_path, undisturbed):
    rng, kills, finished = random.Random(0), 0, 0
    begin = time.monotonic()
    prepare(source, tmp_path / "timed")
    whole = time.monotonic() - begin
    while kills < 20 or not finished:
        folder = tmp_path / f"out-{finished}"
        child = get_context("fork").Process(target=prepare, args=(source, folder))
        child.start()
        child.join(rng.uniform(0, 0.6 * whole) if kills < 20 else 240)
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.join(240)
        if child.exitcode == 0:
            assert contents(folder) == undisturbed
            finished += 1


@pytest.mark.slow
def test_with_all_its_workers_killed_at_20_random_points_it_ends_in_the_same_bytes(tmp_path):
    """The real command, 2 workers."""
    source = corpus(tmp_path / "source", documents=60_000)

    def words(folder):
        return [sys.executable, "-m", "core", *command(source, folder, "--data.engine.workers=2")]

    begin = time.monotonic()
    subprocess.run(words(tmp_path / "whole"), cwd=HOUSE, check=True)
    whole, rng = time.monotonic() - begin, random.Random(0)
    for _ in range(20):
        run = subprocess.Popen(words(tmp_path / "out"), cwd=HOUSE, start_new_session=True)
        time.sleep(rng.uniform(0, whole))
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    subprocess.run(words(tmp_path / "out"), cwd=HOUSE, check=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def command(source, folder, *more):
    words = ["prepare", "--config=data/text", f"--data.source={source}", f"--output={folder}"]
    return [*words, "--data.reader=JSONLinesDocuments", "--data.tokenizer.vocab_size=300", *more]


@pytest.mark.ci
def test_without_space_it_says_so_and_with_space_it_goes_on(source, tmp_path, capsys):
    with small_disk(tmp_path / "disk", "150k") as disk:
        assert main(command(source, disk / "out")) == 2
        output = capsys.readouterr().err.splitlines()
        message = [line for line in output if not line.startswith(("Preparing", "tasks"))]
        assert str(disk / "out") in message[0]
        assert "No space left on device" in message[0]
        assert "run the same again" in message[-1]
        assert len(message) < 4
        assert not (disk / "out" / "manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        assert main(command(source, disk / "out")) == 0
        assert main(command(source, tmp_path / "out")) == 0
        assert contents(disk / "out") == contents(tmp_path / "out")


def test_a_file_that_may_not_grow_is_named(source, tmp_path):
    receiver, sender = get_context("fork").Pipe(duplex=False)
    child = get_context("fork").Process(target=_prepare_small_files, args=(source, tmp_path / "out", sender))
    child.start()
    message = receiver.recv()
    child.join()
    assert str(tmp_path / "out") in message
    assert "File too large" in message
    assert not (tmp_path / "out" / "manifest.json").exists()


def _prepare_small_files(source, folder, sender):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    try:
        prepare(source, folder)
        sender.send("it was written")
    except (ConfigError, OSError) as error:
        sender.send(str(error))


# Existing output ----------------------------------------------------------------------------------------


def test_run_again_it_writes_nothing(source, tmp_path):
    folder = prepare(source, tmp_path / "out")
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    prepare(source, folder)
    assert stamps == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_output_of_another_configuration_is_kept_unless_told_otherwise(source, tmp_path):
    folder = prepare(source, tmp_path / "out")
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"tokenizer.vocab_size: 290 \(the folder has 300\)\n.*--overwrite"):
        prepare(source, folder, tokenizer=BPETokenizer(290))
    assert contents(folder) == before
    (folder / "mine.txt").write_text("mine")
    prepare(source, folder, overwrite=True, tokenizer=BPETokenizer(290))
    assert manifest_of(folder)["vocab_size"] == 290
    assert (folder / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("finished", [True, False])
def test_another_field_of_the_same_files_is_another_configuration(finished, tmp_path):
    (tmp_path / "source").mkdir()
    rows = [{"text": text, "title": text[:40], "site": "a"} for text in texts(60)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "source" / "rows.jsonl").write_text(lines, encoding="utf-8")
    source = tmp_path / "source"
    folder = prepare(source, tmp_path / "out")
    digest = manifest_of(folder)["digest"]
    if not finished:
        (folder / "manifest.json").unlink()
    for options in ({"text_field": "title"}, {"source_field": "site"}):
        [name] = options
        with pytest.raises(ConfigError, match=rf"reader.{name}: {options[name]} \(the folder has "):
            prepare(source, folder, reader=partial(JSONLinesDocuments, **options))
    prepare(source, folder, reader=partial(JSONLinesDocuments, text_field="title"), overwrite=True)
    assert manifest_of(folder)["digest"] != digest


def test_a_changed_source_is_noticed(tmp_path):
    source = corpus(tmp_path / "source")
    folder = prepare(source, tmp_path / "out")
    path = source / "part-000.jsonl"
    write_lines(path, texts(20, seed=5))
    with pytest.raises(ConfigError, match=rf"{path} has changed"):
        prepare(source, folder)


def test_a_folder_of_somebody_elses_is_left_alone(source, tmp_path):
    (tmp_path / "out").mkdir()
    theirs = {"thesis.tmp": b"mine", "work/notes.tmp": b"mine", "work.tmp/draft.txt": b"mine"}
    for name, content in theirs.items():
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_bytes(content)
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="not a folder that prepare has written"):
            prepare(source, tmp_path / "out", overwrite)
    assert contents(tmp_path / "out") == theirs


def test_options_of_reading_are_those_of_the_datamodule_that_preparation_does_not_take():
    options = inspect.signature(PretrainDataModule).parameters.keys()
    assert options - inspect.signature(TokenPreparation.build).parameters.keys() == _OF_READING


def test_what_a_run_left_that_was_killed_over_its_plan_is_taken_away(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".plan.json.0123456789ab.tmp").write_text("{")
    prepare(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_two_at_once_do_not_write_to_one_folder(source, tmp_path):
    from plugins.commands.prepare import _claimed

    (tmp_path / "out").mkdir()
    with _claimed(tmp_path / "out"), pytest.raises(ConfigError, match="Another process is preparing"):
        prepare(source, tmp_path / "out")


def test_a_half_written_folder_is_not_trained_on(source, tmp_path):
    folder = prepare(source, tmp_path / "out")
    (folder / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"is not finished: it has no manifest.json"):
        PretrainDataModule(TextDocuments, BPETokenizer(), TokenShards(), Concatenate(), source=str(folder))


# The command --------------------------------------------------------------------------------------------


def run(*words, capsys):
    code = main(["prepare", *map(str, words)])
    return code, capsys.readouterr()


def test_the_shipped_config_prepares_and_verifies(source, tmp_path, capsys):
    words = ["--config=data/text", f"--data.source={source}", "--data.reader=JSONLinesDocuments"]
    words += [f"--output={tmp_path}/out", "--data.engine.workers=2", "--data.tokenizer.vocab_size=300"]
    code, output = run(*words, capsys=capsys)
    assert code == 0, output.err
    assert "120 documents" in output.out
    assert "tasks" in output.err
    assert main(["verify-data", str(tmp_path / "out")]) == 0
    assert "is complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--data.tokenizer.vocab_siz=3"],
            "BPETokenizer has no argument 'vocab_siz'. Did you mean vocab_size?",
        ),
        (["--data.sourc=x"], "no argument 'sourc'. Did you mean source?"),
        (["--data.source=/nowhere"], "data.source=/nowhere: no such file or folder"),
        (["--trainer.max_steps=3"], "--trainer.max_steps: prepare takes options of the section data"),
        (["--data.validation_fraction=2"], "data.validation_fraction is 2"),
        (["--data.engine.workers=0"], "LocalEngine: workers is 0"),
        (["--data.transforms=[Normalize]"], "Normali"),
        (["--data.source=touch pwned", "--data.reader=os.system"], "os.system"),
    ],
)
def test_mistakes_are_told_in_short(words, message, tmp_path, capsys):
    code, output = run("--config=data/text", f"--output={tmp_path}/out", *words, capsys=capsys)
    assert code == 2
    assert message in output.err
    assert len(output.err.splitlines()) <= 10


NEEDY = '''
from core.technique import Package, technique
from datamodules.preparation.engines.local_engine import LocalEngine

@technique(paper="a blog post", needs=[Package("no-such-package>=2", extra="far")])
class FarEngine(LocalEngine):
    """Works far away."""
'''


def test_what_a_stage_needs_is_looked_for_first(tmp_path, capsys, packages, write_yaml):
    packages.add("acme", {"leyden.data": {"FarEngine": "acme:FarEngine"}}, NEEDY)
    path = write_yaml("far.yaml", "base: data/text\ndata:\n  init_args:\n    engine: FarEngine\n")
    code, output = run(f"--config={path}", f"--output={tmp_path}/out", capsys=capsys)
    assert code == 2
    place = f"FarEngine ({path}:4)"
    assert f"{place}: no-such-package is not installed: pip install 'leyden[far]'" in output.err
    assert not (tmp_path / "out").exists()


def test_a_corpus_without_text_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": " "}\n')
    with pytest.raises(ConfigError, match=rf"data.source \({path}\): there is no text"):
        prepare(path, tmp_path / "out")


def test_the_plan_depends_on_files_not_on_where_it_is_asked_from(source):
    assert preparation(source).plan() == preparation(source).plan()


def test_a_write_that_stopped_short_is_explained():
    short = OSError("600 requested and 496 written")  # numpy's, without a number
    assert (
        durable.write_error(short)
        == "No space left on device, or File too large (600 requested and 496 written)"
    )
    assert durable.write_error(OSError(13, "Permission denied", "x")) == "Permission denied"
