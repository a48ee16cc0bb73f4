"""Objectives on preferences reach their result: answers that are better than those of the network before."""

import pytest

from plugins.objectives.dpo import DPO
from plugins.objectives.kto import KTO
from plugins.objectives.orpo import ORPO
from plugins.objectives.simpo import SimPO
from tests.support.preference_task import base, compared, preferring


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return base(tmp_path_factory.mktemp("start"), 0)


@pytest.mark.ci
@pytest.mark.parametrize(
    "objective", [DPO(), KTO(), ORPO(weight=3.0), SimPO()], ids=lambda one: type(one).__name__
)
def test_answers_win_over_those_before(objective, start, tmp_path):
    """From 0.5; ORPO imitates the chosen answers as well, which are little better than random: its weight is above 1."""
    rate, moved = compared(start, preferring(tmp_path, 0, objective, start), 0, count=100)
    assert rate >= (0.85 if isinstance(objective, ORPO) else 0.9)
    assert 0 < moved < 4
