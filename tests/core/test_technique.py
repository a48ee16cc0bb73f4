"""Declarations, the needs that they may state, and the versions of the core that they were written for."""

import pytest

from core import API_VERSION, __version__, catalog
from core.errors import ConfigError
from core.technique import Declaration, Device, Feature, Package, WorldSize, declaration_of, technique
from tests.support.offers import offering
from toolkit.selection import Run, Selected


@technique(paper="a test", owns=("batch_size",), offers=("patience",))
class Declared:
    """Has a declaration."""


class Derived(Declared):
    """Has none of its own."""


def test_a_declaration_is_not_inherited():
    assert declaration_of(Declared) == Declaration("a test", owns=("batch_size",), offers=("patience",))
    assert declaration_of(Derived) is None


# -- needs -----------------------------------------------------------------------------------------


def test_a_missing_package_comes_with_the_line_that_installs_it():
    missing = Package("leyden-no-such-thing>=2").missing(Run())
    assert missing == "leyden-no-such-thing is not installed: pip install 'leyden-no-such-thing>=2'"
    missing = Package("leyden-no-such-thing>=2", extra="acme").missing(Run())
    assert missing.endswith("pip install 'leyden[acme]'")


def test_a_package_that_is_too_old_is_named_with_both_versions():
    missing = Package("PyYAML>=900").missing(Run())
    assert missing.startswith("PyYAML>=900 is needed, ")
    assert missing.endswith(" is installed: pip install 'PyYAML>=900'")


def test_an_installed_package_satisfies_also_as_prerelease_or_with_a_local_version(packages):
    packages.add("acme_nightly", {}, version="3.0.dev1")
    packages.add("acme_local", {}, version="2.1+cpu")
    for need in ("PyYAML>=6,<900", "pyyaml", "acme-nightly>=2", "acme_local>=2.1,<2.2"):
        assert Package(need).missing(Run()) is None


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_run_must_be_on_the_device_whatever_the_machine_has(kind):
    assert Device(kind).missing(Run(accelerator=kind)) is None
    assert Device(kind).missing(Run(accelerator="cpu")) == (
        f"a {kind.upper()} device is needed, this run is on CPU: set --trainer.accelerator={kind} "
        "on a machine that has one"
    )


@pytest.mark.gpu
def test_a_device_must_be_capable_enough():
    import torch

    found = torch.cuda.get_device_capability(0)
    run = Run(accelerator="cuda")
    assert Device("cuda", capability=found).missing(run) is None
    assert Device("cuda", capability=(found[0], 0)).missing(run) is None
    missing = Device("cuda", capability=(99, 0)).missing(run)
    assert missing.startswith("a CUDA device of compute capability 99.0 or more is needed, device ")
    assert " has {}.{}: ".format(*found) in missing


@pytest.mark.parametrize(("processes", "enough"), [(1, False), (2, True), (8, True)])
def test_a_least_number_of_processes(processes, enough):
    missing = WorldSize(at_least=2).missing(Run(world_size=processes))
    assert (missing is None) == enough
    if missing:
        assert missing == (
            "at least 2 processes are needed, this run has 1: set --trainer.devices or --trainer.num_nodes"
        )


def test_a_feature_is_offered_by_whichever_technique_declares_it():
    offering = Selected("data", "A", "acme.A", "-", "-", "-", Declaration("", offers=("exact_resume", "b")))
    assert Feature("exact_resume").missing(Run([offering])) is None
    assert Feature("c").missing(Run([offering])) == (
        "nothing in this run offers c: no installed package has one that does"
    )


def test_who_offers_a_feature_is_found_without_importing_anybody(packages):
    source = (
        "raise RuntimeError('imported')\n"
        "@technique(paper='', offers=('exact_resume',))\n"
        "class Acme: ...\n"
        "@technique(paper='', offers=FEATURES)\n"  # no literal: not found, no harm
        "class Other: ...\n"
    )
    packages.add(
        "acme_data", {"leyden.datamodules": {"Acme": "acme_data:Acme", "Other": "acme_data:Other"}}, source
    )
    missing = Feature("exact_resume").missing(Run())
    names = sorted([*offering("exact_resume", "datamodules"), "Acme"])
    assert {"Acme", "PretrainDataModule"} < set(names)
    assert missing == f"nothing in this run offers exact_resume: select {' or '.join(names)}"


# -- versions of the core ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found", "expected"),
    [
        ("", "1.0", None),
        (">=1,<2", "1.0", None),
        (">=1,<2", "1.7", None),
        ("==1.*", "1.7", None),
        (">=1,<2", "2.0", "pip install --upgrade acme"),
        ("<2", "2.0", "pip install --upgrade acme"),
        ("==1.*", "2.0", "pip install --upgrade acme"),
        (">=1.2,<2", "1.0", "pip install --upgrade leyden"),
        ("~=1.2", "1.0", "pip install --upgrade leyden"),
        ("==2.*", "1.0", "pip install --upgrade leyden"),
        (">=99,<100", "1.0", "pip install --upgrade leyden"),
        ("1", "1.0", "acme has to write '1' as a range of versions, such as '>=1,<2'"),
    ],
)
def test_whichever_is_behind_is_to_be_upgraded(wanted, found, expected):
    assert catalog.upgrade(wanted, found, "acme") == expected


def requiring(packages, requirement, source="class A: ...\n"):
    packages.add("acme", {"leyden.callbacks": {"A": "acme:A"}}, source)
    with open(packages.folder / "acme-1.2.dist-info" / "METADATA", "a", encoding="utf-8") as file:
        file.write(f"Requires-Dist: {requirement}\n")
    return catalog.find("A")


@pytest.mark.parametrize(
    ("requirement", "behind"),
    [("leyden>=99", "leyden"), ("Leyden (<0.0.1)", "acme"), ("leyden[test]~=99.1", "leyden")],
)
def test_a_package_for_another_leyden_is_told_before_it_is_imported(packages, requirement, behind):
    entry = requiring(packages, requirement, "raise ImportError('of something new')\n")
    with pytest.raises(ConfigError) as error:
        entry.load()
    assert str(error.value).startswith("A of acme 1.2 requires leyden")
    assert str(error.value).endswith(f", {__version__} is installed: pip install --upgrade {behind}")


@pytest.mark.parametrize(
    "requirement", [f"leyden>={__version__}", "leyden", "leyden>=99; extra == 'new'", "other>=99", "=?= 3"]
)
def test_a_package_for_this_leyden_is_imported(packages, requirement):
    assert requiring(packages, requirement).load().__name__ == "A"


def test_an_import_error_of_what_was_written_for_another_core_names_the_versions(packages):
    source = (
        "from core.technique import technique\n@technique(paper='', api='>=9', streams=2)\nclass A: ...\n"
    )
    packages.add("acme", {"leyden.callbacks": {"A": "acme:A"}}, source)
    with pytest.raises(ConfigError) as error:
        catalog.find("A").load()
    lines = str(error.value).splitlines()
    assert "unexpected keyword argument 'streams'" in lines[0]
    assert lines[2] == f"It was written for core API >=9, this is {API_VERSION}: pip install --upgrade leyden"
    assert len(lines) == 4


def test_another_import_error_blames_no_version(packages):
    packages.add("acme", {"leyden.callbacks": {"A": "acme:A"}}, "import leyden_no_such_thing\n")
    with pytest.raises(ConfigError) as error:
        catalog.find("A").load()
    assert "API" not in str(error.value)
