"""What a preparation keeps in memory."""

import ctypes
import pkgutil
import random
import subprocess
import sys
from pathlib import Path

import pytest

import datamodules.preparation
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.token_preparation import TokenPreparation
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.limits import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD

WORDS = [f"{a}{b}{c}" for a in "bcdfgh" for b in ("al", "er", "inu", "oto") for c in ("", "ta", "mes")]


def novels(folder: Path, sizes: list[int]) -> str:
    """Writes texts of about so many characters each; returns the folder."""
    folder.mkdir()
    draw = random.Random(0)
    for number, size in enumerate(sizes):
        text = " ".join(draw.choice(WORDS) + str(draw.randrange(10**4)) for _ in range(size // 10))
        (folder / f"{number}.txt").write_text(text)
    return str(folder)


@pytest.mark.ci
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_what_training_a_tokenizer_took_is_given_back_before_workers_start(tmp_path, monkeypatch):
    source = novels(tmp_path / "novels", [500_000] * 8)
    sizes = []

    class Engine:  # asks for memory where workers would start
        def run(self, work, tasks):
            sizes.append(resident())
            yield from map(work, tasks)

    preparation = TokenPreparation(
        TextDocuments(source), BPETokenizer(vocab_size=1024), TokenShards(), engine=Engine()
    )
    (tmp_path / "out").mkdir()
    libc = ctypes.CDLL(None)  # tests before this one may have told malloc to keep what is freed
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 17)
    before = resident()
    preparation.run(tmp_path / "out", source)
    assert sizes
    assert max(sizes) - before < 60 << 20


def resident() -> int:
    """Returns the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nothing_that_prepares_loads_torch():
    package = datamodules.preparation
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    assert len(names) > 60
    load = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", load], check=True)
