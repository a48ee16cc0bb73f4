"""The catalogue: technique packages that work, that are broken, and that share a name."""

import re
import sys

import pytest

from core import catalog
from core.__main__ import main
from core.errors import ConfigError, nearest
from plugins.cli.configuration.class_paths import qualify, registered
from plugins.cli.configuration.request import prepare

GOOD = '''
"""A technique of somebody else's."""
from core.technique import technique


@technique(paper="a blog post")
class AcmeGuard:
    """Guards the run against spikes.

    The second paragraph.
    """
'''
CALLBACKS = "leyden.callbacks"


def test_a_third_party_technique_is_listed_without_being_imported(packages):
    packages.add("acme_tools", {CALLBACKS: {"AcmeGuard": "acme_tools:AcmeGuard"}}, GOOD)
    entry = catalog.find("AcmeGuard")
    assert entry.summary() == "Guards the run against spikes."
    assert (entry.kind, entry.class_path) == ("callbacks", "acme_tools.AcmeGuard")
    assert entry.origin == "acme_tools 1.2"
    assert "acme_tools" not in sys.modules
    assert entry.load().__name__ == "AcmeGuard"


def test_only_the_techniques_that_a_run_names_are_imported(packages):
    for name in ("acme_one", "acme_two"):
        packages.add(name, {CALLBACKS: {name.title().replace("_", ""): f"{name}:AcmeGuard"}}, GOOD)
    prepare(["--trainer.callbacks+=AcmeOne"])
    assert "acme_one" in sys.modules
    assert "acme_two" not in sys.modules


def test_a_module_that_raises_hurts_only_the_run_that_names_it(packages, capsys):
    packages.add("acme_broken", {CALLBACKS: {"AcmeBroken": "acme_broken:AcmeBroken"}}, "1 / 0", "0.3")
    assert main(["plugins", "list"]) == 0
    assert "AcmeBroken" in capsys.readouterr().out
    prepare(["--trainer.callbacks+=PeriodicCheckpoint"])
    with pytest.raises(ConfigError, match=r"AcmeBroken of acme_broken 0\.3 cannot .*ZeroDivisionError"):
        prepare(["--trainer.callbacks+=AcmeBroken"])


@pytest.mark.parametrize("value", ["acme_gone:AcmeGuard", "acme_here:Gone", "acme_here", "no module", ""])
def test_an_entry_point_that_leads_nowhere_hurts_only_the_run_that_names_it(packages, value):
    packages.add("acme_here", {CALLBACKS: {"AcmeGuard": value, "Fine": "acme_here:AcmeGuard"}}, GOOD)
    assert catalog.find("AcmeGuard").summary() == ""
    prepare(["--trainer.callbacks+=Fine"])
    with pytest.raises(ConfigError, match=r"AcmeGuard of acme_here 1\.2 cannot be imported"):
        prepare(["--trainer.callbacks+=AcmeGuard"])


@pytest.mark.parametrize("backport", [False, True])  # which, once imported, finds all distributions
def test_metadata_without_name_and_version_is_no_reason_to_fail(packages, backport):
    if backport:
        pytest.importorskip("importlib_metadata")
    info = packages.folder / "acme_bare-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[leyden.callbacks]\nAcmeBare = acme_bare:AcmeBare\n")
    catalog.entries.cache_clear()
    assert catalog.find("AcmeBare").origin == "? ?"


@pytest.fixture
def twins(packages):
    for name in ("acme_left", "acme_right"):
        packages.add(name, {CALLBACKS: {"Guard": f"{name}:AcmeGuard"}}, GOOD)


@pytest.mark.usefixtures("twins")
def test_a_name_of_two_packages_is_an_error_that_shows_both_paths():
    prepare(["--trainer.callbacks+=PeriodicCheckpoint"])
    with pytest.raises(ConfigError) as error:
        prepare(["--trainer.callbacks+=Guard"])
    assert "acme_left.AcmeGuard  (from acme_left 1.2)" in str(error.value)
    assert "acme_right.AcmeGuard  (from acme_right 1.2)" in str(error.value)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("form", ["class_path", "argument", "plain"])
def test_a_full_path_says_which_of_two_is_meant(form, write_yaml):
    items = {"class_path": [{"class_path": "acme_right.AcmeGuard"}], "plain": ["acme_right.AcmeGuard"]}
    if form == "argument":
        prepare(["--trainer.callbacks+=acme_right.AcmeGuard"])
    else:
        prepare(["--config", str(write_yaml("x.yaml", {"trainer": {"callbacks": items[form]}}))])
    assert "acme_right" in sys.modules
    assert "acme_left" not in sys.modules


@pytest.mark.usefixtures("twins")
def test_the_short_name_elsewhere_does_not_make_a_full_path_ambiguous():
    chosen = registered({"acme_right.AcmeGuard", "Guard"})
    assert [entry.package for entry in chosen] == ["acme_right"]


