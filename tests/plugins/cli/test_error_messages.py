"""Which technique an unexpected error is attributed to, and what the message says."""

import weakref

import pytest
from jsonargparse import ArgumentParser

from plugins.cli.error_messages import explain_error


def caught(function):
    try:
        function()
    except Exception as error:
        return error
    return pytest.fail("it did not fail")


def test_an_error_and_its_cause():
    def fails():
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer") from error

    lines = explain_error(caught(fails), "Acme").splitlines()
    assert lines[0] == "Acme failed with RuntimeError: outer"
    assert lines[1] == "because of KeyError: 'inner'"
    assert "test_error_messages.py" in lines[2]


class Refuses:
    def __init__(self, n: int = 1):
        raise ValueError(f"not {n}")


def test_what_jsonargparse_wraps_is_told_without_its_words():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=Refuses | None)
    config = parser.parse_object({"value": {"class_path": f"{__name__}.Refuses"}})
    text = explain_error(caught(lambda: parser.instantiate(config)))
    assert text.splitlines()[0] == "leyden failed with ValueError: not 1"
    assert "jsonargparse" not in text


def test_a_missing_module_gives_the_line_for_pip():
    def fails():
        import acme_absent.part  # noqa: F401

    assert "pip install acme_absent\n" in explain_error(caught(fails))


def test_what_failed_is_let_go_of_before_words_are_looked_for():
    class Large:
        pass

    def fails():
        held = Large()
        alive.append(weakref.ref(held))
        try:
            raise MemoryError("1 GiB")
        except MemoryError as error:
            raise RuntimeError("a step") from error

    alive = []
    error = caught(fails)
    assert alive[0]() is not None
    assert "because of MemoryError: 1 GiB" in explain_error(error)
    assert alive[0]() is None


def test_the_folder_that_the_user_stands_in_may_be_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        assert "at " + __file__ in explain_error(caught(lambda: 1 / 0))
    finally:
        monkeypatch.undo()
