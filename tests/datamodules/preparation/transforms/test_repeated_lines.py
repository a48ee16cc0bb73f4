"""Which lines are removed, as a `Counter` of all of them says; the same bytes whatever happens on the way."""

import os
import pickle
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from datamodules.preparation.duplicates import line_records, spilled_records
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms import repeated_lines
from datamodules.preparation.transforms.repeated_lines import RepeatedLines
from tests.support.corpus import contents, documents_of, prepare, texts, write_lines
from tests.support.duplicates import Backwards, batches, child, survives_kills

EXACT = {"ignore_case": False, "ignore_digits": False, "ignore_space": False}
BANNER = "We use cookies to make this site better."


def applied(transform, documents, folder, size=3, pieces=3):
    """Returns number -> text of the documents that are left, and the numbers of the dropped ones by reason."""
    folder.mkdir(parents=True, exist_ok=True)
    everything, dropped, left = batches(documents, size), Counter(), {}
    parts = [everything[number::pieces] for number in range(pieces)]
    everything = [batch for part in parts for batch in part]  # the order of the source
    findings = [folder / f"{number:06}" for number in range(pieces)]
    for path, part in zip(findings, parts, strict=True):
        transform.map(iter(part), path)
    transform.reduce(findings, folder / "conclusion")
    transform.load(folder / "conclusion")
    for batch in everything:
        names = batch["id"].to_pylist()
        kept = transform.apply(batch, lambda reason, rows, names=names: dropped.update({reason: len(rows)}))
        left.update(zip(kept["id"].to_pylist(), kept["text"].to_pylist(), strict=True))
    assert not (folder / "scratch").exists()
    assert dropped.total() == len(documents) - len(left)
    order = [int(name.partition(":")[2]) for batch in everything for name in batch["id"].to_pylist()]
    return {int(name.partition(":")[2]): text for name, text in left.items()}, dropped, order


def units(text, unit):
    """Returns the lines, or paragraphs, of a text that are not blank."""
    lines = text.split("\n")
    if unit == "line":
        return [line for line in lines if line.strip()]
    return ["\n".join(some) for full, some in groupby(lines, lambda line: bool(line.strip())) if full]


def compared(line, options):
    """Returns what of a line is compared."""
    line = line.casefold() if options.ignore_case else line
    line = re.sub("[0-9]+", "0", line) if options.ignore_digits else line
    return " ".join(line.split()) if options.ignore_space else line


def expected(options, documents, order):
    """Returns what is left of each document by counting all lines in memory."""
    number, first = Counter(), {}
    for at in order:
        for line in {compared(line, options) for line in units(documents[at], options.unit)}:
            number[line] += 1
            first.setdefault(line, at)
    left = {}
    for at, text in enumerate(documents):
        kept = [
            line
            for line in units(text, options.unit)
            if number[key := compared(line, options)] <= options.max_documents
            or len(key) < options.min_characters
            or (options.keep_first and first[key] == at)
        ]
        left[at] = kept
    return left


LINES = st.sampled_from(
    ["", " ", "a", "A", "Bb", " b  b", "b b", "c12", "c3", "C 45", "long line", "Straße", "STRASSE"]
)
OPTIONS = st.fixed_dictionaries(
    {
        "unit": st.sampled_from(["line", "paragraph"]),
        "max_documents": st.integers(1, 4),
        "keep_first": st.booleans(),
        "min_characters": st.integers(0, 4),
        "min_left": st.integers(0, 6),
        "ignore_case": st.booleans(),
        "ignore_digits": st.booleans(),
        "ignore_space": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(LINES, min_size=1, max_size=7).map("\n".join), min_size=1, max_size=15),
    OPTIONS,
    st.sampled_from([1, 5, 1 << 19]),
    st.sampled_from([40, 32 << 20]),
)
def test_what_is_left_is_what_a_counter_of_all_lines_says(documents, options, chunk, partition):
    transform = RepeatedLines(**options)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(line_records, "CHUNK", chunk)
        patch.setattr(spilled_records, "PARTITION_BYTES", partition)
        left, dropped, order = applied(transform, documents, Path(folder))
    removed = 0
    for at, lines in expected(transform, documents, order).items():
        gone = len(units(documents[at], transform.unit)) - len(lines)
        removed += gone
        if gone and at not in left:
            assert not lines or len("".join(lines).strip()) < transform.min_left
        elif gone:
            assert units(left[at], transform.unit) == lines
            assert len(left[at].strip()) >= max(transform.min_left, 1)
        else:
            assert left[at] == documents[at]
    assert set(dropped) <= {f"too short without repeated {transform.unit}s"}
    counts = transform.take_counts()
    assert counts.get(f"{transform.unit}s removed", 0) == removed
    if not dropped:
        assert counts.get("characters removed", 0) == sum(map(len, documents)) - sum(map(len, left.values()))
    assert transform.take_counts() == {}


