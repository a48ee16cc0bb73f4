"""`plugins show`: every technique is described in full, from docstring, signature and declaration."""

import subprocess
import sys

import pytest

from core import catalog
from core.__main__ import main
from plugins.cli.configuration.docstrings import documented, sections
from plugins.cli.configuration.yaml_texts import parse_yaml
from tests.conftest import HOUSE


@pytest.fixture
def shown(capsys):
    def call(name):
        assert main(["plugins", "show", name]) == 0
        return capsys.readouterr().out

    return call


def example(text):
    return text.partition("\nExample:\n")[2].partition("\nWhere:\n")[0]


def test_arguments_come_with_type_default_and_description(shown):
    lines = shown("WarmupCosine").splitlines()
    assert lines[0] == f"WarmupCosine  (schedules, from {catalog.find('WarmupCosine').origin})"
    at = lines.index("Arguments:")
    assert lines[at + 1 : at + 5] == [
        "  optimizer: Optimizer  (given by the run)",
        "      Its learning rates are the peaks.",
        "  warmup_steps: int | float = 100",
        "      Optimizer steps until the peak; below 1 a fraction of the schedule; 0 starts at the peak.",
    ]
    assert "  total_steps: int | float | None = None" in lines
    assert any(line.startswith("  file       ") and "warmup_cosine.py:" in line for line in lines)
    assert "  class      plugins.schedules.warmup_cosine.WarmupCosine" in lines
    assert any(line.startswith("  paper      SGDR, arXiv:1608.03983") for line in lines)


@pytest.mark.ci
def test_every_technique_of_ours_can_be_shown_with_a_snippet_that_parses(shown):
    entries = [entry for entry in catalog.entries() if entry.package == "leyden"]
    for entry in entries:
        text = shown(entry.class_path)
        assert entry.summary() in text, entry
        if entry.kind != "commands":
            values, _ = parse_yaml(example(text), entry.name)
            assert values, entry
    assert len(entries) > 20


def options(text):
    return text.partition("\nOptions:\n")[2].partition("\n\n")[0].splitlines()


def test_a_command_is_shown_with_its_options(shown):
    lines = options(shown("compare-tokenizers"))
    assert lines[:2] == [
        "  NAME_OR_FILE",
        "      a registered tokenizer, with its arguments after a colon (UnigramTokenizer,",
    ]
    at = lines.index("  --length LENGTH")
    assert lines[at + 1] == "      tokens in a sequence (2048)"
    lines = options(shown("plugins"))
    assert lines[lines.index("  show") + 1 :][:3] == [
        "      all about one technique, with YAML to paste",
        "    NAME",
        "        short name or full path",
    ]
    assert "{bash,zsh,fish}" in shown("completion")
    assert options(shown("fit")) == ["  `python -m core fit --help` shows them all."]


@pytest.mark.parametrize("name", [entry.name for entry in catalog.entries() if entry.kind == "commands"])
def test_what_is_shown_of_a_command_is_plain(name, shown):
    text = shown(name)
    assert "%(" not in text
    assert "\nArguments:\n" not in text


ACME = '''
from core.technique import Package, technique
from lightning.pytorch import Callback


class Base(Callback):
    def __init__(self, patience: int = 3, **kwargs):
        pass


@technique(
    paper="a blog post",
    needs=[Package("torch>=2"), Package("no-such-package>=9")],
    conflicts={"GPT": "for the test"},
    before=["RunSummary"],
    after=["Throughput", "LossCurve"],
    owns=["batch_size"],
)
class AcmeGuard(Base):
    """Guards.

    Args:
        limit (float): The highest loss,
            in nats per token.
        *names: Of what: is guarded.

    Raises:
        ConfigError: Never.
    """

    def __init__(self, limit, *names, mode: "str | None" = None, **kwargs):
        super().__init__(**kwargs)
'''


def test_a_declaration_is_shown_whole_and_a_missing_snippet_is_made(shown, packages):
    packages.add("acme", {"leyden.callbacks": {"AcmeGuard": "acme:AcmeGuard"}}, ACME)
    text = shown("AcmeGuard")
    for line in (
        "  limit  (required)",
        "      The highest loss, in nats per token.",
        "  mode: str | None = None",
        "  patience: int = 3",
        "  needs      torch>=2 (present)",
        "             no-such-package>=9 (no-such-package is not installed: pip install 'no-such-package>=9')",
        "  conflicts  GPT: for the test",
        "  before     RunSummary",
        "  after      Throughput",
        "             LossCurve",
        "  owns       batch_size",
        "  ConfigError: Never.",
        "  package    acme 1.2",
    ):
        assert line in text.splitlines(), line
    assert parse_yaml(example(text), "")[0] == {
        "trainer": {"callbacks+": [{"class_path": "AcmeGuard", "init_args": {"limit": "<value>"}}]}
    }


def test_sections_end_where_prose_begins_again():
    parts = sections(
        "First.\n\n    Args:\n        a: One\n            and a half.\n        b: Two.\n\n    More.\n"
    )
    assert parts == {"": "First.\n\nMore.", "Args": "a: One\n    and a half.\nb: Two."}
    assert documented(parts["Args"]) == {"a": "One and a half.", "b": "Two."}
    assert sections(None) == {"": ""}


def test_the_beginning_of_a_name_is_answered_with_the_name(capsys):
    assert main(["plugins", "show", "SpikeRoll"]) == 2
    assert "Did you mean SpikeRollback?" in capsys.readouterr().err


def test_a_broken_technique_is_one_message_that_names_its_package(packages, capsys):
    packages.add("acme", {"leyden.callbacks": {"AcmeGuard": "acme:AcmeGuard"}}, "1 / 0")
    assert main(["plugins", "show", "AcmeGuard"]) == 2
    assert "AcmeGuard of acme 1.2 cannot be imported: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (
            ["plugins", "show", "WarmupCosin"],
            2,
            "no technique named 'WarmupCosin'. Did you mean WarmupCosine?",
        ),
        (["plugins", "shwo", "GPT"], 2, "invalid choice: 'shwo'"),
        (["plugins", "list", "--kind", "callback"], 2, "invalid choice: 'callback' (choose from"),
        (["plugins", "new", "X"], 2, "required: --kind"),
        (["plugins", "--help"], 0, ""),
        (["plugins", "show", "--help"], 0, ""),
        (["config", "--help"], 0, ""),
        (["config", "diff", "quickstrat", "quickstart"], 2, "Did you mean quickstart?"),
    ],
)
def test_help_and_mistakes_are_answered_without_torch(words, code, expected):
    source = (
        "import sys; from core.__main__ import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'lightning', 'litdata', 'matplotlib', 'jsonargparse'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", source, *words], cwd=HOUSE, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) <= 10
