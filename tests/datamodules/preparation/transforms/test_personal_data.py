import random

import pyarrow
import pytest

from core.errors import ConfigError
from datamodules.preparation.transforms.personal_data import PersonalData, find
from tests.benchmarks.personal_data import TYPES, lines, scores

LABELLED = list(lines())


def test_precision_and_recall_of_each_type():
    found, errors = scores()
    for kind, score in found.items():
        own = [line.positive for line in LABELLED if line.file == kind]
        assert min(own.count(True), own.count(False)) >= 60, kind
        assert min(score.precision, score.recall) >= 0.95, (kind, score, errors)


@pytest.mark.parametrize("kind", TYPES)
def test_a_line_is_labelled_as_its_file_says(kind):
    for line in LABELLED:
        if line.file == kind:
            assert (kind in {mark.kind for mark in line.marks}) == line.positive, line.text


def test_twice_is_once():
    every = PersonalData()
    for line in LABELLED:
        once = every.redacted(line.text)
        assert every.redacted(once) == once


def test_one_type_alone_and_its_counts():
    text = "Write to anna@example.org or bob@example.org, call +49 30 901820."
    emails = PersonalData(["EMAIL"])
    assert emails.redacted(text) == "Write to <EMAIL> or <EMAIL>, call +49 30 901820."
    assert emails.take_counts() == {"EMAIL replaced": 2}
    assert emails.take_counts() == {}
    assert PersonalData(["PHONE"]).redacted(text).endswith("call <PHONE>.")


def test_the_order_of_types_does_not_matter():
    assert PersonalData(["PHONE", "CARD"]).fingerprint() == PersonalData(["CARD", "PHONE"]).fingerprint()
    text = "card 4111 1111 1111 1111"
    assert [found.kind for found in find(text, ["CARD", "PHONE"])] == ["CARD"]


@pytest.mark.parametrize(("types", "message"), [([], "is empty"), (["MAIL"], "'MAIL'")])
def test_mistakes(types, message):
    with pytest.raises(ConfigError, match=message):
        PersonalData(types)


def test_a_batch_keeps_its_rows():
    batch = pyarrow.record_batch({"text": ["a", "b@example.org"], "source": ["s"] * 2, "id": list("12")})
    left = PersonalData().apply(batch, pytest.fail)
    assert left.to_pydict() == {"text": ["a", "<EMAIL>"], "source": ["s", "s"], "id": ["1", "2"]}


@pytest.mark.parametrize(
    "code",
    [  # the examples of the registry
        "AD12 0001 2030 2003 5910 0100",
        "AT61 1904 3002 3457 3201",
        "BE68 5390 0754 7034",
        "DE89 3704 0044 0532 0130 00",
        "FR14 2004 1010 0505 0001 3M02 606",
        "GB29 NWBK 6016 1331 9268 19",
        "MT84 MALT 0110 0001 2345 MTLC AST0 01S",
        "NO93 8601 1117 947",
        "SC18 SSCB 1101 0000 0000 0000 1497 USD",
    ],
)
def test_examples_of_the_iban_registry(code):
    for written in (code, code.replace(" ", ""), code.lower()):
        assert find(written, ["IBAN"]) == [(0, len(written), "IBAN")]
    digit = next(at for at in range(len(code) - 1, 0, -1) if code[at].isdigit())
    other = code[:digit] + str((int(code[digit]) + 1) % 10) + code[digit + 1 :]
    assert find(other, ["IBAN"]) == []


def test_one_of_ten_numbers_is_a_card():
    """A Luhn checksum leaves one last digit of ten; it finds each changed digit."""
    draw = random.Random(1)
    for _ in range(50):
        body = "4" + "".join(draw.choices("0123456789", k=14))
        [card] = [body + last for last in "0123456789" if find(body + last, ["CARD"])]
        at = draw.randrange(1, 16)
        wrong = card[:at] + str((int(card[at]) + draw.randrange(1, 10)) % 10) + card[at + 1 :]
        assert find(wrong, ["CARD"]) == []


HOSTILE = {
    "KEY": ("-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\nAb+/", "eyJaaaaaaaaa.", "ghp_", "sk-ant-", "aws_secret_key = ", "1:AA"),
    "EMAIL": ("a", "a.", "@", "a@", "a@a.", "@a.", "@a-", "://", "//a@b.de", "a@b.de:", "_", "%", "\u4e2d@"),
    "IBAN": ("DE", "DE89", "DE89 ", "DE893704", "DE89-3704-", "A1"),
    "CARD": ("1", "4111 ", "4111-1111-", "4111111111111111", "4111 111111 "),
    "SSN": ("ssn", "SSN: ", "123-45-", "123-45-6789-", "social security ", "1 "),
    "IPV6": (":", "::", "2001:", "2001:a:", "2a::", "2"),
    "IPV4": ("1.", "1.1.1.", "1.1.1.1.", "93.184.216.34 ", "version "),
    "PHONE": ("(", "+", "+1", "+1 (", "0", "01 ", "030/", "(030) 123", "tel ", "phone number is on ", "1 (", "1)", "7 - "),
}  # fmt: skip


@pytest.mark.slow  # seconds for each pattern
@pytest.mark.timeout(120)  # the square of a megabyte takes hours
@pytest.mark.parametrize("kind", TYPES)
def test_time_is_linear_in_hostile_text(kind):
    for piece in HOSTILE[kind]:
        find((piece * (1 << 20))[: 1 << 20], [kind])
    mixed = "".join(random.Random(kind).choices(HOSTILE[kind], k=1 << 18))
    find(mixed[: 1 << 20], [kind])
