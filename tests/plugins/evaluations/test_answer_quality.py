"""AnswerQuality: sums of answers give the scores of the corpus."""

import json
import random

import pytest
from sacrebleu.metrics import BLEU, CHRF
from torchmetrics.functional.text import rouge_score, squad

from core.errors import ConfigError
from plugins.evaluations import text_scores
from plugins.evaluations.answer_quality import AnswerQuality
from tests.support.evaluated import certain, measure, model

WORDS = ("the", "a", "cat", "dog", "sat", "on", "mat,", "ran", "far", "away!", "naïve", "42", "北京")


def corpus():
    rng = random.Random(0)
    draw = lambda most: " ".join(rng.choices(WORDS, k=rng.randint(0, most)))  # noqa: E731
    answers = [draw(12) for _ in range(60)]
    references = [[draw(12) or "a", answer.replace("cat", "dog") or "the"] for answer in answers]
    return answers, references


def total(score):
    answers, references = corpus()
    sums = {"items": float(len(answers))}
    for answer, own in zip(answers, references, strict=True):
        for name, value in text_scores.SCORES[score](answer, own).items():
            sums[name] = sums.get(name, 0.0) + value
    return text_scores.figures(sums), answers, references


def test_bleu_and_chrf_are_sacrebleus():
    for score, metric in (("bleu", BLEU(force=True)), ("chrf", CHRF())):
        found, answers, references = total(score)
        expected = metric.corpus_score(answers, list(zip(*references, strict=True))).score
        assert 0 < expected < 100
        assert found == {score: pytest.approx(expected, rel=1e-12)}


def test_squad_and_rouge_are_those_of_torchmetrics():
    found, answers, references = total("squad")
    expected = squad(
        [{"prediction_text": answer, "id": str(n)} for n, answer in enumerate(answers)],
        [
            {"answers": {"text": own, "answer_start": [0, 0]}, "id": str(n)}
            for n, own in enumerate(references)
        ],
    )
    # they are float32 there
    assert found["exact_match"] == pytest.approx(float(expected["exact_match"]) / 100, rel=1e-6)
    assert found["f1"] == pytest.approx(float(expected["f1"]) / 100, rel=1e-6)
    found, answers, references = total("rouge")
    keys = ("rouge1", "rouge2", "rougeL")
    expected = rouge_score(answers, references, accumulate="best", rouge_keys=keys)
    for key in keys:
        assert found[key.lower()] == pytest.approx(float(expected[f"{key}_fmeasure"]), rel=1e-6)


def reciting(text):
    """Returns a model that continues any prompt with a text, over and over."""
    prompt = {"length": 0}

    def follows(ids):
        return given.encode([text])[0][(len(ids) - prompt["length"]) % len(text)]

    given = model(certain(257, follows))
    return given, prompt


def test_an_answer_ends_before_a_stop_text_and_the_best_reference_counts(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prompt": "Who?", "answer": ["Nobody", "the cat"], "kind": "pets"}) + "\n")
    given, prompt = reciting("A cat.\nQ: ")
    evaluation = AnswerQuality(str(path), stop=["\n"], max_new_tokens=30, group_by="kind")
    [item] = evaluation.items(given)
    assert item.group == "pets"
    prompt["length"] = len(given.encode_prompts(["Who?"])[0])
    assert measure(evaluation, given) == {"exact_match": 1.0, "f1": 1.0}
    [one] = evaluation.measure(given, [item])
    assert one.shown == {"prompt": "Who?", "answer": "A cat.", "reference": "Nobody"}


def test_a_record_without_the_field_is_said(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "Who?", "answers": "x"}\n')
    given, _ = reciting("x")
    with pytest.raises(ConfigError, match=r":1: the field 'answer'.* is missing. Did you mean answers"):
        AnswerQuality(str(path)).items(given)
