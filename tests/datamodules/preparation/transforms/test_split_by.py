"""Documents of one group are in one split; dates decide where they are asked to."""

import json
from collections import defaultdict
from functools import partial

import pytest

from core.errors import ConfigError
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.split import Split, chosen_groups, text_hash
from datamodules.preparation.transforms.split_by import SplitBy
from tests.support.corpus import (
    articles,
    contents,
    corpus,
    documents_of,
    prepare,
    texts,
    with_metadata,
    write_lines,
)

SHARES = {"validation_fraction": 0.2, "test_fraction": 0.2}


def splits_of(folder):
    return {
        text: split
        for split in ("train", "validation", "test")
        if (folder / split).exists()
        for text in documents_of(folder, split)
    }


def groups(folder, key):
    found = defaultdict(set)
    for text, split in splits_of(folder).items():
        found[key(text)].add(split)
    return found


def test_documents_of_a_source_are_in_one_split_whoever_prepares(tmp_path):
    for number in range(12):
        write_lines(tmp_path / "in" / f"{number}.jsonl", texts(20, seed=number), source=f"s{number}")
    of = {text: number for number in range(12) for text in texts(20, seed=number)}
    folders = [
        prepare(
            tmp_path / "in",
            tmp_path / str(n),
            reader=partial(JSONLinesDocuments, source_field="source"),
            transforms=[SplitBy("source")],
            engine=engine,
            **SHARES,
        )
        for n, engine in enumerate((None, LocalEngine(2)))
    ]
    assert contents(folders[0]) == contents(folders[1])
    found = groups(folders[0], of.get)
    assert len(found) == 12
    assert all(len(splits) == 1 for splits in found.values())
    assert {split for splits in found.values() for split in splits} == {"train", "validation", "test"}
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    total = sum(manifest[f"{split}_tokens"] for split in ("train", "validation", "test"))
    assert all(0.1 <= manifest[f"{split}_tokens"] / total <= 0.4 for split in ("validation", "test"))


def test_a_value_can_be_compared_by_its_beginning_and_an_unknown_one_is_its_own_group(tmp_path):
    folder = prepare(
        articles(tmp_path / "in", 400),
        tmp_path / "out",
        reader=with_metadata("date"),
        transforms=[SplitBy("date", length=7)],
    )
    found = splits_of(folder)
    months = defaultdict(set)
    for number, text in enumerate(texts(400)):
        months[number % 12 if number % 9 else "unknown"].add(found[text])
    assert months.pop("unknown") == {"train", "validation"}
    assert all(len(splits) == 1 for splits in months.values())


def test_dates_decide_whatever_the_fractions_say(tmp_path):
    dates = SplitBy("date", validation_from="2024-09", test_from="2024-11-02")
    folder = prepare(
        articles(tmp_path / "in"),
        tmp_path / "out",
        reader=with_metadata("date"),
        transforms=[dates],
        **SHARES,
    )
    found = splits_of(folder)
    for number, text in enumerate(texts(200)):
        month = number % 12 + 1 if number % 9 else 0
        assert found[text] == ("train" if month < 9 else "validation" if month < 11 else "test")


def test_few_unequal_groups_hold_out_the_smallest_ones():
    sizes = {"a": 6000, "b": 3000, "c": 500, "d": 400, "e": 100}
    documents = [("x" * 100, key) for key, size in sizes.items() for _ in range(size // 100)]
    split = chosen_groups(documents, 0.05, "x", 0.05)
    held = {key: split.parts("x", key)[0][0] for key in sizes}
    shares = [sum(sizes[key] for key in sizes if held[key] == side) / 10_000 for side in (0, 1, 2)]
    assert shares[0] >= 0.9
    assert shares[1] > 0
    assert shares[2] > 0
    assert chosen_groups(reversed(documents), 0.05, "x", 0.05) == split


def test_many_groups_are_split_by_a_hash_so_that_more_documents_move_none():
    documents = [("word " * 9, f"value {number % 500}") for number in range(2000)]
    split = chosen_groups(documents, 0.1, "x")
    assert split == Split(int(0.1 * 2**64))
    assert split.parts("anything", "value 3") == [(int(text_hash(b"value 3") < 0.1 * 2**64), "anything")]


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([("text", "value a")] * 3, "all documents are in 1 group that stay together; 2 splits need as many"),
        ([("text", "train")] * 3, "no document belongs to the validation split"),
        ([("text", "validation")] * 3, "no document belongs to the train split"),
    ],
)
def test_what_cannot_be_split_is_said(documents, said):
    with pytest.raises(ConfigError, match=said):
        chosen_groups(documents, 0.1, "x")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"column": "date", "length": 0}, "length is 0"),
        ({"column": "date", "test_from": "2024"}, "test needs both"),
        ({"column": "date", "validation_from": "2024", "test_from": "2023"}, "test needs both"),
    ],
)
def test_arguments_out_of_range(options, said):
    with pytest.raises(ConfigError, match=said):
        SplitBy(**options)


def test_a_column_that_is_not_there_and_a_second_split_by(tmp_path):
    corpus(tmp_path / "in", documents=10)
    with pytest.raises(ConfigError, match=r"the documents have no column 'sorce'\. Did you mean source"):
        prepare(tmp_path / "in", tmp_path / "out", transforms=[SplitBy("sorce")])
    with pytest.raises(ConfigError, match="SplitBy is there twice"):
        prepare(tmp_path / "in", tmp_path / "twice", transforms=[SplitBy("source"), SplitBy("source")])
