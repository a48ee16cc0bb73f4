"""Prepared folders of a stranger: refused in a few lines, within a second, and nothing outside them is read."""

import json
import os
import shutil
from multiprocessing import active_children

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from core.__main__ import main
from datamodules.packing.concatenate import Concatenate
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.corpus import corpus, prepare
from tests.support.strange_folders import (
    STRANGE,
    complaint_of_a_run,
    first_chunk,
    in_manifest,
    sign,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return prepare(corpus(folder / "source", documents=40), folder / "out", writer=TokenShards(500))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def said(capsys, *words):
    """What a command says that has to fail kindly."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert 0 < len(lines) <= 10
    assert all(line.isprintable() for line in lines)
    return "\n".join(lines)


@pytest.mark.parametrize("what", STRANGE)
def test_what_a_stranger_may_hand_over_is_refused_by_every_reader(folder, tmp_path, capsys, what):
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(first_chunk(folder), outside / "chunk.bin")
    STRANGE[what](folder, outside)
    assert str(folder) in said(capsys, "verify-data", folder)
    only_in_verify = what in ("tokenizer.json holds NaN", "tokenizer.json has a key twice")
    for packing in (None, Concatenate()):
        message = complaint_of_a_run(folder, **({"packing": packing} if packing else {}))
        if message is None:
            assert only_in_verify
            continue
        assert str(folder) in message
        assert len(message.splitlines()) <= 9
    assert str(folder) in said(capsys, "inspect-data", folder, "--packing=BestFit")


def test_a_folder_that_is_a_link_and_links_inside_are_read(folder, tmp_path, capsys):
    chunk = first_chunk(folder)
    chunk.rename(folder / "moved.bin")
    chunk.symlink_to("../moved.bin")
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert main(["verify-data", str(link)]) == 0
    assert "is complete" in capsys.readouterr().out
    assert complaint_of_a_run(link) is None


def test_token_ids_beyond_the_vocabulary(folder, capsys):
    manifest = json.loads((folder / "manifest.json").read_text())
    in_manifest(vocab_size=280)(folder, None)
    assert "it has the id 299, the manifest's vocabulary has 280" in said(capsys, "verify-data", folder)
    assert "token id" in said(capsys, "verify-data", folder)
    message = complaint_of_a_run(folder)
    assert "its vocabulary has 280 ids" in message
    assert "verify-data" in message
    assert len(message.splitlines()) <= 3
    sign(folder, manifest)
    assert complaint_of_a_run(folder) is None


def test_token_ids_that_end_training_in_workers_too(folder):
    chunk = first_chunk(folder)
    content = bytearray(chunk.read_bytes())
    content[-4:-2] = np.uint16(60_000).tobytes()
    chunk.write_bytes(bytes(content))
    sign(folder)
    for workers in (0, 1):
        assert "token id 60,000" in complaint_of_a_run(folder, num_workers=workers)


def test_a_tokenizer_that_the_library_cannot_load(folder, capsys):
    path = folder / "tokenizer.json"
    for content in (b"{}", b'{"model": {"type": "Unigram", "vocab": [["a", 1e5]], "unk_id": 99}}'):
        path.write_bytes(content)
        sign(folder)
        for command in ("verify-data", "inspect-data"):
            assert "the library cannot load it" in said(capsys, command, folder)


def test_a_tokenizer_larger_than_the_vocabulary(folder, capsys):
    tokens = {f"t{n}": n for n in range(400)}
    (folder / "tokenizer.json").write_text(Tokenizer(models.BPE(tokens, [])).to_str())
    sign(folder)
    assert "it has the id 399, the manifest's vocabulary has 300" in said(capsys, "verify-data", folder)


# The manifest's own checksum ------------------------------------------------------------------------------


def test_edited_figures_are_found_by_every_reader(folder, capsys):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, value in (
        ("train_tokens", 10**9),
        ("unigram_loss", 1.5),
        ("source", "another"),
        ("sources", {}),
    ):
        path.write_text(json.dumps(manifest | {name: value}))
        assert f"{path}: its figures have been changed" in said(capsys, "verify-data", folder)
        assert "another SHA-256" in complaint_of_a_run(folder)
        assert "another SHA-256" in said(capsys, "inspect-data", folder)
    path.write_text(json.dumps(dict(sorted(manifest.items())), separators=(",", ":")))  # the same figures
    assert main(["verify-data", str(folder)]) == 0


@pytest.mark.parametrize("name", ["plan.json", "report.md", "report.html", "report.json", "lengths.png"])
def test_plan_and_report_are_covered(folder, capsys, name):
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content.replace(content[-9:-8], b"#"))
    assert f"{path}: " in said(capsys, "verify-data", folder)
    path.unlink()
    os.mkfifo(path)
    assert f"{path}: it is a named pipe" in said(capsys, "verify-data", folder)
    path.unlink()
    assert main(["verify-data", str(folder)]) == 0
    assert complaint_of_a_run(folder) is None


def test_folders_of_earlier_versions_are_read_and_it_is_said(folder, capsys):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(
        json.dumps({k: v for k, v in manifest.items() if k not in ("sha256", "extras")}, indent=2)
    )
    assert main(["verify-data", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "is complete" in printed
    assert "has no checksum of its own" in printed
    assert complaint_of_a_run(folder) is None


# Paths and numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "~nobody-of-this-name/x", "\udcff"])
def test_names_that_no_folder_can_have(capsys, name):
    at_all = {"a\0b": "has a NUL character", "\udcff": "is not UTF-8"}
    for command in ("verify-data", "inspect-data"):
        assert at_all.get(name, "has no manifest.json") in said(capsys, command, name)


def test_too_many_workers_are_refused_before_they_are_started(folder):
    """From Python, without the command line's checks: no process is made."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    most = max(64, 4 * cores)
    before = len(active_children())
    for workers in (most + 1, 100_000):
        said = complaint_of_a_run(folder, num_workers=workers)
        assert f"data.num_workers is {workers:,};" in said
        assert f"at most {most} are allowed" in said
    assert len(active_children()) == before
