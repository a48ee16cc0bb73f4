"""What is cut is what comparing every two places of the corpus says; the same bytes whatever happens on the way."""

import os
import pickle
import random
import re
import signal
from collections import Counter, defaultdict

import numpy as np
import pytest

from core.errors import ConfigError
from datamodules.preparation.duplicates import repeated_passages, spilled_records, window_hashes
from datamodules.preparation.duplicates.duplicate_filter import identities
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms import repeated_substrings
from datamodules.preparation.transforms.repeated_substrings import RepeatedSubstrings
from tests.support.corpus import contents, prepare, texts, write_lines
from tests.support.duplicates import Backwards, batches, child, survives_kills

PASSAGE = "It was the best of times, it was the worst of times, it was the age of wisdom"


def repeated(documents, length, keep_first):
    """Returns for each document the places of the bytes in passages that are there twice, by comparing all places."""
    found = [set() for _ in documents]
    for one, first in enumerate(documents):
        for other, second in enumerate(documents[one:], one):
            for shift in range(1 - len(second), len(first) if one < other else 0):
                run = 0
                for at in range(max(shift, 0), min(len(first), len(second) + shift) + 1):
                    if at < min(len(first), len(second) + shift) and first[at] == second[at - shift]:
                        run += 1
                        continue
                    if run >= length:
                        found[other].update(range(at - shift - run, at - shift))
                        found[one].update(() if keep_first else range(at - run, at))
                    run = 0
    return found


def corpus(rng):
    """Returns documents of few letters, with pieces that they share and some that repeat themselves."""
    letters = rng.choice(["ab", "abcdefgh", "aé北🙂 b"])
    pool = ["".join(rng.choices(letters, k=rng.randint(5, 60))) for _ in range(4)]
    pool += ["a" * rng.randint(10, 40), "ab" * 20]

    def piece():
        return rng.choice(pool) if rng.random() < 0.6 else "".join(rng.choices(letters, k=rng.randint(0, 20)))

    return ["".join(piece() for _ in range(rng.randint(0, 6))) for _ in range(rng.randint(1, 9))]


def mapped(transform, documents, folder, rng):
    """Maps and reduces documents in random batches and pieces; returns the batches."""
    folder.mkdir(exist_ok=True)
    everything = batches(documents, rng.randint(1, 4))
    cuts = sorted(rng.choices(range(len(everything) + 1), k=rng.randint(0, 3)))
    findings = []
    for begin, end in zip([0, *cuts], [*cuts, None], strict=True):
        findings.append(folder / f"{len(findings):06}")
        transform.map(iter(everything[begin:end]), findings[-1])
    transform.reduce(findings, folder / "conclusion")
    transform.load(folder / "conclusion")
    assert not (folder / "scratch").exists()
    return everything


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(12, 150))]
)
def test_what_is_cut_is_what_comparing_all_places_says(seed, tmp_path, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(repeated_passages, "CHUNK", rng.choice([1, 7, 1 << 19]))
    monkeypatch.setattr(repeated_passages, "PIECE", rng.choice([1, 33, 1 << 20]))
    monkeypatch.setattr(spilled_records, "PARTITION_BYTES", rng.choice([100, 1000, 32 << 20]))
    monkeypatch.setattr(window_hashes, "_BLOCK", rng.choice([1, 17, 1 << 14]))
    documents = corpus(rng)
    transform = RepeatedSubstrings(rng.randint(16, 32), keep_first=rng.random() < 0.7, min_left=0)
    everything = mapped(transform, documents, tmp_path, rng)
    found = defaultdict(list)
    for document, cut in zip(*repeated_passages.read_cuts(tmp_path / "conclusion"), strict=True):
        found[bytes(document)].append(cut.tolist())
    expected = repeated([text.encode() for text in documents], transform.min_bytes, transform.keep_first)
    names = [bytes(name) for batch in everything for name in identities(batch)]
    for name, places in zip(names, expected, strict=True):
        assert {at for begin, end in found[name] for at in range(begin, end)} == places
        assert found[name] == sorted(found[name])
    assert sum(map(len, expected)) or seed  # some corpora have none


def left(documents, folder, **options):
    """Returns what is left of each document, and the dropped ones by reason with what is shown of them."""
    transform, dropped = RepeatedSubstrings(**{"min_bytes": 32, "min_left": 0} | options), {}
    everything = mapped(transform, documents, folder, random.Random(0))
    found = [
        transform.apply(
            batch, lambda reason, rows, shown: dropped.update({reason: list(zip(rows, shown, strict=True))})
        )
        for batch in everything
    ]
    return [text for batch in found for text in batch["text"].to_pylist()], dropped, transform.take_counts()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Before. {PASSAGE} behind.", "Before. behind."),
        (f"Before.\n\n{PASSAGE}\nbehind.", "Before.\n\nbehind."),
        (f"Before. {PASSAGE}\n\nBehind.", "Before.\n\nBehind."),
        (f"{PASSAGE}. Behind.\n", ". Behind.\n"),
        (f"Before, {PASSAGE}", "Before,"),
        (f"  {PASSAGE}\n\nBehind.", "Behind."),
        (f"Read{PASSAGE}ly.", "ReadIt wisdomly."),  # words of which a part is repeated stay
        (f"one {PASSAGE}, two {PASSAGE} three", "one , two three"),
        (f"北京{PASSAGE}北京", "北京北京"),
        (f"one {PASSAGE} {PASSAGE[:40]}", "one"),
        (f"one {PASSAGE[:30]} two", f"one {PASSAGE[:30]} two"),
        (f"one {PASSAGE.lower()[:3]}", "one it "),
    ],
)
def test_what_stays_around_what_is_cut(text, expected, tmp_path):
    found, dropped, counts = left([PASSAGE, text], tmp_path)
    assert found == [PASSAGE, expected]
    assert not dropped
    assert counts.get("bytes removed", 0) == len(text.encode()) - len(expected.encode())


