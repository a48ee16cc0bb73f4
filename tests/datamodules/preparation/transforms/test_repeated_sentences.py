"""Which sentences stay, as C4's rule in plain Python says; the same bytes whatever happens on the way."""

import os
import pickle
import random
import re
import signal

import pytest

from core.errors import ConfigError
from datamodules.preparation.duplicates import line_records, spilled_records
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms import repeated_sentences
from datamodules.preparation.transforms.repeated_sentences import RepeatedSentences
from tests.support.corpus import contents, prepare, texts, write_lines
from tests.support.duplicates import Backwards, batches, child, survives_kills

STORY = "One came. Two saw. Three won."


def applied(transform, documents, folder, rng):
    """Returns what is left of each document, None where it is dropped, and the reasons."""
    everything, reasons, left = batches(documents, rng.randint(1, 4)), [], {}
    cut = rng.randint(0, len(everything))
    findings = [folder / "000000", folder / "000001"]
    for path, part in zip(findings, (everything[:cut], everything[cut:]), strict=True):
        transform.map(iter(part), path)
    transform.reduce(findings, folder / "conclusion")
    transform.load(folder / "conclusion")
    for batch in everything:
        found = transform.apply(batch, lambda reason, rows: reasons.append((reason, len(rows))))
        left.update(zip(found["id"].to_pylist(), found["text"].to_pylist(), strict=True))
    return [left.get(f"file:{number}") for number in range(len(documents))], reasons


def reference(documents, span):
    """Returns the sentences of each document without those in a span that was there before."""
    before, found = set(), []
    for sentences in documents:
        gone = set()
        for at in range(len(sentences) - span + 1):
            words = tuple(" ".join(sentence.split()) for sentence in sentences[at : at + span])
            gone.update(range(at, at + span) if words in before else ())
            before.add(words)
        found.append([sentence for at, sentence in enumerate(sentences) if at not in gone])
    return found


@pytest.mark.parametrize("seed", range(60))
def test_what_stays_is_what_the_rule_of_c4_says(seed, tmp_path, monkeypatch):
    rng, span = random.Random(seed), 1 + seed % 4
    monkeypatch.setattr(line_records, "CHUNK", rng.choice([1, 5, 1 << 19]))
    monkeypatch.setattr(spilled_records, "PARTITION_BYTES", rng.choice([40, 32 << 20]))
    pool = [
        "Yes.",
        "No!",
        "What  is it?",
        "What is it?",
        "3.14 is pi.",
        "北京。",
        "no end",
        'He said "go."',
        "...",
    ]
    documents = [
        rng.choices(pool[: rng.randint(2, 9)], k=rng.randint(0, 12)) for _ in range(rng.randint(1, 10))
    ]
    joined = [
        "".join(f"{s}\n" if s == "no end" else s + rng.choice([" ", "\n", "  \n"]) for s in some)
        for some in documents
    ]
    transform = RepeatedSentences(span, min_left=0)
    left, reasons = applied(transform, joined, tmp_path, rng)
    removed = 0
    for text, before, some, expected in zip(left, joined, documents, reference(documents, span), strict=True):
        removed += len(some) - len(expected)
        if len(some) == len(expected):
            assert text == before
        else:
            assert (text or "").split() == " ".join(expected).split()
            assert (text is None) == (not expected)
    assert {reason for reason, _ in reasons} <= {"too short without repeated sentences"}
    counts = transform.take_counts()
    assert counts.get("sentences removed", 0) == removed
    assert counts.get("characters removed", 0) == sum(map(len, joined)) - sum(
        len(text or "") for text in left
    )
    assert not transform.take_counts()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"Before. {STORY} Behind.", "Before. Behind."),
        (f"Before.\n\n{STORY}\nBehind.", "Before.\n\nBehind."),
        (f"Before. {STORY}\n\nBehind.", "Before.\n\nBehind."),
        ("One came.\nTwo \t saw. Three won. Four.", "Four."),
        ("One came. Two saw. Behind.", "One came. Two saw. Behind."),
        ("One came. Two saw. three won. Behind.", "One came. Two saw. three won. Behind."),
        (f"A. {STORY} B. {STORY} C.", "A. B. C."),
    ],
)
def test_what_stays_around_a_removed_span(text, left, tmp_path):
    assert applied(RepeatedSentences(min_left=0), [STORY, text], tmp_path, random.Random(0))[0] == [
        STORY,
        left,
    ]


def test_the_pattern_for_ascii_is_the_other_one():
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("ab.!? \n\t\"')]", k=40))
        parts = repeated_sentences._parts(text)
        assert repeated_sentences._parts(text + "\né")[: len(parts)] == parts
        assert "".join(parts) == text.strip()


def test_short_documents_are_dropped(tmp_path):
    documents = [STORY, STORY, f"{STORY} Short.", f"{STORY} Long enough to stay.", "Short."]
    left, reasons = applied(RepeatedSentences(min_left=10), documents, tmp_path, random.Random(0))
    assert left == [STORY, None, None, "Long enough to stay.", "Short."]
    assert sum(number for _, number in reasons) == 2


def test_nothing_and_no_spans(tmp_path):
    for number, documents in enumerate(([], ["", " \n"], ["A. B.", "A. B."])):
        (folder := tmp_path / str(number)).mkdir()
        assert applied(RepeatedSentences(), documents, folder, random.Random(0)) == (documents, [])


def test_a_process_that_gets_a_copy_loads_for_itself(tmp_path):
    transform = RepeatedSentences()
    applied(transform, [STORY, STORY], tmp_path, random.Random(0))
    copy = pickle.loads(pickle.dumps(transform))
    with pytest.raises(RuntimeError, match=r"RepeatedSentences\.apply is called after `load`"):
        copy.apply(batches(["a"])[0], lambda reason, rows: None)
    assert copy.fingerprint() == {"span": 3, "min_left": 100}


@pytest.mark.parametrize("options", [{"span": 0}, {"span": 1001}, {"min_left": -1}])
def test_mistakes(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        RepeatedSentences(**options)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 5000)
    rng = random.Random(0)
    documents = [f"{text}. {rng.choice([STORY, 'End.'])} {rng.random()}." for text in texts(200)]
    for number in range(4):
        write_lines(tmp_path / "source" / f"{number}.jsonl", documents[number::4])
    return tmp_path / "source"


def without_repeated(source, folder, engine=None):
    return prepare(source, folder, transforms=[RepeatedSentences(min_left=60)], engine=engine)


@pytest.mark.ci
def test_the_bytes_do_not_depend_on_the_workers(source, tmp_path):
    folders = [
        without_repeated(source, tmp_path / f"out-{workers}", engine)
        for workers, engine in enumerate((None, Backwards(), LocalEngine(2)))
    ]
    found = [contents(folder) for folder in folders]
    assert found[0] == found[1] == found[2]
    report = (folders[0] / "report.md").read_text()
    assert re.search(r"\| 1\. RepeatedSentences \| sentences removed \| [23]\d\d \|", report)
    assert "## Dropped by 1. RepeatedSentences: too short without repeated sentences" in report


def test_killed_on_the_way(source, tmp_path, monkeypatch):
    whole = contents(without_repeated(source, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(repeated_sentences, "write_removed", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed = child(without_repeated, source, tmp_path / "killed")
        killed.join(240)
        assert killed.exitcode == -signal.SIGKILL
    assert contents(without_repeated(source, tmp_path / "killed")) == whole


@pytest.mark.ci
def test_killed_at_10_random_moments(source, tmp_path):
    survives_kills(without_repeated, source, tmp_path)
