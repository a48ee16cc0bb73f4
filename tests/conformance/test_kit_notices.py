"""Each proof of the kit fails for a technique that breaks its promise, and says what was measured."""

import importlib
from contextlib import suppress

import pytest

from conformance import Case, NotProvable, proofs, prove
from core import catalog
from core.catalog import KINDS
from core.errors import ConfigError
from tests.conftest import Packages
from tests.support.broken_promises import BROKEN, MODULES

SOUND = [("callbacks", "Mindful"), ("callbacks", "Paired"), ("networks", "Sound"), ("objectives", "Sound"), ("optimizers", "Sound"),
         ("precision", "Fine"), ("rewards", "Sound"), ("evaluations", "Sound"), ("data", "Here"), ("data", "Untouched")]  # fmt: skip

DECLARED = '''
from lightning.pytorch import Callback
from core.contracts import Network
from core.technique import technique

@technique(paper="a blog post", conflicts={"Other": "both stop the run"})
class Guard(Callback):
    """Guards.

    Args:
        limit: The highest loss.

    Example:
        trainer:
          callbacks+:
            - class_path: Guard
    """
    def __init__(self, limit: float = 1.0): ...
'''

MISDECLARED = [  # proof, what is replaced in DECLARED, by what, what the message says
    ("imports", "@technique", "1 / 0\n@technique", "cannot be imported: ZeroDivisionError"),
    ("leads_to_its_name", "    def", "\nclass Watch: ...\nGuard = Watch\nif 0:\n    def", "leads to 'Watch'"),
    ("is_declared", "a blog post", " ", "@technique(paper=...) is empty"),
    ("is_for_this_api", '"a blog post"', '"", api=">=99"', "written for core API >=99"),
    ("is_of_its_kind", "Guard(Callback)", "Guard(Network)", "does not derive from lightning"),
    ("is_documented", "limit: The", "other: The", "`Args:` does not describe limit"),
    ("shows_an_example", "class_path: Guard", "class_path: Gard", "does not name Guard"),
    ("conflicts_raise", "both stop the run", " ", "the conflict with Other has no reason"),
    ("conflicts_raise", '"Other"', '"acme.Other"', "with acme.Other it is not refused"),
    ("conflicts_raise", '"Other"', '"Guard"', "it is declared to conflict with itself"),
]


DEFAULT = {
    ("trains", "Stopping"),
    ("resumes_bitwise", "Forgetful"),
    ("is_causal", "Peeking"),
    ("sums_are_additive", "MeanOfMeans"),
    ("lowers_a_quadratic", "Climbing"),
    ("judges_each_answer_alone", "Comparing"),
    ("measures_each_item_alone", "Comparing"),
    ("rates_are_sound", "Negative"),
    ("reads_the_same_each_time", "Shuffled"),
    ("does_each_task_once", "Doubling"),
    ("what_it_writes_is_read_back", "Dropping"),
    ("gives_other_rows_in_each_step", "Constant"),
    ("stays_near_float32", "Idle"),
    ("has_a_summary", "breaking"),
}
"""A proof of each module of the kit, which is tried by default; the others are CI's."""