def test_no_half_characters(tmp_path):
    """The last byte of é is also that of ©: what is repeated begins in a character, and ends in one."""
    assert "é".encode()[1] == "©".encode()[1]
    characters = "".join(map(chr, range(0x5000, 0x5014)))
    one, other = f"one é{characters}一", f"two ©{characters}丁"
    assert "一".encode()[:2] == "丁".encode()[:2]
    assert left([one, other], tmp_path)[0] == [one, "two ©丁"]


def test_a_long_word_is_cut(tmp_path):
    blob = "".join(random.Random(0).choices("abcdefghijkl", k=200))
    assert left([blob, f"x{blob}y"], tmp_path)[0] == [blob, "xy"]


def test_what_repeats_itself_and_what_all_copies_lose(tmp_path):
    assert left(["-" * 100 + " end"], tmp_path / "run")[0] == ["- end"]
    documents = [f"one {PASSAGE} two", f"three {PASSAGE} four"]
    assert left(documents, tmp_path / "all", keep_first=False)[0] == ["one two", "three four"]


def test_documents_that_become_short_are_dropped_with_what_was_cut(tmp_path):
    documents = [PASSAGE, PASSAGE + " Six.", "Long enough. " + PASSAGE, "short"]
    found, dropped, counts = left(documents, tmp_path, min_left=10)
    assert found == [PASSAGE, "Long enough.", "short"]
    [[reason, shown]] = dropped.items()
    assert reason == "too short without repeated passages"
    assert [text for _, text in shown] == [PASSAGE]
    assert counts == {"passages removed": 2, "bytes removed": 2 * len(PASSAGE) + 2}  # and a blank beside each


def test_documents_with_the_same_name_and_text_stay(tmp_path):
    transform = RepeatedSubstrings(32, min_left=0)
    [batch] = batches([PASSAGE])
    transform.map(iter([batch, batch]), tmp_path / "findings")
    transform.reduce([tmp_path / "findings"], tmp_path / "conclusion")
    transform.load(tmp_path / "conclusion")
    assert transform.apply(batch, lambda *_: None)["text"].to_pylist() == [PASSAGE]


