"""Perplexity: every token once, the context that windows leave, bytes."""

import math

import pytest

from core.errors import ConfigError
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.text_documents import TextDocuments
from plugins.evaluations.perplexity import Perplexity, windows
from tests.support.evaluated import byte_tokenizer, drawn, measure, model
from tests.support.records import write_lines

TEXTS = {"one.txt": "a short text", "two.txt": "a longer text, with its naïve café and 北京 " * 3}


@pytest.fixture
def reader(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return TextDocuments(str(tmp_path))


def nats(given, text, context):
    """Returns the loss of all tokens, each computed by itself from at most so many before it, in float64."""
    ids = [*given.beginning, *given.tokenizer.encode(text, add_special_tokens=False).ids]
    logs = [
        given.network.rule(ids[max(0, n - context) : n]).double().log_softmax(-1)[ids[n]]
        for n in range(1, len(ids))
    ]
    return -float(sum(logs)), len(logs)


def test_it_is_the_loss_of_every_token_of_all_documents(reader):
    given = model(drawn(257))
    total, tokens = map(sum, zip(*(nats(given, text, 10_000) for text in TEXTS.values()), strict=True))
    size = sum(len(text.encode()) for text in TEXTS.values())
    found = measure(Perplexity(reader, window=10_000), given)
    assert tokens == size  # its tokens are bytes
    # logits are float32: each log-probability is rounded to 2^-24 of about 10
    assert found["loss_nats_per_token"] == pytest.approx(total / tokens, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-6)


def test_tokens_of_two_bytes_change_what_is_divided_by_but_not_the_bytes(reader):
    tokenizer = byte_tokenizer([("t", "e"), ("x", "t")])
    given = model(drawn(259), tokenizer=tokenizer)
    found = measure(Perplexity(reader, window=10_000), given)
    total, tokens = map(sum, zip(*(nats(given, text, 10_000) for text in TEXTS.values()), strict=True))
    size = sum(len(text.encode()) for text in TEXTS.values())
    assert tokens < size
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-6)
    assert found["loss_nats_per_token"] == pytest.approx(total / tokens, rel=1e-6)


def test_without_a_token_that_begins_a_text_its_first_byte_does_not_count(reader):
    found = measure(Perplexity(reader, window=10_000), model(drawn(257), begins=False))
    size = sum(len(text.encode()) - 1 for text in TEXTS.values())
    per_token = found["loss_nats_per_token"]
    assert found["bits_per_byte"] == pytest.approx(per_token / math.log(2) * size / size, rel=1e-9)


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (8, 1), (100, 7)])
def test_windows_predict_each_token_once_with_the_context_that_fits(window, stride):
    ids = list(range(50))
    predicted = []
    for row in windows(ids, window, stride):
        assert len(row.ids) <= window + 1
        for at in range(row.begin, len(row.ids)):
            predicted.append(row.ids[at])
            # all of the window but what the stride leaves
            assert at >= min(row.ids[at], window + 1 - stride)
    assert predicted == ids[1:]


def test_windows_without_overlap_are_those_of_lm_eval():
    """As lm_eval.utils.get_rolling_token_windows(ids, prefix, 4, 1), made disjoint: the last one has full context."""
    rows = windows([0, *range(1, 11)], window=4, stride=4)
    assert [(list(row.ids), row.begin) for row in rows] == [
        ([0, 1, 2, 3, 4], 1),
        ([4, 5, 6, 7, 8], 1),
        ([6, 7, 8, 9, 10], 3),
    ]


def test_a_stride_of_one_gives_each_token_a_full_window(reader):
    given = model(drawn(257, window=6), max_sequence_length=6)
    total, tokens = map(sum, zip(*(nats(given, text, 6) for text in TEXTS.values()), strict=True))
    found = measure(Perplexity(reader, stride=1), given)
    assert found["loss_nats_per_token"] == pytest.approx(total / tokens, rel=1e-6)


def test_what_cannot_be_is_said(reader):
    given = model(drawn(257), max_sequence_length=6)
    with pytest.raises(ConfigError, match="window=7: the network sees 6 tokens"):
        Perplexity(reader, window=7).items(given)
    with pytest.raises(ConfigError, match="stride=7 is above window=6"):
        Perplexity(reader, stride=7).items(given)
    with pytest.raises(ConfigError, match="Say how many tokens"):
        Perplexity(reader).items(model(drawn(257)))
    with pytest.raises(ConfigError, match=r"no 'sorce'. Did you mean source"):
        Perplexity(reader, group_by="sorce").items(given)


def test_a_group_is_a_source(tmp_path):
    lines = write_lines(
        tmp_path / "texts.jsonl", [{"text": "a", "from": "books"}, {"text": "b", "from": "web"}]
    )
    evaluation = Perplexity(JSONLinesDocuments(lines, source_field="from"))
    given = model(drawn(257), max_sequence_length=32)
    assert [item.group for item in evaluation.items(given)] == ["books", "web"]
    assert evaluation.measure(given, []) == []
