"""A preparation without duplicates that is killed anywhere, also in `reduce`, and run again gives the same bytes."""

import errno
import os
import random
import signal

import pytest

from core.errors import ConfigError
from datamodules.preparation.duplicates import near_pairs
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms import near_duplicates
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from datamodules.preparation.transforms.near_duplicates import NearDuplicates
from tests.support.corpus import contents, prepare, texts, write_lines
from tests.support.duplicates import Backwards, child, survives_kills


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 5000)
    rng, found = random.Random(0), texts(150)
    copies = [f"{text} more" if rng.random() < 0.5 else text for text in rng.choices(found, k=150)]
    for number in range(4):
        write_lines(tmp_path / "source" / f"{number}.jsonl", [*found, *copies][number::4])
    return tmp_path / "source"


def without_duplicates(source, folder, engine=None):
    return prepare(source, folder, transforms=[ExactDuplicates(), NearDuplicates(0.6)], engine=engine)


@pytest.mark.parametrize("name", ["_decide", pytest.param("_sorted_in", marks=pytest.mark.ci)])
def test_killed_in_reduce(source, tmp_path, monkeypatch, name):
    whole = contents(without_duplicates(source, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(near_pairs.NearPairs, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed = child(without_duplicates, source, tmp_path / "killed")
        killed.join(240)
        assert killed.exitcode == -signal.SIGKILL
    assert list((tmp_path / "killed").rglob("scratch"))
    assert contents(without_duplicates(source, tmp_path / "killed")) == whole


def test_a_full_disk_is_a_message_and_the_same_again_goes_on(source, tmp_path, monkeypatch):
    whole = contents(without_duplicates(source, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(near_duplicates, "write_block", full_disk)
        with pytest.raises(ConfigError, match=rf"{tmp_path}/full/parts/map-1/.*No space left.*\n.*make room"):
            without_duplicates(source, tmp_path / "full", Backwards())
    assert contents(without_duplicates(source, tmp_path / "full")) == whole


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.ci
def test_killed_at_10_random_moments(source, tmp_path):
    survives_kills(without_duplicates, source, tmp_path)
