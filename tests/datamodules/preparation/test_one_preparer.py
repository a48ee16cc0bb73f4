"""One of several processes prepares, the others wait for it and find what it wrote; a dead one holds nobody up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys, time
from pathlib import Path
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.token_preparation import TokenPreparation
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.writers.token_shards import TokenShards

class Slow(TextDocuments):
    def rows(self, piece, reject):
        while Path(sys.argv[3]).exists():  # until the test lets it go on
            time.sleep(0.02)
        yield from super().rows(piece, reject)

parts = Slow(sys.argv[1]), BPETokenizer(300), TokenShards()
print(TokenPreparation(*parts).cached(Path(sys.argv[2]), "notes"))
"""


@pytest.fixture
def job(tmp_path):
    """Starts processes that prepare the same text; they read it once `hold` is gone."""
    (tmp_path / "source").mkdir()
    for number in range(60):
        (tmp_path / "source" / f"{number:02}.txt").write_text(
            f"Note {number} says {number % 7} things.\n" * 5
        )
    hold, running = tmp_path / "hold", []
    hold.touch()

    def start(cache):
        words = [sys.executable, "-c", SCRIPT, tmp_path / "source", tmp_path / cache, hold]
        log = tmp_path / f"log-{len(running)}"
        running.append(
            subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
        )
        return running[-1], log

    yield start, hold
    for process in running:
        process.kill()
        process.communicate()


def until(log, words):
    end = time.monotonic() + 60
    while words not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def finished(process):
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    folder = Path(out.strip())
    assert (folder / "manifest.json").exists()
    return folder


def test_one_prepares_and_the_others_find_it(job):
    start, hold = job
    first, said = start("cache")
    until(said, "Preparing notes")
    others = [start("cache") for _ in range(2)]
    for _, log in others:
        until(log, "Waiting for another process, which prepares notes")
    hold.unlink()
    folder = finished(first)
    assert [finished(process) for process, _ in others] == [folder, folder]
    assert not any("Preparing" in log.read_text() for _, log in others)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no lock, nothing temporary


def test_a_preparer_that_is_killed_is_replaced(job):
    start, hold = job
    first, said = start("cache")
    until(said, "Preparing notes")
    others = [start("cache") for _ in range(2)]
    for _, log in others:
        until(log, "Waiting for")
    os.kill(first.pid, signal.SIGKILL)
    hold.unlink()
    folders = {finished(process) for process, _ in others}
    assert len(folders) == 1
    assert sum("Prepared " in log.read_text() for _, log in others) == 1


def test_machines_that_share_no_folder_prepare_each_for_itself(job):
    start, hold = job
    both = [start("one"), start("two")]
    for _, log in both:
        until(log, "Preparing notes")
    hold.unlink()
    one, two = (finished(process) for process, _ in both)
    assert (one.name, one.parent != two.parent) == (two.name, True)
    assert (one / "manifest.json").read_bytes() == (two / "manifest.json").read_bytes()