def test_nothing_and_no_long_documents(tmp_path):
    for name, documents in {"none": [], "short": ["a", "a"], "different": ["a" * 40, "b" * 41]}.items():
        found, dropped, counts = left(documents, tmp_path / name, min_bytes=41)
        assert (found, dropped, counts) == (documents, {}, Counter())


def test_hashes_differ_where_bytes_do():
    text = np.frombuffer(random.Random(0).randbytes(3000) + bytes(3000), np.uint8)
    for length in (8, 9, 16, 100, 200):
        windows = [text[at : at + length].tobytes() for at in range(len(text) - length + 1)]
        for second in (False, True):
            found = window_hashes.window_hashes(text, length, second)
            assert (
                len(set(found.tolist()))
                == len(set(windows))
                == len(set(zip(windows, found.tolist(), strict=True)))
            )
    assert not set(window_hashes.window_hashes(text, 16)) & set(window_hashes.window_hashes(text, 16, True))


def test_fingerprints_are_few_and_their_hashes_evenly_distributed():
    """As the files are by which they are sorted on disk."""
    text = np.frombuffer(random.Random(0).randbytes(200_000), np.uint8)
    hashes, places = window_hashes.fingerprints(text, np.array([len(text)]), 200)
    assert 45 < len(text) / len(places) < 60
    assert 0 < np.diff(places).min() < np.diff(places).max() <= 101
    for share in (0.25, 0.5, 0.75):
        assert abs(np.mean(hashes < np.uint64(share * 2**64)) - share) < 0.03


def test_a_process_that_gets_a_copy_loads_for_itself(tmp_path):
    transform = RepeatedSubstrings(32)
    mapped(transform, [PASSAGE, PASSAGE], tmp_path, random.Random(0))
    copy = pickle.loads(pickle.dumps(transform))
    with pytest.raises(RuntimeError, match=r"RepeatedSubstrings\.apply is called after `load`"):
        copy.apply(batches(["a"])[0], lambda reason, rows: None)
    assert copy.fingerprint() == {"min_bytes": 32, "keep_first": True, "min_left": 100}


@pytest.mark.parametrize("options", [{"min_bytes": 15}, {"min_bytes": 65_537}, {"min_left": -1}])
def test_mistakes(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        RepeatedSubstrings(**options)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 5000)
    rng = random.Random(0)
    documents = [f"{text} {rng.choice([PASSAGE, PASSAGE[10:], 'end'])} {rng.random()}" for text in texts(250)]
    for number in range(4):
        write_lines(tmp_path / "source" / f"{number}.jsonl", documents[number::4])
    return tmp_path / "source"


def without_repeated(source, folder, engine=None):
    return prepare(source, folder, transforms=[RepeatedSubstrings(40, min_left=100)], engine=engine)


@pytest.mark.ci
def test_the_bytes_do_not_depend_on_the_workers(source, tmp_path):
    folders = [
        without_repeated(source, tmp_path / f"out-{workers}", engine)
        for workers, engine in enumerate((None, Backwards(), LocalEngine(2)))
    ]
    found = [contents(folder) for folder in folders]
    assert found[0] == found[1] == found[2]
    report = (folders[0] / "report.md").read_text()
    assert re.search(r"\| 1\. RepeatedSubstrings \| passages removed \| 1\d\d \|", report)
    assert "## Dropped by 1. RepeatedSubstrings: too short without repeated passages" in report
    assert PASSAGE[30:] in report


@pytest.mark.parametrize(
    "name", ["_windows", *(pytest.param(name, marks=pytest.mark.ci) for name in ("_write", "write_cuts"))]
)
def test_killed_on_the_way(source, tmp_path, monkeypatch, name):
    whole = contents(without_repeated(source, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        module = repeated_substrings if name == "write_cuts" else repeated_passages
        patch.setattr(module, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed = child(without_repeated, source, tmp_path / "killed")
        killed.join(240)
        assert killed.exitcode == -signal.SIGKILL
    assert contents(without_repeated(source, tmp_path / "killed")) == whole


@pytest.mark.slow  # ten kills and ten restarts
def test_killed_at_10_random_moments(source, tmp_path):
    survives_kills(without_repeated, source, tmp_path)
