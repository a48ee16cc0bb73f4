"""`sweep-filters`: shares against counts made here, what is sampled, and mistakes."""

import csv
import json

import matplotlib.image
import pytest

from core.__main__ import main
from core.errors import ConfigError
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from plugins.commands.sweep_filters import parsed, sampled

LENGTHS = list(range(10, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """50 documents of 10 to 59 words, and a full-width space in each, which Normalise makes a plain one."""
    folder = tmp_path_factory.mktemp("sweep")
    texts = ["\u3000the of" + " lamp" * (length - 2) for length in LENGTHS]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *texts]))
    return folder


def sweep(folder, transform, *more):
    words = ["--config", "data/text", f"--data.source={folder / 'text.jsonl'}", "--output", folder / "out"]
    return main(["sweep-filters", *map(str, words), "--transform", transform, *map(str, more)])


def test_shares_table_and_picture(folder, capsys):
    only = {"min_stop_words": 2, "max_words": None, "min_mean_word_length": None}
    stages = json.dumps(["Normalise", {"class_path": "GopherQuality", "init_args": only}])
    assert sweep(folder, "GopherQuality.min_words=20:60:5", f"--data.transforms={stages}") == 0
    with (folder / "out" / "GopherQuality.min_words.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["GopherQuality.min_words", "documents", "bytes"]
    sizes = {length: len(" the of") + 5 * (length - 2) for length in LENGTHS}
    for value, (found, documents, size) in zip([20, 30, 40, 50, 60], rows, strict=True):
        kept = [length for length in LENGTHS if length >= value]
        assert int(found) == value
        assert float(documents) == pytest.approx(len(kept) / 50, abs=1e-6)
        assert float(size) == pytest.approx(sum(sizes[n] for n in kept) / sum(sizes.values()), abs=1e-6)
    assert matplotlib.image.imread(folder / "out" / "GopherQuality.min_words.png").shape[:2] == (600, 960)
    printed = capsys.readouterr().out
    assert (
        f"50 documents of the sample; 50 documents, {sum(sizes.values()):,} bytes after Normalise" in printed
    )
    assert "80.0%" in printed


def test_a_transform_that_the_config_does_not_have_comes_last(folder, capsys):
    assert sweep(folder, "FineWebQuality.max_short_lines=0:1:3", "--documents", 7) == 0
    printed = capsys.readouterr().out
    assert "7 documents of the sample" in printed
    assert [line.split()[0] for line in printed.splitlines() if line.endswith("%")] == ["0", "1"]


def test_values():
    assert parsed("A.b=0:10:5") == ("A", "b", [0, 2, 5, 8, 10])
    assert parsed("a.b.C.d=0:1.0:3") == ("a.b.C", "d", [0.0, 0.5, 1.0])
    assert parsed("A.b=1:0.7:4")[2] == [1.0, 0.9, 0.8, 0.7]
    for word in (
        "A.b",
        "A=1:2:3",
        "A.b=1:2",
        "A.b=1:2:1",
        "A.b=1:2:1000",
        "A.b=x:2:3",
        "A.b=0:inf:3",
        ".b=1:2:3",
    ):
        with pytest.raises(ConfigError, match="FROM:TO:STEPS"):
            parsed(word)


def test_the_sample_is_of_all_pieces_and_the_same_each_time(tmp_path):
    for number in range(4):
        lines = [json.dumps({"text": f"{number}-{line}"}) + "\n" for line in range(20)]
        (tmp_path / f"{number}.jsonl").write_text("not JSON\n" + "".join(lines))
    reader = JSONLinesDocuments(str(tmp_path))
    tasks = [task | {"pieces": [piece]} for task in reader.tasks() for piece in task["pieces"]]
    reader.tasks = lambda: list(tasks)
    found = [batch["text"].to_pylist() for batch in sampled(reader, 8, 0)]
    assert sorted(found[0]) == [f"{number}-{line}" for number in range(4) for line in range(2)]
    assert found == [batch["text"].to_pylist() for batch in sampled(reader, 8, 0)]
    assert sum(map(len, sampled(reader, 1000, 0))) == 80


@pytest.mark.parametrize(
    ("transform", "more", "said"),
    [
        ("GopherQuality.min_word=0:9:3", [], "min_words"),
        ("GopherQualit.min_words=0:9:3", [], "GopherQuality"),
        ("GopherQuality.min_words=-9:9:3", [], "at least 0"),
        ("GopherQuality.min_words=0.5:9:3", [], "min_words"),
        ("TextDocuments.source=0:9:3", [], "it is no transform"),
        ("ExactDuplicates.ignore_case=0:1:2", [], "ignore_case"),
        ("Normalise", [], "FROM:TO:STEPS"),
        ("GopherQuality.min_words=0:9:3", ["--documents", "0"], "at least 1"),
        ("GopherQuality.min_words=0:9:3", ["--trainer.max_steps=3"], "--trainer.max_steps"),
    ],
)
def test_mistakes(folder, transform, more, said, capsys):
    assert sweep(folder, transform, *more) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) <= 10
