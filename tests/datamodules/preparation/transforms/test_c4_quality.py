import hashlib
from collections import Counter

import pytest

from core.errors import ConfigError
from datamodules.preparation.transforms.c4_quality import C4Quality
from tests.support.decisions import batch, configurations, name_of, texts, theirs

NAMES = {
    "min_num_sentences": "min_sentences",
    "min_words_per_line": "min_line_words",
    "max_word_length": "max_word_characters",
    "filter_no_terminal_punct": "closed_lines",
    "remove_citations": "citations",
    "filter_javascript": "javascript",
    "filter_policy": "policies",
    "filter_lorem_ipsum": "lorem_ipsum",
    "filter_curly_bracket": "curly_brackets",
}
REASONS = {
    "too_few_sentences": "few sentences",
    "lorem_ipsum": "lorem ipsum",
    "curly_bracket": "curly bracket",
}
OFF = {name: None if name.startswith(("min", "max")) else False for name in NAMES.values()}


@pytest.mark.parametrize("one", configurations("C4QualityFilter"), ids=name_of)
def test_decisions_reasons_and_texts_are_those_of_datatrove(one):
    """Save that what is left without any text is dropped as empty, where datatrove keeps it."""
    options = {NAMES[name]: None if value == -1 else value for name, value in one["options"].items()}
    found = [C4Quality(**options).cleaned(text) for text in texts()]
    expected = [their and REASONS[their] for their in theirs(one)]
    assert [None if reason == "empty" else reason for _, reason in found] == expected
    kept = [text for text, reason in found if reason in (None, "empty")]
    assert hashlib.sha256("".join(f"{text}\0" for text in kept).encode()).hexdigest() == one["kept"]


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({"closed_lines": True}, "a.\nb\nc...\n'd'\ne!\nf:", "a.\n'd'\ne!"),
        ({"min_line_words": 3}, "a b\na b c", "a b c"),
        ({"max_word_characters": 3}, "abc abc\nabcd", "abc abc"),
        ({"citations": True}, "a[1] b[] c[edit] d[citation needed] e[x]", "a b c d e[x]"),
        ({"javascript": True}, "JavaScript!\nyes", "yes"),
        ({"policies": True}, "Our Cookie Policy\nuses cookies\nyes", "yes"),
        ({}, "  a \r\n\tb\u2028c", "a\nb\nc"),
    ],
)
def test_a_rule_for_lines_alone(options, text, expected):
    assert C4Quality(**{**OFF, **options}).cleaned(text) == (expected, None)


@pytest.mark.parametrize(
    ("options", "kept", "dropped", "reason"),
    [
        ({"min_sentences": 3}, "No. So! Yes?", "No. So!", "few sentences"),
        ({"min_sentences": 3}, "No. So.\nC", "No... So\n", "few sentences"),
        ({"lorem_ipsum": True}, "lorem", "Lorem Ipsum", "lorem ipsum"),
        ({"lorem_ipsum": True, "closed_lines": True}, "Yes.\nlorem ipsum", "lorem ipsum.", "lorem ipsum"),
        ({"curly_brackets": True}, "a } b", "a { b", "curly bracket"),
        ({}, "a", " ", "empty"),
    ],
)
def test_a_rule_for_pages_alone(options, kept, dropped, reason):
    stage = C4Quality(**{**OFF, **options})
    assert (stage.cleaned(kept)[1], stage.cleaned(dropped)[1]) == (None, reason)


def test_a_batch_has_the_cleaned_texts_and_says_what_was_dropped():
    dropped = Counter()
    stage = C4Quality(**{**OFF, "citations": True, "curly_brackets": True})
    left = stage.apply(
        batch(["a[1]", "{", " ", "b"]), lambda reason, rows: dropped.update({reason: next(iter(rows))})
    )
    assert left.to_pydict() == {"text": ["a", "b"], "source": ["s", "s"], "id": ["0", "3"]}
    assert dropped == {"curly bracket": 1, "empty": 2}


def test_a_negative_number_is_refused():
    with pytest.raises(ConfigError, match=r"C4Quality: min_sentences is -1\. It has to be at least 0"):
        C4Quality(min_sentences=-1)
