"""`completion`: what may come next, without torch, and the scripts in the shells that they are for."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

from core import catalog
from core.__main__ import main
from plugins.cli.configuration.signatures import parameters
from plugins.commands.completion import SHELLS
from plugins.commands.completion_candidates import candidates
from plugins.commands.completion_sources import arguments, command_words
from tests.conftest import HOUSE


def words(line):
    return [word for word, _ in candidates(line.split(" "))]


@pytest.mark.parametrize(
    ("line", "there", "not_there"),
    [
        ("", ["fit", "plugins", "completion", "--help"], ["GPT"]),
        ("pl", ["plugins"], ["fit"]),
        ("fit ", ["--config=", "--trainer.", "--callbacks."], ["--trainer.max_steps="]),
        ("fit --c", ["--config=", "--ckpt_path=", "--callbacks."], ["--model."]),
        ("fit --trainer.max", ["--trainer.max_steps=", "--trainer.max_epochs="], ["--trainer.devices="]),
        ("fit --trainer.", ["--trainer.callbacks+=", "--trainer.callbacks=", "--trainer.strategy."], ["--trainer.self="]),
        ("fit --trainer.precision=bf16", ["--trainer.precision=bf16-mixed"], ["--trainer.precision=64"]),
        ("fit --trainer.precision bf16", ["bf16-mixed"], ["64"]),
        ("fit --trainer.callbacks+=L", ["--trainer.callbacks+=LossCurve", "--trainer.callbacks+=LearningRateMonitor"],
         ["--trainer.callbacks+=LSTM"]),
        ("fit --trainer.callbacks+=", ["--trainer.callbacks+=TextSamples"],
         ["--trainer.callbacks+=GPT", "--trainer.callbacks+=Callback"]),
        ("fit --trainer.plugins+=", ["--trainer.plugins+=AtomicCheckpoint", "--trainer.plugins+=HalfPrecision"],
         ["--trainer.plugins+=LossCurve", "--trainer.plugins+=LightningEnvironment"]),
        ("fit --trainer.detect_anomaly=", ["--trainer.detect_anomaly=true", "--trainer.detect_anomaly=false"], []),
        ("fit --model.", ["--model.network=", "--model.network.", "--model.decay_embeddings="], ["--model.network+="]),
        ("fit --model.network=", ["--model.network=GPT"], ["--model.network=AdamW"]),
        ("fit --model.network.", ["--model.network.n_layer="], ["--model.network.self="]),
        ("fit --config quickstart --model.network.pos", ["--model.network.position="], ["--model.network.n_layer="]),
        ("fit --model.network.position=", ["--model.network.position=rotary"], []),
        ("fit --model.optimizer.", ["--model.optimizer.lr="], ["--model.optimizer.params=", "--model.optimizer.n_layer="]),
        ("fit --model.optimizer=SGD --model.optimizer.", ["--model.optimizer.momentum="], ["--model.optimizer.params="]),
        ("fit --model.optimizer=torch.optim.SGD --model.optimizer.", ["--model.optimizer.nesterov="], []),
        ("fit --data=", ["--data=PretrainDataModule"], []),
        ("fit --data.", ["--data.sequence_length=", "--data.tokenizer."], []),
        ("fit --data.tokenizer=", ["--data.tokenizer=BPETokenizer"], ["--data.tokenizer=TextDocuments"]),
        ("fit --data.tokenizer.", ["--data.tokenizer.vocab_size="], []),
        ("fit --data.reader.", [], ["--data.reader.source="]),
        ("fit --config quickstart --callbacks.", ["--callbacks.TextSamples.", "--callbacks.-TextSamples"], []),
        ("fit --trainer.callbacks+=Timer --callbacks.T", ["--callbacks.Timer."], ["--callbacks.TextSamples."]),
        ("fit --callbacks.TextSamples.", ["--callbacks.TextSamples.top_k="], ["--callbacks.TextSamples.lr="]),
        ("fit --config=", ["--config=quickstart", "--config=defaults", "--config=core/"], ["--config=README.md"]),
        ("fit --config ", ["quickstart", "configs/"], ["README.md"]),
        ("fit --config configs/q", ["configs/quickstart.yaml"], ["configs/quickstart.png"]),
        ("fit --config nowhere --model.network.", ["--model.network.n_layer="], []),
        ("fit --print_config=", ["--print_config=plain"], []),
        ("validate --", ["--ckpt_path=", "--verbose="], ["--model=", "--datamodule="]),
        ("check --config=quick", ["--config=quickstart"], []),
        ("fit --trainer.nosuch.", [], []),
        ("plugins ", ["list", "show", "new", "check"], ["--kind"]),
        ("plugins list --", ["--kind", "--search", "--help"], ["--output"]),
        ("plugins list --kind ", list(catalog.KINDS), ["leyden"]),
        ("plugins list --kind=sch", ["--kind=schedules"], []),
        ("plugins list --package ", ["leyden"], ["GPT"]),
        ("plugins show W", ["WarmupCosine"], ["GPT"]),
        ("plugins check ", ["leyden"], []),
        ("config diff q", ["quickstart"], []),
        ("generate --ckpt_path ", ["last", "configs/"], []),
        ("compare ", ["configs/"], []),
        ("completion ", list(SHELLS), []),
        ("nosuch ", ["configs/"], []),
    ],
)  # fmt: skip
def test_what_may_come_next(line, there, not_there, monkeypatch):
    monkeypatch.chdir(HOUSE)
    found = words(line)
    assert set(there) <= set(found), found
    assert not set(not_there) & set(found)
    assert all(word.startswith(line.split(" ")[-1]) for word in found)
    assert there or not found or not_there


def test_candidates_come_with_what_they_are():
    [(name, text)] = candidates(["fit", "--model.network.n_l"])
    assert name == "--model.network.n_layer="
    assert text.startswith("Number of blocks")
    [(_, text)] = candidates(["plugins", "show", "WarmupCos"])
    assert text.startswith("Linear warm-up")


def test_defaults_stand_in_their_place(packages):
    assert dict(candidates(["launch", "--na"])) == {"--name": "the job's (leyden)"}
    source = (
        "import argparse\ndef acme(arguments):\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--share', type=float, default=0.5, help='of 100%% (%(default)s)')\n"
        "    parser.add_argument('--names', default=['a', 'b'], help='%(default)s')\n"
        "    parser.add_argument('--when', default=print(), help='by default %(default)s')\n"
    )
    packages.add("acme_tool", {"leyden.commands": {"acme": "acme_tool:acme"}}, source)
    assert dict(candidates(["acme", "--"])) == {
        "--share": "of 100% (0.5)",
        "--names": "a, b",
        "--when": "by default ...",
        "--help": "what it takes",
    }
    for entry in [entry for entry in catalog.entries() if entry.kind == "commands"]:
        assert not [text for _, text in candidates([entry.name, "--"]) if "%(" in text], entry


TECHNIQUES = [entry for entry in catalog.entries() if entry.package == "leyden" and entry.kind != "commands"]


@pytest.mark.parametrize("entry", TECHNIQUES, ids=lambda entry: entry.name)
def test_the_source_tells_the_arguments_that_the_class_has(entry):
    found, takes_more = parameters(entry.load())
    assert takes_more or list(arguments(entry.module, entry.attribute)) == list(found)


def test_words_of_a_command_are_those_of_its_parser():
    found = {(word.parent, word.name, word.kind) for word in command_words("plugins.commands.plugins")}
    assert {
        ("", "show", "subcommand"),
        ("list", "--kind", "option"),
        ("list", "--markdown", "flag"),
        ("show", "name", "positional"),
    } <= found


@pytest.mark.parametrize(
    "line",
    [
        "",
        "fit --trainer.callbacks+=",
        "fit --config quickstart --model.network.",
        pytest.param("plugins show ", marks=pytest.mark.ci),
    ],
)
def test_candidates_import_no_library_and_no_technique(line):
    source = (
        "import sys; from core.__main__ import main\n"
        "main(['completion', 'words', '--', *sys.argv[1:]])\n"
        "heavy = {'torch', 'lightning', 'litdata', 'numpy', 'jsonargparse', 'callbacks'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, *line.split(" ")], cwd=HOUSE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 5


def test_a_third_party_technique_is_offered_even_if_it_cannot_be_imported(packages):
    source = "import no_such_module\nclass AcmeGuard:\n    def __init__(self, limit: float, mode: 'bool' = True): pass\n"
    packages.add("acme", {"leyden.callbacks": {"AcmeGuard": "acme:AcmeGuard"}}, source)
    packages.add("broken", {"leyden.callbacks": {"AcmeBroken": "broken:AcmeBroken"}}, "class (")
    assert words("fit --trainer.callbacks+=Acme") == [
        "--trainer.callbacks+=AcmeBroken",
        "--trainer.callbacks+=AcmeGuard",
    ]
    assert words("fit --callbacks.AcmeGuard.") == [
        "--callbacks.AcmeGuard.limit=",
        "--callbacks.AcmeGuard.mode=",
    ]
    assert words("fit --callbacks.AcmeGuard.mode=") == [
        "--callbacks.AcmeGuard.mode=true",
        "--callbacks.AcmeGuard.mode=false",
    ]
    assert words("fit --callbacks.AcmeBroken.") == []


def test_an_unknown_shell_is_a_mistake(capsys):
    assert main(["completion", "fihs"]) == 2
    assert "Did you mean fish?" in capsys.readouterr().err


# -- the shells themselves ------------------------------------------------------------------------

START = {
    "bash": (["bash", "--norc", "-i"], "source {script}"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -D; source {script}"),
    "fish": (["fish", "--no-config", "-i"], "source {script}"),
}
PROGRAM = """#!/bin/sh
if [ "$1" = --version ]; then exec {python} --version; fi  # asked by zsh's own completion of python
if [ "${only}" = completion ]; then exec {python} {start}"$@"; fi
printf '%s\\n' "$@" > "$RECORD"
"""


class Terminal:
    """A shell in a terminal of its own, with a `leyden` and a `python3` that note their arguments."""

    def __init__(self, shell, folder):
        self.record, self.said = folder / "record", b""
        for name, only, start in (("leyden", "1", "-m core "), ("python3", "3", "")):
            (folder / name).write_text(PROGRAM.format(only=only, python=sys.executable, start=start))
            (folder / name).chmod(0o755)
        script = folder / "script"
        script.write_text(subprocess.run([sys.executable, "-m", "core", "completion", shell], cwd=HOUSE,
                                         capture_output=True, text=True, check=True).stdout)  # fmt: skip
        command, setup = START[shell]
        environment = {**os.environ, "TERM": "dumb", "PS1": "$ ", "RECORD": str(self.record), "HOME": str(folder),
                       "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(HOUSE)}  # fmt: skip
        self.child, self.line = pty.fork()
        if self.child == 0:
            os.chdir(folder)
            os.execvpe(command[0], command, environment)
        self.wait(lambda: self.said)
        self.write(f"{setup.format(script=script)}; echo rea''dy\n")
        self.wait(lambda: b"\nready" in self.said.replace(b"\r", b""))

    def write(self, text):
        os.write(self.line, text.encode())

    def wait(self, done):
        end = time.monotonic() + 240
        while not done():
            assert time.monotonic() < end, self.said.decode(errors="replace")
            if select.select([self.line], [], [], 0.05)[0]:
                self.said += os.read(self.line, 4096)

    def complete(self, line):
        """Types a line, TAB and Enter; returns the arguments that the program got."""
        self.record.unlink(missing_ok=True)
        self.write(f"{line}\t")
        self.write("\n")
        self.wait(lambda: self.record.exists() and self.record.read_text().endswith("\n"))
        return " ".join(self.record.read_text().splitlines())

    def close(self):
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        os.close(self.line)


@pytest.mark.ci
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "a dir").mkdir()
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "notes.py").touch()
    terminal = Terminal(shell, tmp_path)
    try:
        for line, expected in {
            "leyden plug": "plugins",
            "leyden fit --trainer.max_st": "fit --trainer.max_steps=",
            "leyden fit --config=quick": "fit --config=quickstart",
            "leyden fit --config mi": "fit --config mine.yaml",
            "leyden fit --config a": "fit --config a dir/",
            "true; leyden fit --trainer.callbacks+=LossC": "fit --trainer.callbacks+=LossCurve",
            "leyden fit --trainer.callbacks+=Timer --callbacks.-Ti": "fit --trainer.callbacks+=Timer --callbacks.-Timer",
            "leyden plugins show WarmupCos": "plugins show WarmupCosine",
            "python3 -m core fit --config quickstart --model.network.posit":
                "-m core fit --config quickstart --model.network.position=",
            "python3 not": "notes.py",
        }.items():  # fmt: skip
            assert terminal.complete(line) == expected
    finally:
        terminal.close()


def test_adapters_stand_among_callbacks(packages):
    source = "class AcmeAdapter:\n    def __init__(self, rank: int = 8): pass\n"
    packages.add("acme_adapt", {"leyden.adapters": {"AcmeAdapter": "acme_adapt:AcmeAdapter"}}, source)
    assert words("fit --trainer.callbacks+=AcmeA") == ["--trainer.callbacks+=AcmeAdapter"]
    assert words("fit --callbacks.AcmeAdapter.") == ["--callbacks.AcmeAdapter.rank="]


def test_a_link_that_leads_to_itself_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "loop.yaml" in words("fit --config lo")
