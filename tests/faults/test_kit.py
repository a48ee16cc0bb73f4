"""The fault kit: its halves, and a few faults from injection to remedy."""

import re

import pytest
import yaml

from tests.conftest import HOUSE
from tests.faults.__main__ import configuration, folder_of, record
from tests.faults.blind import BLIND
from tests.faults.catalogue import FAULTS
from tests.faults.recipes import RECIPES, VARIANTS
from tests.faults.report import final_loss, judged
from tests.faults.silent_errors import SILENT_ERRORS
from tests.faults.unseen import UNSEEN

SHOWN = {
    "rate x30": "gpt",
    "labels are the inputs": "llama",
    "gradients never zeroed": "moe",
    "blocks frozen": "gpt",
    "positions run on": "moe",
    "schedule ends at a fifth": "gpt",
}


def test_half_of_the_faults_are_held_out_and_all_causes_are_explained():
    assert len(FAULTS) >= 40
    assert sum(fault.held_out for fault in FAULTS) == len(FAULTS) / 2
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    guide = (HOUSE / "docs/diagnosis.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`([a-z0-9_]+)`", guide.partition("## Causes")[2]))
    rules = "".join(path.read_text(encoding="utf-8") for path in (HOUSE / "toolkit/diagnosis").glob("*.py"))
    for cause in {fault.cause for fault in FAULTS}:
        assert cause in explained
        assert f'"{cause}"' in rules


@pytest.mark.ci
def test_a_clean_run_has_no_alarm_and_faults_are_named(tmp_path):
    found = {}
    faults = {fault.name: fault for fault in FAULTS}
    for name, recipe in SHOWN.items():
        folder = folder_of(tmp_path, faults[name], recipe, 0)
        record(configuration(faults[name], recipe, 0, tmp_path), folder)
        found[name] = judged(folder).first
    assert {name: finding.cause for name, finding in found.items()} == {
        name: faults[name].cause for name in SHOWN
    }
    for recipe in RECIPES:
        folder = folder_of(tmp_path, None, recipe, 0)
        record(configuration(None, recipe, 0, tmp_path), folder)
        assert judged(folder).first is None
    assert not list(tmp_path.rglob("error.txt"))  # a run that ended with an error has nothing to be judged by
    clean = configuration(None, "gpt", 0, tmp_path)
    fault = faults["blocks frozen"]
    assert configuration(fault, "gpt", 0, tmp_path, dict(found[fault.name].remedy)) == clean
    told = folder_of(tmp_path, fault, "gpt", 0) / "doctor" / "remedy-frozen_weights.yaml"
    assert yaml.safe_load(told.read_text()) == found[fault.name].remedy  # live, the same is said
    assert final_loss(folder_of(tmp_path, None, "gpt", 0)) < 4.5


@pytest.mark.slow
def test_silent_errors_of_reports_are_named(tmp_path):
    found, shown = {}, ("TF-33844", "TF-33455")
    for fault in SILENT_ERRORS:
        if fault.name.split()[0] in shown:
            folder = folder_of(tmp_path, fault, "llama", 0)
            record(configuration(fault, "llama", 0, tmp_path, {"trainer": {"max_steps": 8}}), folder)
            first = judged(folder).first
            found[fault.name.split()[0]] = first and first.cause, fault.cause
            assert not (folder / "error.txt").exists()
    assert len(found) == len(shown)
    assert all(said == meant for said, meant in found.values())


def test_unseen_faults_are_others_and_lie_over_their_recipes(tmp_path):
    assert len(UNSEEN) >= 36
    names = [fault.name for fault in (*FAULTS, *BLIND, *UNSEEN)]
    assert len(set(names)) == len(names)
    for fault in UNSEEN:
        assert set(fault.overlays) <= {*RECIPES, *VARIANTS}
        name = next(iter(fault.overlays))
        clean = configuration(None, name, 0, tmp_path)
        values = configuration(fault, name, 0, tmp_path)
        assert values != clean
        callbacks = values["trainer"]["callbacks"]
        assert callbacks[: len(clean["trainer"]["callbacks"])] == clean["trainer"]["callbacks"]


@pytest.mark.slow
def test_two_ranks_and_a_resumed_run_train_as_one_process_does(tmp_path):
    losses = {}
    for name in ("gpt", "gpt-2-ranks", "gpt-resumed"):
        folder = folder_of(tmp_path, None, name, 0)
        record(configuration(None, name, 0, tmp_path), folder)
        assert not (folder / "error.txt").exists()
        losses[name] = final_loss(folder)
    assert losses["gpt-resumed"] == losses["gpt"]
    assert (folder / "interrupted.ckpt").is_file()
    # Gradients are summed in another order, and 48 steps at this rate make that about 1e-3.
    assert losses["gpt-2-ranks"] == pytest.approx(losses["gpt"], abs=0.02)
