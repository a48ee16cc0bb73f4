"""A TAB and a schema for editors: ours, and what jsonargparse, argcomplete, shtab and typer make of the same command line.

    pip install --no-deps --target LIBRARIES argcomplete shtab typer
    PYTHONPATH=LIBRARIES python -m tests.benchmarks.completion

For each line that somebody types: CPU seconds of the TAB, and what is offered. argcomplete runs the program up to its
parser, here LightningCLI with all registered techniques imported, which is when jsonargparse knows their names. Lines
with a subcommand are completed by LightningCLI with subcommands and, without the word `fit`, by one without. shtab writes
a script once. The two JSON schemas judge the shipped configs, and 13 mistakes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

LINES = {
    "a subcommand": "valid",
    "an option": "fit --trainer.max_st",
    "a technique by short name": "fit --trainer.callbacks+=SpikeR",
    "an argument of the class chosen on the line": "fit --model.optimizer=SGD --model.optimizer.mom",
    "an argument of the class chosen in a config": "fit --config quickstart --model.network.posit",
    "a value of a type": "fit --model.network=GPT --model.network.position=rot",
    "a callback of the config, by name": "fit --config quickstart --callbacks.TextS",
    "a shipped config": "fit --config=quick",
}
MISTAKES = [
    "trainr: {max_steps: 1}",
    "trainer: {max_stps: 1}",
    "trainer: {max_steps: many}",
    "trainer: {precision: bf17}",
    "trainer: {callbacks+: [SpikeRolback]}",
    "trainer: {callbacks+: [{class_path: SpikeRollback, init_args: {windw: 3}}]}",
    "trainer: {callbacks+: [{class_path: SpikeRollback, init_args: {window: wide}}]}",
    "trainer: {callbacks+: [{class_path: GPT}]}",
    "model: {network: {class_path: GTP}}",
    "model: {network: {class_path: GPT, init_args: {n_layers: 2}}}",
    "model: {network: {class_path: GPT, init_args: {position: rotery}}}",
    "model: {optimizer: {class_path: AdamW, init_args: {lr: fast}}}",
    "data: {class_path: PretrainDataModule, init_args: {tokenizer: {class_path: TextDocuments}}}",
]
"""YAML with one mistake each."""
PARSER = """
import os
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from core import catalog
from core.language_module import LanguageModule
for entry in catalog.entries():
    if entry.kind != "commands":
        entry.load()
from jsonargparse import set_parsing_settings
set_parsing_settings(add_print_completion_argument=True)
LightningCLI(LanguageModule, LightningDataModule, subclass_mode_data=True, auto_configure_optimizers=False,
             run="SUBCOMMANDS" in os.environ)
