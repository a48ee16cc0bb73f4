"""The setting of CUDA's allocator that a run makes, unless the user made one."""

import os
import subprocess
import sys

import pytest
import torch

from plugins.cli.runs import cuda_memory

GROWING = "expandable_segments:True"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in cuda_memory.SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.mark.parametrize("own", [None, *cuda_memory.SETTINGS])
def test_segments_grow_unless_the_user_says_something_else(own, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.version, "hip", None)
    if own:
        monkeypatch.setenv(own, "max_split_size_mb:512")
    cuda_memory.let_segments_grow()
    found = {name: value for name in cuda_memory.SETTINGS if (value := os.environ.get(name))}
    assert found == ({own: "max_split_size_mb:512"} if own else {cuda_memory.SETTINGS[0]: GROWING})


def growing(*lines):
    """Returns what a process prints that lets segments grow after it has imported torch."""
    begin = (
        "import torch",
        "from plugins.cli.runs.cuda_memory import let_segments_grow",
        "let_segments_grow()",
    )
    words = [sys.executable, "-c", "\n".join((*begin, *lines))]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_torch_reads_it_after_it_was_imported():
    assert growing("print(torch._C._accelerator_getAllocatorSettings())") == GROWING


@pytest.mark.gpu
def test_blocks_of_memory_grow():
    all_grow = "all(segment['is_expandable'] for segment in torch.cuda.memory_snapshot())"
    assert growing("kept = torch.ones(1000, device='cuda')", f"print({all_grow})") == "True"