@pytest.mark.parametrize(
    ("unit", "text", "left"),
    [
        ("line", f"one\n{BANNER}\ntwo", "one\ntwo"),
        ("line", f"one\n\n{BANNER}\ntwo", "one\n\ntwo"),
        ("line", f"one\n{BANNER}\n \n\n  two", "one\n \n\n  two"),
        ("line", f"{BANNER}\n\none\n{BANNER}\n", "one\n"),
        ("line", f"one {BANNER}", f"one {BANNER}"),
        ("line", f"one\r\n\t{BANNER.upper()} \r\ntwo", "one\r\ntwo"),
        ("paragraph", f"one\n\n{BANNER}\n\n\ntwo\n", "one\n\n\ntwo\n"),
        ("paragraph", f"one\n\n{BANNER}\ntwo", f"one\n\n{BANNER}\ntwo"),
    ],
)
def test_what_stays_around_a_removed_line(tmp_path, unit, text, left):
    documents = [BANNER, text]
    assert applied(RepeatedLines(unit, min_left=0), documents, tmp_path, size=1)[0] == {0: BANNER, 1: left}


def test_defaults_keep_the_first_and_drop_what_is_left_too_short(tmp_path):
    body = [f"{text}." for text in texts(4)]
    documents = [f"{BANNER}\nhome\n{body[0]} {body[1]} and more of it, so that it is long enough to stay here.",
                 f"home\n{body[2]}\n{BANNER}", f"{body[3]}\nhome"]  # fmt: skip
    left, dropped, _ = applied(RepeatedLines(min_left=10_000), documents, tmp_path, size=1)
    assert left == {0: documents[0], 2: documents[2]}
    assert dropped == {"too short without repeated lines": 1}


def test_nothing_and_no_lines(tmp_path):
    for name, documents in {"none": [], "blank": ["", " \n", "\n\n"], "short": ["a\na", "a"]}.items():
        left, dropped, _ = applied(RepeatedLines(), documents, tmp_path / name)
        assert left == dict(enumerate(documents))
        assert not dropped


def test_what_is_ignored_moves_no_line_end():
    """Lines of the text as it is and of what is compared have to be the same ones."""
    for character in map(chr, range(sys.maxunicode + 1)):
        space = character.isspace()
        assert (
            re.search(r"\s", character.casefold()) is not None
            if space
            else not re.search(r"\s", character.casefold())
        )
        assert character.casefold().count("\n") == (character == "\n")


def test_a_process_that_gets_a_copy_loads_for_itself(tmp_path):
    transform = RepeatedLines()
    applied(transform, [BANNER, BANNER], tmp_path)
    copy = pickle.loads(pickle.dumps(transform))
    with pytest.raises(RuntimeError, match=r"RepeatedLines\.apply is called after `load`"):
        copy.apply(batches(["a"])[0], lambda reason, rows: None)
    assert copy.fingerprint() == transform.fingerprint()


@pytest.mark.parametrize(
    "options", [{"unit": "word"}, {"max_documents": 0}, {"min_characters": -1}, {"min_left": -1}]
)
def test_mistakes(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        RepeatedLines(**options)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 5000)
    rng, banners = random.Random(0), [f"{BANNER} Site of {word}." for word in ("north", "south", "east")]
    documents = [f"{rng.choice(banners)}\n{text}\n\n{rng.choice(banners)}" for text in texts(250)]
    for number in range(4):
        write_lines(tmp_path / "source" / f"{number}.jsonl", documents[number::4])
    return tmp_path / "source"


STAGES = [RepeatedLines(min_left=30), RepeatedLines("paragraph", keep_first=False, max_documents=3)]


def without_repeated(source, folder, engine=None):
    return prepare(source, folder, transforms=STAGES, engine=engine)


@pytest.mark.ci
def test_the_bytes_do_not_depend_on_the_workers(source, tmp_path):
    folders = [
        without_repeated(source, tmp_path / f"out-{workers}", engine)
        for workers, engine in enumerate((None, Backwards(), LocalEngine(2)))
    ]
    found = [contents(folder) for folder in folders]
    assert found[0] == found[1] == found[2]
    left = "\n".join(documents_of(folders[0], "train") + documents_of(folders[0], "validation"))
    assert left.count(BANNER) <= 6  # three, twice in a document at most
    report = (folders[0] / "report.md").read_text()
    assert re.search(r"\| 1\. RepeatedLines \| lines removed \| 4\d\d \|", report)
    assert "## Dropped by 1. RepeatedLines: too short without repeated lines" in report


@pytest.mark.parametrize("name", ["_combined", pytest.param("write_removed", marks=pytest.mark.ci)])
def test_killed_on_the_way(source, tmp_path, monkeypatch, name):
    whole = contents(without_repeated(source, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        module = line_records if name == "_combined" else repeated_lines
        patch.setattr(module, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed = child(without_repeated, source, tmp_path / "killed")
        killed.join(240)
        assert killed.exitcode == -signal.SIGKILL
    assert contents(without_repeated(source, tmp_path / "killed")) == whole


@pytest.mark.ci
def test_killed_at_10_random_moments(source, tmp_path):
    survives_kills(without_repeated, source, tmp_path)
