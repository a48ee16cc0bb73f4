"""Memorisation, NeedleInHaystack, SampleDiversity: networks of which the figures are known."""

import re

import pytest
import torch

from core.errors import ConfigError
from datamodules.preparation.readers.text_documents import TextDocuments
from plugins.evaluations.memorisation import Memorisation
from plugins.evaluations.needle_in_haystack import NeedleInHaystack
from plugins.evaluations.sample_diversity import SampleDiversity, distinct
from tests.support.evaluated import certain, measure, model


def alphabet(ids):
    """The next letter; behind z the first."""
    return (ids[-1] + 1) % 257


def test_what_a_network_continues_verbatim_is_counted(tmp_path):
    letters = model(certain(257, alphabet))
    one = letters.encode(["a"])[0][0]
    texts = ["abcdefghijkl", "abcdefgh!jkl", "abcdeZghijkl", "abc"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    evaluation = Memorisation(TextDocuments(str(tmp_path)), prefix_tokens=4, continuation_tokens=8)
    assert letters.encode(["b"])[0][0] == one + 1
    assert len(evaluation.items(letters)) == 3  # one is too short
    assert measure(evaluation, letters) == {"extracted_share": 1 / 3, "matching_tokens": (8 + 4 + 1) / 3}
    with pytest.raises(ConfigError, match="none of 4 documents has 40 tokens"):
        Memorisation(TextDocuments(str(tmp_path)), prefix_tokens=20, continuation_tokens=20).items(letters)


def reading(given, seen_from):
    """Returns the id that recites the number of the needle, if it is among the last `seen_from` characters."""

    def follows(ids):
        text = given[0].tokenizer.decode(ids)
        answer = text.rpartition("number of")[2].rpartition(" is")[2]
        found = re.search(r"is (\d{5})\.", text[-seen_from:])
        wanted = f" {found[1]}." if found else " none"
        return given[0].encode([wanted[len(answer) :][:1] or "."])[0][0]

    return follows


def test_a_network_that_reads_all_finds_every_needle_and_one_that_sees_the_end_those_there(tmp_path):
    (tmp_path / "text.txt").write_text("It was a day like all others. Nobody came. " * 40)
    reader = TextDocuments(str(tmp_path))
    evaluation = NeedleInHaystack(reader, lengths=[280], depths=[0.0, 1.0], trials=1)
    given = [None]
    for seen, shares in ((10_000, (1.0, 1.0)), (180, (0.0, 1.0))):
        given[0] = model(certain(257, reading(given, seen)))
        found = measure(evaluation, given[0])
        assert (found["recall_at_0"], found["recall_at_100"]) == shares
        assert found["recall"] == sum(shares) / 2
        assert (found["needle_loss_nats_per_token"] < 1e-6) == (shares == (1.0, 1.0))


def test_needles_stand_between_sentences_of_prompts_that_fit(tmp_path):
    (tmp_path / "text.txt").write_text("It was a day like all others. Nobody came. " * 40)
    evaluation = NeedleInHaystack(
        TextDocuments(str(tmp_path)), lengths=[300, 500], depths=[0.0, 0.5], trials=2
    )
    given = model(certain(257, alphabet))
    items = evaluation.items(given)
    assert [item.group for item in items] == ["300_tokens"] * 4 + ["500_tokens"] * 4
    for item in items:
        prompt, length = item.content["prompt"], item.content["length"]
        assert length - 3 <= 1 + len(given.encode([prompt])[0]) <= length
        before, needle = re.search(r"(?s)^(.*?)(The secret number of \w+ is \d{5}\. )", prompt).groups()
        assert before == "" or before.endswith(". ")
        haystack = prompt.rpartition("\n\n")[0].replace(needle, "")
        assert abs(len(before) - item.content["depth"] * len(haystack)) <= 22  # half of the longest sentence
    with pytest.raises(ConfigError, match=r"has 1,7.* tokens, a haystack of 9,000 needs more"):
        NeedleInHaystack(TextDocuments(str(tmp_path)), lengths=[9000]).items(given)
    with pytest.raises(ConfigError, match="leave no room"):
        NeedleInHaystack(TextDocuments(str(tmp_path)), lengths=[50]).items(given)


def test_the_picture_has_a_number_for_each_length_and_depth(tmp_path):
    (tmp_path / "text.txt").write_text("It was a day like all others. Nobody came. " * 20)
    evaluation = NeedleInHaystack(TextDocuments(str(tmp_path)), lengths=[200, 300], depths=[0.5], trials=1)
    given = model(certain(257, alphabet))
    items = evaluation.items(given)
    with torch.no_grad():
        axes = evaluation.draw(items, evaluation.measure(given, items)).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0%", "0%"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["200", "300"]


def test_distinct_ngrams_and_repetition_of_samples():
    assert distinct(["a b a b", "a b"], 1) == 2 / 6
    assert distinct(["a b a b", "a b"], 2) == 2 / 4
    assert distinct(["a"], 2) == 0.0
    same = measure(
        SampleDiversity(prompts=["x"], samples=3, max_new_tokens=9, self_bleu=True),
        model(certain(257, lambda ids: ids[-1])),
    )
    assert same["repetition"] == 1 - 1 / 6  # six 4-grams, all the same
    assert same["distinct_1"] == pytest.approx(1 / 3)
    assert same["self_bleu"] == pytest.approx(100)
    assert same["mean_length_tokens"] == 9
