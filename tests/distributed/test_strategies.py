"""Every strategy computes what one process does, and the table of docs/cluster.md says of which this was measured."""

import pytest

from core import catalog
from plugins.strategies.pipeline_stages import is_beyond_gloo
from tests.support.combinations import COMBINATIONS
from tests.support.same_run import TOLERANCE, differences, fit, one_process
from tests.support.strategy_table import PAGE, rows


def parameter(item):
    return pytest.param(item, id=str(item), marks=getattr(pytest.mark, item.mark) if item.mark else ())


@pytest.mark.parametrize("item", list(map(parameter, COMBINATIONS)))
def test_is_the_run_of_one_process(item):
    if is_beyond_gloo(item.init_args.get("schedule", "")):
        pytest.skip("it is refused with this torch")
    apart = differences(fit(item.overlay, item.ranks), one_process(item.config))
    assert max(apart.values()) <= TOLERANCE, apart


def test_every_strategy_is_held_against_one_process():
    registered = {e.name for e in catalog.entries() if e.kind == "strategies" and e.package == "leyden"}
    assert {item.strategy for item in COMBINATIONS} == registered


def test_the_table_has_a_row_for_each_combination_and_its_differences_are_small():
    written = rows(PAGE.read_text(encoding="utf-8"))
    assert [row[:3] for row in written] == [[i.strategy, i.name, str(i.ranks)] for i in COMBINATIONS], (
        "write the table anew: python -m tests.support.strategy_table"
    )
    assert all(float(cell) <= TOLERANCE for row in written for cell in row[3:])
