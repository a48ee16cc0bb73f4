"""Manifests, indexes, headers and tokenizers of a prepared folder, changed at random: a few lines, or success."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.__main__ import main
from datamodules.packing.concatenate import Concatenate
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.corpus import corpus, prepare
from tests.support.strange_folders import complaint_of_a_run, first_chunk, sign

FILES = ("manifest.json", "train/index.json", "tokenizer.json")

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, -1, 1, 255, 300, 1 << 16, (1 << 32) - 1, 1 << 32, 1 << 63]),
    st.floats(),
    st.text(max_size=9),
    st.sampled_from(["..", "../x", "/etc/passwd", "a/b", "\0", "no_header_numpy:6", "0" * 64, "x" * 300]),
    st.recursive(
        st.integers(-3, 3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return prepare(corpus(folder / "source", documents=20, files=2), folder / "out", writer=TokenShards(900))


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory):
    return shutil.copytree(whole, tmp_path_factory.mktemp("fuzzed") / "copy")


def places(value, path=()):
    """Every place in JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, path, new):
    """JSON with another value at a place, or none."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is places:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def kind_or_whole(folder, capsys):
    """Each reader ends with a few lines, or reads the folder; returns whether it is whole."""
    ends = []
    for words in (
        ("verify-data", folder),
        ("inspect-data", folder, "--packing=BestFit", "--sequence_length=16"),
    ):
        capsys.readouterr()
        ends.append(main([str(word) for word in words]))
        lines = capsys.readouterr().err.splitlines()
        assert ends[-1] in (0, 2)
        assert (ends[-1] == 0) or 0 < len(lines) <= 10
    for options in ({}, {"packing": Concatenate()}):
        message = complaint_of_a_run(folder, **options)
        assert message is None or len(message.splitlines()) <= 9
        assert message is None or ends[0] == 2  # what a run refuses, verify-data finds
    return ends == [0, 0]


FUZZED = settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def restored(whole, folder, *names):
    for name in names:
        shutil.copy(whole / name, folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@FUZZED
@given(data=st.data())
def test_values_at_random_places(whole, folder, capsys, name, data):
    content = json.loads((whole / name).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(content))
        new = data.draw(ODD | st.just(places) if len(found) > 1 else ODD)
        path = data.draw(st.sampled_from(found[1:] if new is places else found))
        content = changed(content, path, new)
    (folder / name).write_text(json.dumps(content))
    signs = data.draw(st.booleans())
    if name != "manifest.json" and signs:
        sign(folder)
    elif signs and isinstance(content, dict) and isinstance(content.get("files"), dict):
        try:
            sign(folder, content)
        except (OSError, ValueError):  # names that no file can have, numbers that are none
            (folder / name).write_text(json.dumps(content))
    kind_or_whole(folder, capsys)
    restored(whole, folder, name, "manifest.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@FUZZED
@given(at=st.integers(0, 1 << 20), cut=st.integers(0, 40), new=st.binary(max_size=40) | st.just(b"[" * 3000))
def test_bytes_at_random_places(whole, folder, capsys, name, at, cut, new):
    content = (whole / name).read_bytes()
    at %= len(content)
    (folder / name).write_bytes(content[:at] + new + content[at + cut :])
    if name != "manifest.json":
        sign(folder)
    kind_or_whole(folder, capsys)
    restored(whole, folder, name, "manifest.json")


@pytest.mark.slow
@FUZZED
@given(
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, (1 << 32) - 1)), min_size=1, max_size=4),
    tail=st.sampled_from([0, 0, -1, -4, 1, 4]),
    nearby=st.booleans(),
)  # fmt: skip
def test_words_of_a_chunk(whole, folder, capsys, changes, tail, nearby):
    """Words of the header, or of the tokens, take other values; the file is longer or shorter."""
    path = first_chunk(whole)
    words = np.frombuffer(path.read_bytes(), np.uint8).copy()
    numbers = words[: len(words) // 4 * 4].view(np.uint32)
    header = int(numbers[0]) + 2
    for at, value in changes:
        place = at % (header if nearby else len(numbers))
        numbers[place] = np.uint32((int(numbers[place]) + value % 9 - 4) % (1 << 32)) if nearby else value
    content = words.tobytes()[: len(words) + min(tail, 0)] + bytes(max(tail, 0))
    (folder / path.relative_to(whole)).write_bytes(content)
    sign(folder)
    kind_or_whole(folder, capsys)
    restored(whole, folder, path.relative_to(whole), "manifest.json")


def test_what_was_not_changed_is_whole(whole, folder, capsys):
    assert kind_or_whole(folder, capsys)
