"""Advice of techniques that are not selected: for runs that would gain, where nothing forbids it."""

import pytest

from tests.support.cli_runs import core, finished  # noqa: F401

LINE = "Compile would save about 20% of the time of these 20,000 steps: --trainer.callbacks+=Compile"
LONG = "--trainer.max_steps=20000"


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        ([LONG], True),
        ([], False),  # its steps take half a minute, about as long as the compiler
        ([LONG, "--trainer.callbacks+=Compile"], False),
        ([LONG, "--trainer.callbacks+=StochasticDepth"], False),  # a conflict
    ],
)
def test_compile_is_advised_where_it_pays(words, advised, core):  # noqa: F811
    done = core("check", "--config=quickstart", *words)
    assert done.code == 0, done.err
    assert (LINE in done.out) == advised
    assert ("Compile would" in done.out) == advised
