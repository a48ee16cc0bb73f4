"""Names up to core API 1.3 work, with a DeprecationWarning, until 1.5."""

import sys
import warnings
from pathlib import Path

import pytest

from callbacks.spike_rollback import SpikeRollback
from core import catalog, contracts
from core.__main__ import main
from core.technique import declaration_of, technique
from toolkit.selection import Run


def test_the_kind_stages_is_data(packages):
    packages.add(
        "acme_texts", {"leyden.stages": {"AcmeTexts": "acme_texts:AcmeTexts"}}, "class AcmeTexts: ..."
    )
    with pytest.warns(DeprecationWarning, match=r"leyden\.stages.*use data"):
        found = catalog.find("AcmeTexts", "data")
    assert found.kind == "data"
    with pytest.warns(DeprecationWarning, match="stages"):
        assert catalog.find("AcmeTexts", "stages") == found


def test_a_contract_is_found_under_its_former_name():
    with pytest.warns(DeprecationWarning, match="compatibility_errors"):
        assert contracts.misfits is contracts.compatibility_errors


def test_watches_is_observer():
    with pytest.warns(DeprecationWarning, match="observer"):

        @technique(paper="own work", watches=True)
        class Looking: ...

    assert declaration_of(Looking).observer


def test_what_a_preflight_gets_is_in_the_toolkit():
    from core import selection

    with pytest.warns(DeprecationWarning, match=r"toolkit\.selection\.Run"):
        assert selection.Run is Run


def test_elsewhere_is_offline():
    with pytest.warns(DeprecationWarning, match="offline"):
        assert Run(offline=True).elsewhere


def test_the_steps_of_a_transform():
    with pytest.warns(DeprecationWarning, match="needs_all_documents"):

        class Deduplicate(contracts.Transform):
            surveys = True

            def learn(self, conclusion):
                return conclusion

    assert Deduplicate.needs_all_documents
    assert Deduplicate.load is Deduplicate.learn


def test_an_option_of_a_stored_configuration():
    with pytest.warns(DeprecationWarning, match="lr_factor"):
        assert SpikeRollback(rate_factor=0.5).lr_factor == 0.5


def test_an_option_of_a_command(capsys):
    with pytest.warns(DeprecationWarning, match="--offline"):
        assert main(["check", "--config", "nosuchconfig", "--elsewhere"]) == 2


def test_a_kind_of_a_command(capsys):
    with pytest.warns(DeprecationWarning, match="data"):
        assert main(["plugins", "list", "--kind", "stages"]) == 0
    assert "TextDocuments" in capsys.readouterr().out


def test_a_run_says_which_option_of_its_config_is_a_former_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spike = "{class_path: SpikeRollback, init_args: {rate_factor: 0.5}}"
    Path("mine.yaml").write_text(f"base: quickstart\ntrainer: {{accelerator: cpu, callbacks+: [{spike}]}}\n")
    with warnings.catch_warnings(record=True) as found:
        monkeypatch.setattr(sys, "warnoptions", [])
        assert main(["check", "--config", "mine.yaml"]) == 0
    assert any("lr_factor" in str(warning.message) for warning in found)
