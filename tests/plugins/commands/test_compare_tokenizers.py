"""`compare-tokenizers`: figures against counts made here, what is written, and mistakes."""

import io
import json
import math
import os

import matplotlib.image
import pytest

from core.__main__ import main
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from plugins.commands.compare_tokenizers import built
from plugins.commands.tokenizer_comparison import (
    Measured,
    Part,
    Sample,
    as_markdown,
    draw_png,
    measure,
    table,
)

ENGLISH = [
    f"the {word} and the {other} of number {index}"
    for index in range(30)
    for word in "ab"
    for other in ("cat", "dog")
]
OTHER = [f"naïve café {index} 北京 🙂" for index in range(30)]


@pytest.fixture
def corpora(tmp_path):
    """Two sources."""
    for name, texts in (("english", ENGLISH), ("other", OTHER)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return [str(tmp_path / "english.jsonl"), str(tmp_path / "other.jsonl")]


def run(*words):
    return main(["compare-tokenizers", *map(str, words)])


def test_figures_are_the_counts(corpora):
    samples = {name: Sample.of(TextDocuments(name)) for name in corpora}
    assert [samples[name].texts for name in corpora] == [ENGLISH[::10], OTHER[::10]]
    assert list(samples[corpora[0]].training()) == [text for index, text in enumerate(ENGLISH) if index % 10]
    texts = {name: sample.texts for name, sample in samples.items()}
    measured = measure("mine", BPETokenizer(270), list(samples[corpora[0]].training()), texts)
    reference = BPETokenizer(270)
    reference.prepare(samples[corpora[0]].training())
    ids = {name: reference.encode_batch(own) for name, own in texts.items()}
    for name, own in texts.items():
        part, tokens = measured.parts[name], sum(map(len, ids[name]))
        assert part == Part(
            len(own), sum(len(text.encode()) for text in own), len(" ".join(own).split()), tokens, len(own)
        )
    everything = [id for lists in ids.values() for own in lists for id in own]
    assert measured.used == len(set(everything))
    assert measured.vocab_size == 270
    bytes_ = sum(len(text.encode()) for own in texts.values() for text in own)
    assert measured.bytes_per_token == bytes_ / len(everything)
    documents = sum(map(len, texts.values()))
    assert measured.sequences(16) == math.ceil((len(everything) + documents) / 16)
    assert measured.seconds > 0


def test_what_a_tokenizer_loses_is_counted(corpora, tmp_path):
    from tokenizers import Tokenizer

    lossy = BPETokenizer(300)
    lossy.prepare(ENGLISH)
    described = json.loads(lossy.to_json())
    described["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(Tokenizer.from_str(json.dumps(described)).to_str())
    measured = measure(
        "lossy", PretrainedTokenizer(str(tmp_path)), [], {"x": ["lower", "Upper", "Also", "this"]}
    )
    assert measured.exact_share == 0.5


def test_the_table_is_the_closed_forms():
    parts = {"a": Part(2, 100, 10, 25, 1), "b": Part(2, 60, 5, 15, 2)}
    rows = table(
        [
            Measured("one", 200, 50, 0.001, parts),
            Measured("two", 100, 99, 0.002, {"a": Part(2, 100, 10, 50, 2), "b": Part(2, 60, 5, 30, 2)}),
        ],
        8,
    )
    assert rows[1] == ("one", "200", "25.0%", "4.000", "2.500", "3.000", "0.16", "75.0%", "6", "100.0%")
    assert rows[2][-2:] == ("11", "200.0%")
    assert len(rows[0]) == len(rows[1])
    assert "| one | 200 | 25.0% |" in as_markdown(rows, "note")


@pytest.mark.parametrize("sources", [1, 3])
def test_the_picture_grows_with_what_is_compared(sources):
    parts = {f"source {number}": Part(2, 100, 10, 25, 1) for number in range(sources)}
    few, many = (
        matplotlib.image.imread(
            io.BytesIO(draw_png([Measured(f"t{n}", 200, 50, 0.1, parts) for n in range(count)], 8))
        )
        for count in (2, 6)
    )
    assert many.shape[0] > few.shape[0]
    assert few.std() > 0.05


def test_the_command_writes_table_and_picture(corpora, tmp_path, capsys):
    trained = tmp_path / "trained"
    trained.mkdir()
    tokenizer = BPETokenizer(280)
    tokenizer.prepare(OTHER)
    (trained / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    before = dict(os.environ)
    words = ["BPETokenizer:vocab_size=290", "WordPieceTokenizer:vocab_size=520", trained, "--length", 32]
    assert run(*words, "--data", *corpora, "--output", tmp_path / "out") == 0
    assert {key: value for key, value in os.environ.items() if key in before} == before
    printed = capsys.readouterr().out
    written = (tmp_path / "out" / "compare-tokenizers.md").read_text(encoding="utf-8")
    for message in (
        "BPETokenizer:vocab_size=290",
        "WordPieceTokenizer:vocab_size=520",
        str(trained),
        "100.0%",
        "of 32 tokens",
    ):
        assert message in printed
        assert message in written
    assert f"tokens/word, {corpora[1]}" in printed
    assert matplotlib.image.imread(tmp_path / "out" / "compare-tokenizers.png").shape[1] == 1650


def test_words_of_the_command_line_become_tokenizers(tmp_path, monkeypatch):
    assert built("BPETokenizer:vocab_size=300").fingerprint() == BPETokenizer(300).fingerprint()
    assert built("BPETokenizer").vocab_size == 4096
    monkeypatch.chdir(tmp_path)
    tokenizer = BPETokenizer(260)
    tokenizer.prepare(ENGLISH)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    for word in (
        "tokenizer.json",
        ".",
        str(tmp_path),
        "PretrainedTokenizer:path=tokenizer.json,end_of_text=<|endoftext|>",
    ):
        assert built(word).encode_batch(["the cat"]) == tokenizer.encode_batch(["the cat"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["BPETokeniser"], "Did you mean BPETokenizer?"),
        (["BPETokenizer:vocabsize=300"], "Did you mean vocab_size?"),
        (["BPETokenizer:300"], "write arguments as BPETokenizer:vocab_size=300"),
        (["BPETokenizer:vocab_size"], "write arguments as BPETokenizer:vocab_size=VALUE"),
        (["BPETokenizer:vocab_size=many"], "vocab_size cannot be 'many', it is of type int"),
        (["BPETokenizer:vocab_size=[1"], "vocab_size cannot be '[1'"),
        (["BPETokenizer:vocab_size=3"], "take 257"),
        (["PretrainedTokenizer"], "needs path"),
        (["TextDocuments"], "There is no tokenizer 'TextDocuments'"),
        (["no/such/tokenizer.json"], "there is no file or folder no/such/tokenizer.json"),
        (["BPETokenizer", "BPETokenizer"], "given twice"),
        (["BPETokenizer", "--length", "0"], "--length is 0"),
        (["BPETokenizer", "--data", "no-such-text"], "no-such-text"),
    ],
)
def test_mistakes_are_explained(words, message, capsys):
    assert run(*words) == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert len(complaint.splitlines()) <= 10