def marked():
    """Yields the table of broken promises."""
    for row in BROKEN:
        gpu = row[0].endswith("_on_a_gpu")
        marks = [] if (row[0], row[2]) in DEFAULT else [pytest.mark.gpu if gpu else pytest.mark.ci]
        yield pytest.param(*row, id="-".join(row[:4]), marks=marks)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Registers every technique of tests.conformance.broken."""
    folder = tmp_path_factory.mktemp("site-packages")
    chosen = {(kind, name) for _, kind, name, *_ in BROKEN} | set(SOUND)
    entries = {}
    for kind, name in sorted(chosen):
        value = f"tests.conformance.broken.{MODULES[kind]}:{name}"
        entries.setdefault(f"leyden.{kind}", {})[name] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        Packages(folder).add("broken_techniques", entries)
        yield
    catalog.entries.cache_clear()


def the(proof, case):
    [found] = [item for item in proofs(case) if item.name == proof]
    return found


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("proof", "kind", "name", "told", "options"), list(marked()))
def test_a_broken_promise_is_noticed(proof, kind, name, told, options):
    case = Case(name, kind=kind, **options)
    with pytest.raises(AssertionError) as caught:
        the(proof, case)(case)
    message = str(caught.value)
    assert message.startswith(f"{name} of broken_techniques 1.2 breaks {proof}: ")
    assert told in message


@pytest.mark.ci
@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("kind", "name"), SOUND, ids=lambda part: part)
def test_what_is_sound_is_not_complained_of(kind, name):
    case = Case(name, kind=kind)
    for proof in proofs(case):
        # what all kinds have in common is tried with the callbacks
        if proof.runs and (kind in ("callbacks", "precision") or len(proof.kinds) == 1):
            with suppress(NotProvable):
                proof(case)


@pytest.mark.parametrize(("proof", "old", "new", "told"), MISDECLARED, ids=lambda part: part[:20])
def test_a_broken_declaration_is_noticed(proof, old, new, told, packages):
    assert old in DECLARED
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, DECLARED.replace(old, new))
    case = Case("Guard")
    with pytest.raises(AssertionError) as caught:
        the(proof, case)(case)
    assert str(caught.value).startswith(f"Guard of acme 1.2 breaks {proof}: ")
    assert told in str(caught.value)


def test_what_is_declared_well_is_not_complained_of(packages):
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, DECLARED)
    case = Case("Guard")
    for proof in proofs(case):
        if not proof.runs:
            proof(case)


def test_a_name_of_two_packages_is_noticed(packages):
    for package in ("acme", "zeta"):
        packages.add(package, {"leyden.callbacks": {"Guard": f"{package}:Guard"}}, DECLARED)
    case = Case(next(entry for entry in catalog.entries() if entry.package == "acme"))
    with pytest.raises(AssertionError, match="registered 2 times"):
        the("has_a_name_of_its_own", case)(case)


def test_every_proof_has_a_technique_that_breaks_it():
    from tests.support.sabotages import SABOTAGES

    named = {proof for proof, *_ in [*BROKEN, *MISDECLARED, *SABOTAGES]}
    every = {proof.name for kind in KINDS for proof in proofs(kind)}
    assert every - named == {
        "has_a_name_of_its_own",  # which takes two packages: the test above
        "offers_hooks_as_described",  # test_offers.py
    }
    assert named <= every


@pytest.mark.ci
def test_all_that_is_broken_is_said_at_once(packages):
    source = DECLARED.replace("a blog post", " ").replace("Example:", "See:")
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, source)
    with pytest.raises(AssertionError) as caught:
        prove("Guard", limit=2.0)
    message = str(caught.value)
    assert [line.partition(":")[0] for line in message.split("\n\n")] == [
        "Guard of acme 1.2 breaks is_declared",
        "Guard of acme 1.2 breaks shows_an_example",
    ]


def test_an_exempt_promise_is_not_tested(packages):
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, DECLARED)
    case = Case("Guard", exempt={"resumes_bitwise": "it looks at the clock"})
    with pytest.raises(NotProvable, match="it looks at the clock"):
        the("resumes_bitwise", case)(case)


def test_an_exemption_from_no_proof_is_refused(packages):
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, DECLARED)
    with pytest.raises(ConfigError, match="no proof 'resume_bitwise' to be exempt from"):
        proofs(Case("Guard", exempt={"resume_bitwise": "it looks at the clock"}))


def test_a_technique_without_what_it_needs_is_not_run(packages):
    source = DECLARED.replace('post"', 'post", needs=[Package("no-such-package>=2")]').replace(
        "import technique", "import Package, technique"
    )
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, source)
    case = Case("Guard")
    with pytest.raises(NotProvable, match="no-such-package is not installed"):
        the("trains", case)(case)
    the("is_documented", case)(case)


def test_the_broken_modules_hold_nothing_unused():
    from tests.support import sabotages

    named = {name for _, _, name, *_ in [*BROKEN, *sabotages.SABOTAGES]} | {"Changed"}
    named |= {name for _, name in [*SOUND, *sabotages.SOUND]}
    for module in {*MODULES.values(), *sabotages.MODULES.values()}:
        members = vars(importlib.import_module(f"tests.conformance.broken.{module}")).items()
        own = {
            name: item
            for name, item in members
            if getattr(item, "__module__", "").endswith(f"broken.{module}")
        }
        bases = {base.__name__ for item in own.values() for base in getattr(item, "__bases__", ())}
        assert set(own) <= named | bases
