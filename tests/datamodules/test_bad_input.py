"""Bad input, as users meet it: each command ends with exit code 2 and a few lines that name the file."""

import json
import os
import re
import shutil

import pytest

from core.__main__ import main
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from tests.support.corpus import corpus, prepare, write_lines
from tests.support.full_disk import small_disk
from tests.support.strange_folders import in_manifest

STAGES = {"reader": "JSONLinesDocuments", "writer": "TokenShards", "packing": "Concatenate"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return prepare(corpus(folder / "source", documents=60), folder / "out")


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


@pytest.fixture
def config(tiny, write_yaml, tmp_path):
    """Writes a tiny run on a source."""

    def write(source, **data):
        tiny["trainer"] |= {"default_root_dir": str(tmp_path / "run"), "limit_val_batches": 1}
        tiny["model"]["network"]["init_args"]["vocab_size"] = 320
        options = {
            "source": str(source),
            "cache_dir": str(tmp_path / "cache"),
            "tokenizer": {"class_path": "BPETokenizer", "init_args": {"vocab_size": 300}},
            "sequence_length": 16,
            "batch_size": 4,
        }
        tiny["data"] = {"class_path": "PretrainDataModule", "init_args": STAGES | options | data}
        return write_yaml("run.yaml", tiny)

    return write


@pytest.fixture
def complaint(capsys):
    """Runs a command that has to fail kindly; returns what it says."""

    def run(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        lines = capsys.readouterr().err.splitlines()
        said = [line for line in lines if not line.startswith(("Preparing", "tasks "))]
        assert 0 < len(said) <= 10
        assert not any("Traceback" in line for line in said)
        return "\n".join(said)

    return run


# The text -----------------------------------------------------------------------------------------------


def _no_file(folder):
    folder.mkdir()
    return folder, "no such file or folder|none of the|no file|the folder is empty"


def _empty_file(folder):
    folder.mkdir()
    (folder / "empty.jsonl").touch()
    return folder / "empty.jsonl", "there is no text"


def _blank(folder):
    return write_lines(folder / "blank.jsonl", ["", " \n "]), "there is no text"


def _one_document(folder):
    return write_lines(folder / "one.jsonl", ["one and the same"] * 3), "single document"


@pytest.mark.parametrize("source", [_no_file, _empty_file, _blank, _one_document])
def test_a_corpus_without_enough_text(source, tmp_path, config, complaint):
    path, reason = source(tmp_path / "source")
    run = config(path)
    output = tmp_path / "prepared"
    for words in (["prepare", f"--config={run}", f"--output={output}"], ["fit", f"--config={run}"]):
        said = complaint(*words)
        assert re.search(reason, said)
        if source is not _one_document:
            assert str(path) in said
    assert not output.exists()


class Narrow(BPETokenizer):
    """Says that it has fewer ids than it gives."""

    vocab_size = property(lambda self: 270, lambda self, value: None)


def test_a_tokenizer_with_ids_beyond_its_vocabulary(tmp_path, config, complaint):
    narrow = {"class_path": f"{__name__}.Narrow", "init_args": {"vocab_size": 300}}
    run = config(corpus(tmp_path / "source", documents=20), tokenizer=narrow)
    output = tmp_path / "out"
    for words in (["prepare", f"--config={run}", f"--output={output}"], ["fit", f"--config={run}"]):
        assert "with a vocab_size of 270" in complaint(*words)
    assert not (output / "manifest.json").exists()


# The folder ---------------------------------------------------------------------------------------------


def shard(folder):
    return sorted((folder / "train").glob("*.bin"))[1]


def _cut(path):
    path.write_bytes(path.read_bytes()[:-3])
    return path


def _remove(path):
    path.unlink()
    return path


def _flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return path


def _no_chunks(folder):
    path = folder / "train" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chunks": []}))
    return path


def _other_tokenizer(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"type":"BPE"', '"type": "BPE"'))
    return path


def _pipe(folder):
    path = _remove(shard(folder))
    os.mkfifo(path)
    return path


def _no_vocabulary(folder):
    in_manifest(vocab_size=-1)(folder, None)
    return folder / "manifest.json"


DAMAGES = {
    "missing shard": lambda folder: _remove(shard(folder)),
    "truncated shard": lambda folder: _cut(shard(folder)),
    "flipped bit": lambda folder: _flip(shard(folder)),
    "pipe as a shard": _pipe,
    "vocabulary below 0": _no_vocabulary,
    "missing index": lambda folder: _remove(folder / "train" / "index.json"),
    "index without chunks": _no_chunks,
    "truncated index": lambda folder: _cut(folder / "validation" / "index.json"),
    "missing manifest": lambda folder: _remove(folder / "manifest.json"),
    "truncated manifest": lambda folder: _cut(folder / "manifest.json"),
    "missing tokenizer": lambda folder: _remove(folder / "tokenizer.json"),
    "truncated tokenizer": lambda folder: _cut(folder / "tokenizer.json"),
    "another tokenizer": _other_tokenizer,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_named_by_every_command(folder, config, complaint, damage):
    path = DAMAGES[damage](folder)
    assert str(path) in complaint("verify-data", folder) or damage == "missing manifest"
    if damage == "flipped bit":
        return  # to find it all bytes have to be read, which a run does not do before it starts
    said = complaint("fit", f"--config={config(folder)}")
    assert path.name in said
    assert str(folder) in said


def test_a_token_id_beyond_the_vocabulary_ends_a_run_kindly(folder, config, complaint):
    in_manifest(vocab_size=270)(folder, None)
    said = complaint("fit", f"--config={config(folder)}")
    assert "its vocabulary has 270 ids" in said
    assert "verify-data" in said


def test_too_many_workers_end_a_run_before_it_starts(folder, config, complaint, tmp_path):
    said = complaint("fit", f"--config={config(folder)}", "--data.num_workers=100000")
    assert "data.num_workers is 100,000" in said
    path = config(folder, num_workers=100_000)
    [line] = [n for n, text in enumerate(path.read_text().splitlines(), 1) if "num_workers" in text]
    assert f"run.yaml:{line}: data.num_workers is 100,000" in complaint("fit", f"--config={path}")
    assert not list(tmp_path.glob("run/*/*.ckpt"))


def test_a_mixture_names_the_damaged_one_of_its_folders(whole, folder, tiny, write_yaml, complaint, tmp_path):
    sources = {"one": str(whole), "other": str(folder)}
    options = {
        "sources": sources,
        "weights": {"one": 1, "other": 1},
        "packing": "Concatenate",
        "sequence_length": 16,
    }
    tiny["data"] = {"class_path": "MixtureDataModule", "init_args": options}
    tiny["model"]["network"]["init_args"]["vocab_size"] = 320
    tiny["trainer"]["default_root_dir"] = str(tmp_path / "run")
    run = write_yaml("mixture.yaml", tiny)
    for damage in ("truncated shard", "another tokenizer", "truncated manifest"):
        path = DAMAGES[damage](folder)
        assert str(path) in complaint("fit", f"--config={run}")
        shutil.copytree(whole, folder, dirs_exist_ok=True)
    (folder / "manifest.json").unlink()
    assert str(folder) in complaint("fit", f"--config={run}")


def test_a_run_does_not_go_on_with_the_tokens_of_another_tokenizer(folder, config, tmp_path, complaint):
    assert main(["fit", f"--config={config(folder)}", "--trainer.max_steps=3"]) == 0
    other = prepare(
        corpus(tmp_path / "source", documents=60), tmp_path / "other", tokenizer=BPETokenizer(290)
    )
    said = complaint(
        "fit",
        f"--ckpt_path={tmp_path / 'run'}",
        f"--data.source={other}",
        f"--data.cache_dir={tmp_path / 'cache'}",  # a checkpoint alone does not decide where is written
        "--trainer.max_steps=5",
    )
    assert "written by another tokenizer than the checkpoint's" in said


def test_a_full_disk_is_named_when_a_run_prepares_its_text(tmp_path, config, complaint):
    with small_disk(tmp_path / "disk", "40k") as disk:
        run = config(corpus(tmp_path / "source"), cache_dir=str(disk / "cache"))
        said = complaint("fit", f"--config={run}")
        assert str(disk / "cache") in said
        assert "No space left on device" in said
        assert not list((disk / "cache").iterdir())
