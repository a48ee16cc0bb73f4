"""What is held out for validation: about the share that is asked for, also of a few documents of any sizes."""

import json
import random

import pytest

from core.errors import ConfigError
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers import source_files
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.split import Split, chosen_split, text_hash
from tests.support.corpus import contents, documents_of, prepare, texts, write_lines


def novel(number, size):
    draw = random.Random(number)
    words = [word for text in texts(50, seed=number) for word in text.split()]
    lines = [" ".join(draw.choices(words, k=12)) for _ in range(size // 50)]
    return "\n".join(lines)[:size]


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize(
    "sizes", [[40_000] * 6, [100_000, 600], [3_000, 2_000], [60_000], [50_000, *[300] * 40]]
)
@pytest.mark.parametrize("fraction", [0.05, 0.2])
def test_the_share_is_near_the_one_asked_for(tmp_path, capsys, sizes, fraction):
    for number, size in enumerate(sizes):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number}.txt").write_text(novel(number, size), encoding="utf-8")
    folder = prepare(tmp_path / "in", tmp_path / "out", reader=TextDocuments, validation_fraction=fraction)
    manifest = manifest_of(folder)
    train, validation = manifest["train_tokens"], manifest["validation_tokens"]
    assert fraction / 2 < validation / (train + validation) < fraction * 2
    assert f"Tokens for training {train:,}, validation {validation:,}" in capsys.readouterr().out


def test_tails_are_what_is_missing_in_training_whoever_does_the_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 700)
    novels = [novel(number, 8_000) for number in range(3)]
    for number, text in enumerate(novels):
        write_lines(tmp_path / "in" / f"{number}.jsonl", [text, "short " * 9 + str(number)])
    folders = [
        prepare(
            tmp_path / "in", tmp_path / str(number), validation_fraction=0.05, transforms=[], engine=engine
        )
        for number, engine in enumerate((None, LocalEngine(1), LocalEngine(2)))
    ]
    assert contents(folders[0]) == contents(folders[1]) == contents(folders[2])
    assert manifest_of(folders[0])["validation_tails_from_bytes"] == 1000
    train, validation = documents_of(folders[0], "train"), documents_of(folders[0], "validation")
    for text in novels:
        [head] = [part for part in train if text.startswith(part)]
        [tail] = [part for part in validation if text.endswith(part)]
        assert head + tail == text
        assert head.endswith("\n")


def test_where_documents_are_many_they_stay_whole(tmp_path):
    documents = texts(400)
    split = chosen_split(iter(documents), 0.1, "x")
    assert split == Split(int(0.1 * 2**64))
    assert [split.parts(text) for text in documents] == [
        [(int(text_hash(text.encode()) < split.bound), text)] for text in documents
    ]


def test_what_cannot_be_split():
    with pytest.raises(ConfigError, match="x: there is no text"):
        chosen_split([], 0.1, "x")
    with pytest.raises(ConfigError, match="single document"):
        chosen_split(["short"] * 3, 0.1, "x")
    two = chosen_split(["one", "two"], 0.05, "x")
    assert sorted(side for text in ("one", "two") for side, _ in two.parts(text)) == [0, 1]
    long = chosen_split(["word" * 500], 0.1, "x")  # without a place to cut at
    assert [side for side, _ in long.parts("word" * 500)] == [0, 1]
    assert Split(0, 0.1, 1000).parts("x" * 900 + " " * 200) == [(0, "x" * 900 + " " * 200)]


def test_a_store_of_tails_is_read(tmp_path):
    (tmp_path / "a.txt").write_text(novel(0, 5000), encoding="utf-8")
    folder = prepare(tmp_path / "a.txt", tmp_path / "out", reader=TextDocuments, validation_fraction=0.1)
    assert TokenStore(folder / "validation").number_of_documents == 1


def test_where_nothing_can_be_used_the_message_says_why(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    with pytest.raises(
        ConfigError, match=r"there is no text.*\n2 could not be used, for example .*a\.jsonl:1: "
    ):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", max_reject_fraction=0.9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: the folder is empty"):
        prepare(tmp_path / "empty", tmp_path / "out2")