def test_a_command_of_two_packages_can_be_called_by_its_full_path(packages, capsys):
    source = "def plugins(arguments):\n    print('acme', arguments)\n"
    packages.add("acme_command", {"leyden.commands": {"plugins": "acme_command:plugins"}}, source)
    assert main(["plugins", "list"]) == 2
    assert "plugins.commands.plugins.plugins  (from leyden" in capsys.readouterr().err
    assert main(["acme_command.plugins", "list"]) == 0
    assert capsys.readouterr().out == "acme ['list']\n"


def test_a_third_party_command_is_a_command(packages, capsys):
    source = 'def greet(arguments):\n    """Says hello."""\n    print("hello", *arguments)\n    return 3\n'
    packages.add("acme_greet", {"leyden.commands": {"greet": "acme_greet:greet"}}, source)
    assert main(["--help"]) == 0
    assert re.search(r"^  greet +Says hello\.$", capsys.readouterr().out, re.MULTILINE)
    assert main(["greet", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("datamodules.preparation.bpe_tokenizer.BPETokenizer", "BPETokenizer"),
        ("core.checkpoints.atomic_checkpoint.AtomicCheckpoint", "AtomicCheckpoint"),
    ],
)
def test_a_stored_full_path_leads_to_the_technique_after_its_file_has_moved(old, name):
    values = {"data": [{"class_path": old, "init_args": {"class_path": old}}]}
    qualify(values)
    new = catalog.find(name).class_path
    assert new != old
    assert values == {"data": [{"class_path": new, "init_args": {"class_path": new}}]}


@pytest.mark.parametrize(
    "path", ["other.bpe.BPETokenizer", "datamodules.preparation.bpe.NoSuchThing", "BPE."]
)
def test_other_paths_are_left_alone(path):
    values = {"class_path": path}
    qualify(values)
    assert values == {"class_path": path}


@pytest.mark.parametrize(
    ("wrong", "kind", "right"),
    [("fitt", "commands", "fit"), ("warmupcosin", None, "WarmupCosine"), ("AdamWw", "optimizers", "AdamW")],
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong, kind, right):
    with pytest.raises(ConfigError, match=rf"named '{wrong}'\. Did you mean {right}\?"):
        catalog.find(wrong, kind)


def test_nothing_is_suggested_where_nothing_is_near():
    assert nearest("xyzzy", {"fit", "validate"}) == ""
    with pytest.raises(ConfigError) as error:
        catalog.find("xyzzy")
    assert "Did you mean" not in str(error.value)


def test_a_name_inside_a_text_selects_nothing(packages, write_yaml):
    packages.add("acme_tools", {CALLBACKS: {"AcmeGuard": "acme_tools:AcmeGuard"}}, GOOD)
    prompts = {"class_path": "TextSamples", "init_args": {"prompts": ["AcmeGuard is", "an AcmeGuard"]}}
    prepare(["--config", str(write_yaml("x.yaml", {"trainer": {"callbacks": [prompts]}}))])
    assert "acme_tools" not in sys.modules


def test_a_name_inside_a_longer_word_selects_nothing(packages, write_yaml):
    packages.add("acme_tools", {CALLBACKS: {"AcmeGuard": "acme_tools:AcmeGuard"}}, GOOD)
    prepare(["--config", str(write_yaml("x.yaml", {"trainer": {"default_root_dir": "runs/AcmeGuards"}}))])
    assert "acme_tools" not in sys.modules


OFFERS = GOOD.replace('paper="a blog post"', 'paper="a blog post", offers=("storage",)')


def test_what_offers_a_feature_is_found_without_being_imported(packages):
    packages.add("acme_storage", {"leyden.data": {"AcmeGuard": "acme_storage:AcmeGuard"}}, OFFERS)
    packages.add("acme_other", {CALLBACKS: {"Other": "acme_other:AcmeGuard"}}, OFFERS)
    assert catalog.offering("storage", "data").package == "acme_storage"
    assert not {"acme_storage", "acme_other"} & sys.modules.keys()
    assert [entry.package for entry in catalog.offers("storage")] == ["acme_other", "acme_storage"]


def test_a_feature_that_none_or_two_offer_is_an_error_that_names_them(packages):
    with pytest.raises(ConfigError, match="No techniques of the kind data offer storage"):
        catalog.offering("storage", "data")
    for name in ("acme_one", "acme_two"):
        packages.add(name, {"leyden.data": {name.title(): f"{name}:AcmeGuard"}}, OFFERS)
    with pytest.raises(ConfigError, match="2 techniques of the kind data offer storage") as error:
        catalog.offering("storage", "data")
    assert "acme_one.AcmeGuard" in str(error.value)
    assert "acme_two.AcmeGuard" in str(error.value)
