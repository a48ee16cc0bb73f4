"""Which results are the same."""

import pytest

from core.errors import ConfigError
from plugins.rewards.exact_answer import ExactAnswer
from toolkit.rewards import Sample

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = <<48+24=72>>72 clips.\n#### 72"
"""As the data set has it."""


def value(answer, truth, **options):
    return ExactAnswer(**options).score([Sample("How many?", answer, [1], True, {"answer": truth})])[0]


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("She sold 72 clips.\n#### 72", GSM8K),
        ("#### 72.00", GSM8K),
        ("#### $72", GSM8K),
        ("#### 72 clips", GSM8K),
        ("#### 70\nNo.\n#### 72\nDone.", GSM8K),
        ("The answer is 72.", GSM8K),
        ("**Answer:** 72", GSM8K),
        ("48 + 24 = 72.", GSM8K),
        ("so \\boxed{72}", GSM8K),
        ("1 \\boxed{\\text{about } \\frac{1}{2}}", "\\text{about } 1/2"),
        ("\\boxed{\\dfrac{1}{2}}", 0.5),
        ("The answer is \\(\\frac{3}{4}\\).", "0.75"),
        ("\N{VULGAR FRACTION ONE HALF}", "0.5"),
        ("#### 1,234,567.50", 1234567.5),
        ("it is \N{MINUS SIGN}3", -3),
        ("-$5", "$-5"),
        ("50 %", "50%"),
        ("18 dollars", "$18"),
        ("1.5e3", 1500),
        ("The answer is Paris.", "paris"),
        ("#### x^2 + 1", "$x^2+1$"),
        ("7", ["6", "7"]),
    ],
)
def test_the_same_result_in_another_form(answer, truth):
    assert value(answer, truth) == 1


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("#### 71", GSM8K),
        ("#### 720", GSM8K),
        ("72\n#### 71", GSM8K),
        ("\\boxed{71} #### 72", GSM8K),
        ("\\boxed{72", "7"),
        ("", GSM8K),
        ("####", GSM8K),
        ("The answer is", GSM8K),
        ("1/0", "0"),
        ("#### 18 km", "18 m"),
        ("#### 18 euros", "$18"),
        ("1,23", "123"),
        ("0.3333333", "1/3"),
        ("1e999", "1"),
        ("9" * 5000, "9"),
        ("", "$"),
        ("London", "Paris"),
    ],
)
def test_another_result(answer, truth):
    assert value(answer, truth) == 0


def test_what_marks_no_result():
    assert [value("I have 3, so 4", "4", unmarked=form) for form in ("last_number", "whole", "wrong")] == [
        1,
        0,
        0,
    ]
    assert [value("no number", "No number", unmarked=form) for form in ("last_number", "whole", "wrong")] == [
        1,
        1,
        0,
    ]
    assert [value("#### 4", "4", unmarked=form) for form in ("last_number", "whole", "wrong")] == [1, 1, 1]


def test_values_and_field():
    sample = Sample("p", "4", [1], True, {"solution": "#### 4"})
    assert ExactAnswer(field="solution", right=2.0, wrong=-1.0).score(
        [sample, sample._replace(answer="5")]
    ) == [2, -1]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"answers": "4", "id": 1}, "is missing. Did you mean answers?"),
        ({"answer": ""}, "is empty."),
        ({"answer": None}, "is empty."),
    ],
)
def test_a_record_without_the_field(record, told):
    with pytest.raises(ConfigError) as caught:
        ExactAnswer().score([Sample("How many?", "4", [1], True, record)])
    assert f"ExactAnswer.field: the field 'answer' of a record {told}" in str(caught.value)
    assert "prompt: 'How many?'" in str(caught.value)


def test_long_answers_take_time_in_proportion():
    """Each of these would take hours if its time grew with the square of the length."""
    for piece in ("1,", "\\frac{", "\\boxed{", "answer is ", "$1 ", "9", "\\text{", "#### "):
        assert value(piece * 200_000, "5") == 0
