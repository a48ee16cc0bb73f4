"""Docstrings: summaries, first sentences, what is said of each argument."""

import pytest

from plugins.cli.configuration.docstrings import described, first_sentence, plain, summary


class Base:
    """Ignored.

    Args:
        width: Of the base.
        depth: Blocks.
    """


class Derived(Base):
    """Does one thing, e.g. This one, or
    another. Then more.

    And more.

    Args:
        width (int): Of all,
            in tokens.
        *names: Any :class:`~a.b.Name`.
    """

    def __init__(self, width, *names, lr):
        """Builds it.

        Args:
            width: Told by the class.
            lr: Learning rate.
        """


class Silent:
    def __init__(self):
        """Says it here."""


def test_arguments_are_told_by_class_then_constructor_then_bases():
    assert described(Derived) == {
        "width": "Of all, in tokens.",
        "names": "Any `Name`.",
        "lr": "Learning rate.",
        "depth": "Blocks.",
    }


def test_of_a_function():
    def function(a):
        """Adds.

        Args:
            a: A number.
        """

    assert described(function) == {"a": "A number."}
    assert summary(function) == "Adds."


def test_the_summary_is_the_first_sentence_of_the_class_or_its_constructor():
    assert summary(Derived) == "Does one thing, e.g. This one, or another."
    assert summary(Silent) == "Says it here."
    assert summary(type("Bare", (), {})) == ""


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("One. Two.", "One."),
        ("At 0.5 of it, i.e. Half. Two", "At 0.5 of it, i.e. Half."),
        ("Is it? Yes.", "Is it?"),
        ("no stop", "no stop"),
        ("Folder of `a.b`; see x.py. Two", "Folder of `a.b`; see x.py."),
        ("One. and on. Two", "One. and on."),
        ("", ""),
    ],
)
def test_first_sentences(text, first):
    assert first_sentence(text) == first


def test_roles_and_double_backquotes_go():
    assert plain(":meth:`~a.b.c` of :class:`d.E`, ``None``, `f <g>`_") == "`c` of `d.E`, `None`, `f <g>`_"
