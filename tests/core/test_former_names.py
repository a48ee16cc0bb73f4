"""Names up to core API 1.3 work, with a DeprecationWarning, until 1.5."""

import json
import sys
import warnings
from pathlib import Path

import pytest

from callbacks.batch_size_ramp import BatchSizeRamp
from callbacks.lr_finder import LRFinder
from callbacks.spike_rollback import SpikeRollback
from core import catalog, contracts
from core.__main__ import main
from core.pretrain_datamodule import PretrainDataModule
from core.technique import declaration_of, technique
from datamodules.packing.concatenate import Concatenate
from datamodules.preparation.preparation_report import write_report
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.token_preparation import TokenPreparation
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.transforms.normalise import Normalise
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.cli.run_commands import build
from tests.support.corpus import corpus, preparation, prepare
from tests.support.strange_folders import sign
from toolkit import positions, trials
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


def test_durable_writes_are_in_the_core(tmp_path):
    from toolkit import durable

    with pytest.warns(DeprecationWarning, match=r"toolkit\.durable\.write .*use core\.durable\.write"):
        durable.write(tmp_path / "x", "text")
    assert (tmp_path / "x").read_text() == "text"
    with pytest.warns(DeprecationWarning, match=r"toolkit\.local_paths\.is_url"):
        assert durable.is_url("s3://bucket/run")
    with pytest.raises(AttributeError, match="append"):
        _ = durable.append


def test_names_of_the_toolkit():
    with pytest.warns(DeprecationWarning, match="NOT_RESTORABLE"):
        assert trials.NOT_UNDONE is trials.NOT_RESTORABLE
    with pytest.warns(DeprecationWarning, match="explain_position_mixing"):
        assert positions.mixes_elsewhere is positions.explain_position_mixing


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
    with pytest.warns(DeprecationWarning, match="min_lr and max_lr"):
        finder = LRFinder(min_rate=0.1, max_lr=0.5)
    assert (finder.min_lr, finder.max_lr) == (0.1, 0.5)
    with pytest.warns(DeprecationWarning, match="scale_lr"):
        assert BatchSizeRamp(scale_rate=True).scale_lr


def test_the_transforms_of_a_data_module(tmp_path):
    parts = (JSONLinesDocuments, BPETokenizer(300), TokenShards(900))
    options = {"source": str(corpus(tmp_path / "source", documents=30)), "stages": [Normalise()]}
    with pytest.warns(DeprecationWarning, match=r"data\.stages is deprecated .*use data\.transforms"):
        data = PretrainDataModule(*parts, Concatenate(), cache_dir=str(tmp_path / "cache"), **options)
    assert [type(transform) for transform in data.transforms] == [Normalise]
    with pytest.warns(DeprecationWarning, match=r"data\.stages is deprecated .*use data\.transforms"):
        assert TokenPreparation.build(*parts, **options).options() == preparation(
            options["source"]
        ).options() | {"validation_fraction": 0.05}


def test_the_warning_names_the_line_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = tmp_path / "mine.yaml"
    written.write_text("base: quickstart\ndata:\n  init_args:\n    stages: [Normalise]\n")
    with pytest.warns(DeprecationWarning, match=r"data\.stages is deprecated") as found:
        build("fit", ["--config", str(written)])
    [one] = [each for each in found if "data.stages" in str(each.message)]
    assert (Path(one.filename).name, one.lineno) == ("mine.yaml", 4)


def test_folders_that_were_prepared_with_the_former_name_are_found_and_read(tmp_path):
    """A cache's folder is named by a digest of the options, and an unfinished one is held against its plan."""
    source = corpus(tmp_path / "source", documents=60)
    [described] = preparation(source).options()["stages"]
    assert described["class"].endswith(".Normalise")
    folder = prepare(source, tmp_path / "old")
    manifest, report = json.loads((folder / "manifest.json").read_text()), (folder / "report.md").read_text()
    sign(folder, {{"transforms": "stages"}.get(key, key): value for key, value in manifest.items()})
    assert "stages" in json.loads((folder / "manifest.json").read_text())
    for path in (*folder.glob("report.*"), folder / "lengths.png"):
        path.unlink()
    write_report(folder)
    assert (folder / "report.md").read_text() == report
    assert preparation(source).describe(folder).train_tokens == manifest["train_tokens"]


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