"""
TYPER = """
import typer
from plugins.commands.completion_candidates import candidates
app = typer.Typer()
@app.command()
def fit(callback: str = typer.Option("", autocompletion=lambda incomplete: candidates(["plugins", "show", incomplete]))): pass
@app.command()
def check(): pass
app(prog_name="leyden")
"""


LIMIT = 120
"""CPU seconds after which a process is ended."""


def cpu(command: list[str], **environment: str) -> tuple[float, str, str]:
    """Returns the CPU seconds of a process, what it printed, and the end of its complaint if it failed."""
    before = os.times()
    done = subprocess.run(
        ["bash", "-c", f'ulimit -t {LIMIT}; exec "$@"', "bash", *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    failure = done.stderr[-2000:] if done.returncode else ""
    if done.returncode < 0:
        failure = f"not done after {LIMIT} s"
    return spent, done.stdout, failure


def ours(line: str) -> tuple[float, list[str]]:
    """One TAB of ours."""
    spent, said, _ = cpu([sys.executable, "-m", "core", "completion", "words", "--", *line.split(" ")])
    return spent, [row.partition("\t")[0] for row in said.splitlines()]


def argcompletes(line: str, program: Path, folder: Path, **environment: str) -> tuple[float, list[str]]:
    """One TAB of argcomplete, as its shell function asks for it."""
    whole, out = f"leyden {line}", folder / "out"
    out.write_text("")
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": whole, "COMP_POINT": str(len(whole)),
             "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}  # fmt: skip
    spent, _, failure = cpu([sys.executable, str(program)], **asked, **environment)
    words = [word.strip() for word in out.read_text().split("\n") if word.strip()]
    return spent, words or re.findall(r"\w+Error", failure)[-1:]


def composed(folder: Path) -> Path:
    """Writes the quickstart as LightningCLI reads it: includes resolved, full paths."""
    from plugins.cli.configuration.class_paths import resolve_names
    from plugins.cli.configuration.config_files import compose
    from plugins.cli.configuration.yaml_texts import dump_yaml

    values = compose(["quickstart"]).values
    resolve_names(values)
    path = folder / "quickstart.yaml"
    path.write_text(dump_yaml(values))
    return path


def judged(schema: dict[str, Any]) -> str:
    """Returns how many of the shipped configs a schema accepts, and how many of the mistakes."""
    from jsonschema.validators import validator_for

    from plugins.cli.configuration.config_files import configs_folder
    from plugins.cli.configuration.yaml_texts import read_yaml

    validator = validator_for(schema)(schema)
    shipped = [read_yaml(path)[0] for path in sorted(configs_folder().rglob("*.yaml"))]
    passed = sum(validator.is_valid(values) for values in shipped)
    found = [text for text in MISTAKES if not validator.is_valid(yaml.safe_load(text))]
    return (
        f"{passed} of {len(shipped)} shipped configs pass, {len(found)} of {len(MISTAKES)} mistakes are found"
    )


def main() -> None:
    """Measures and prints."""
    from plugins.commands.completion import SHELLS, script

    names = ("jsonargparse", "argcomplete", "shtab", "typer")
    print(", ".join(f"{name} {version(name)}" for name in names))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program, small = folder / "program.py", folder / "typer_program.py"
        program.write_text(PARSER)
        small.write_text(TYPER)
        print(
            "\n| what is completed | ours | offers | argcomplete | offers |\n| --- | --- | --- | --- | --- |"
        )
        config = composed(folder)
        for what, line in LINES.items():
            other = line.removeprefix("fit ").replace("--config quickstart", f"--config {config}")
            environment = {} if line.startswith("fit") else {"SUBCOMMANDS": "1"}
            (mine, words), (theirs, others) = ours(line), argcompletes(other, program, folder, **environment)
            cells = [
                f"{len(found)}: {', '.join(found[:2])}"[:70] if found else "nothing"
                for found in (words, others)
            ]
            print(f"| {what}: `{line}` | {mine:.2f} s | {cells[0]} | {theirs:.1f} s | {cells[1]} |")
        spent, words = argcompletes(LINES["an option"], program, folder, SUBCOMMANDS="1")
        print(f"\nargcomplete, an option behind a subcommand: {spent:.1f} s, {words}")
        asked = {"COMP_WORDS": "leyden fit --callback SpikeR", "COMP_CWORD": "3"}
        spent, said, _ = cpu([sys.executable, str(small)], _LEYDEN_COMPLETE="complete_bash", **asked)
        print(f"typer, a value by our own function: {spent:.2f} s, {said.split()}")
        spent, written, failure = cpu([sys.executable, str(program), "--print_completion=shtab-bash"])
        gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        print(f"shtab: {spent:.0f} s, {gib:.1f} GiB, {len(written):,} characters {failure}")
        print(f"our scripts: {sum(len(script(shell)) for shell in SHELLS):,} characters, for three shells")
        spent, said, failure = cpu([sys.executable, str(program), "--print_completion=jsonschema"])
        verdict = failure.strip().rpartition("\n")[2] or judged(json.loads(said[said.index("{") :]))
        print(f"jsonargparse's schema: {spent:.1f} s, {len(said):,} characters; {verdict}")
        spent, said, _ = cpu([sys.executable, "-m", "core", "schema"])
        print(f"our schema: {spent:.1f} s, {len(said):,} characters; {judged(json.loads(said))}")


if __name__ == "__main__":
    main()
