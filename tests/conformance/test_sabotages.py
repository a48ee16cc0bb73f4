"""Techniques that are broken where it is easily missed: which proof notices each, and that their sound twins pass it."""

import importlib

import pytest

from conformance import Case, NotProvable, proofs
from core import catalog
from tests.conftest import Packages
from tests.support import broken_promises
from tests.support.broken_promises import BROKEN
from tests.support.sabotages import MODULES, SABOTAGES, SOUND


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory):
    """Registers every technique of the table that lies in tests.conformance.broken."""
    folder = tmp_path_factory.mktemp("site-packages")
    entries = {}
    for kind, name in sorted({(kind, name) for _, kind, name, *_ in SABOTAGES} | SOUND):
        module = f"tests.conformance.broken.{MODULES[kind]}"
        if hasattr(importlib.import_module(module), name):
            entries.setdefault(f"leyden.{kind}", {})[name] = f"{module}:{name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        Packages(folder).add("sabotages", entries)
        catalog.entries.cache_clear()
        yield
    catalog.entries.cache_clear()


CASES = {}


def case_of(kind, name, options):
    """Returns the case of a technique, one for all tests: they share its runs."""
    entry = next(e for e in catalog.entries() if (e.kind, e.name) == (kind, name))
    return CASES.setdefault((kind, name), Case(entry, **options))


def the(proof, case):
    [found] = [item for item in proofs(case) if item.name == proof]
    return found


LONG = {"crashing", "Hoarding"}
"""Those that take longest."""
DEFAULT = {"AttendingAcross", "TrainingMean", "Normed", "Containing", "Sets"}
"""One technique of each kind that can be tried in the process."""
BROKEN_IN_CI = {row[0] for row in BROKEN}
"""Proofs of which test_kit_notices.py breaks the promise in CI: a further way to break it is slow."""


def marked():
    """Yields the table."""
    tried = set(BROKEN_IN_CI)
    for row in SABOTAGES:
        again = row[0] in tried or row[2] in LONG
        marks = [] if row[2] in DEFAULT else [pytest.mark.slow if again else pytest.mark.ci]
        if not again:
            tried.add(row[0])
        yield pytest.param(*row, id=f"{row[2]}-{row[0]}", marks=marks)


@pytest.mark.parametrize(("proof", "kind", "name", "told", "twin", "options"), list(marked()))
def test_a_sabotage_is_noticed_and_its_twin_is_not_complained_of(proof, kind, name, told, twin, options):
    given = {"init_args": options.get("init_args")}
    with pytest.raises(AssertionError) as caught:
        the(proof, case_of(kind, name, given))(case_of(kind, name, given))
    message = str(caught.value)
    assert message.startswith(f"{name} of sabotages 1.2 breaks {proof}: ")
    assert told in message
    sound = case_of(kind, twin, given)
    the(proof, sound)(sound)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["Diligent", "Accumulating", "Watching"])
def test_a_diligent_callback_passes_every_proof_that_runs_it(name):
    case = case_of("callbacks", name, {})
    spared = {"builds_from_yaml", "config_round_trips"} if name != "Diligent" else set()
    for proof in proofs(case):
        if proof.runs and not proof.gpu and proof.name not in spared:
            if proof.name == "watching_changes_nothing" and name != "Watching":
                continue
            proof(case)


def test_a_network_may_refuse_what_it_cannot_keep_apart():
    case = case_of("networks", "Refusing", {})
    with pytest.raises(NotProvable, match="it refuses document_ids"):
        the("documents_are_isolated", case)(case)


def test_there_are_39_sabotages_and_more_of_every_kind():
    table = [(kind, name, proof) for proof, kind, name, *_ in [*SABOTAGES, *BROKEN]]
    caught = {(kind, name) for kind, name, _ in table}
    assert len(caught) >= 39
    kinds = {kind for kind, _ in caught}
    assert kinds == set(broken_promises.MODULES)
