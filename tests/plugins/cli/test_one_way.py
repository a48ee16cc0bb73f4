"""A config goes one way: each file is read once, all is composed once and never text again, one Trainer and network."""

from collections import Counter
from functools import wraps

import pytest
import yaml
from lightning.pytorch import Trainer

from core.__main__ import main
from core.contracts import Network
from plugins.checkpoints import checkpoint
from plugins.cli.configuration import config_files, request, yaml_texts
from plugins.cli.run_commands import build


def count_calls(monkeypatch):
    """Counts calls from now on, by the function's name or the class that is built."""
    found = Counter()

    def count(owner, name, title=None, what=lambda first: True):
        plain = getattr(owner, name)

        @wraps(plain)
        def counting(*args, **kwargs):
            found[title or name] += bool(what(args[0]))
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    yaml_texts._parse.cache_clear()
    checkpoint._summary.cache_clear()
    count(request, "merge_layers", "compositions")
    count(config_files, "_add", "layers")
    count(yaml_texts, "_Loader", "texts", lambda text: "\n" in text)
    count(yaml, "load", what=lambda text: "trainer" in str(text))
    count(yaml, "dump_all", what=lambda parts: "trainer" in str(parts))
    count(checkpoint, "read_checkpoint")
    count(Trainer, "__init__", "Trainer")
    count(Network, "__init__", "Network")
    return found


def test_nothing_is_composed_parsed_or_built_twice(monkeypatch, tmp_path, capsys):
    found = count_calls(monkeypatch)
    monkeypatch.chdir(tmp_path)
    run = build("fit", ["--config=quickstart", "--trainer.accelerator=cpu", "--model.network.n_layer=2"])
    assert run.config["model"]["network"]["init_args"]["n_layer"] == 2
    assert +found == {
        "compositions": 1,
        "layers": 2,
        "texts": 2,
        "Trainer": 1,
        "Network": 1,
    }  # quickstart and its base
    assert "Run folder" in capsys.readouterr().out


def test_a_section_named_like_the_option_for_a_file_is_a_mistake(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("base: quickstart\nconfig: /etc/passwd\n")
    assert main(["check", f"--config={tmp_path}/mine.yaml"]) == 2
    assert "mine.yaml:2: there is no section 'config'" in capsys.readouterr().err


def test_a_resumed_fit_composes_once_and_reads_each_file_and_the_checkpoint_once(monkeypatch, trained):
    found = count_calls(monkeypatch)
    build("fit", ["--config=tiny", "--ckpt_path=last", "--trainer.max_steps=9"])
    assert found["compositions"] == found["read_checkpoint"] == 1
    assert found["texts"] == 2  # tiny.yaml, and the run's config.yaml, whose text is in the checkpoint, too


def test_a_fit_trains_the_network_that_was_checked(monkeypatch, core):
    found = count_calls(monkeypatch)
    assert core("fit", "--config=tiny", "--trainer.max_steps=1", "--model.lr_scheduler=null").code == 0
    assert found["Network"] == found["Trainer"] == 1


@pytest.mark.parametrize(("name", "prepared"), [("Known", False), ("Late", True)])
def test_data_that_does_not_fit_is_found_as_soon_as_it_is_known(core, name, prepared):
    done = core("fit", "--config=tiny", f"--data=tests.support.sized.{name}")
    assert done.code == 2
    assert "has 100 tokens, the network's vocab_size is 64" in done.err
    assert ("PREPARED" in done.out) == prepared
