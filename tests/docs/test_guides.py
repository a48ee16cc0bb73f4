"""The commands and YAML of the README and of docs/ run, and their links lead somewhere.

Blocks marked `bash` and `yaml` are executed here; `sh` marks what needs other machines. A `fit` is cut to two steps.
"""

import json
import re
import shlex

import pytest
import yaml

from conformance.runs import run
from conformance.workshop import workshop
from core.__main__ import main
from tests.conftest import HOUSE
from tests.support import tuning_files
from tests.support.chat_checkpoint import bytes_tokenizer

PAGES = [HOUSE / "README.md", *sorted((HOUSE / "docs").glob("*.md"))]
SHORT = ("--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1")
FIRST = (*SHORT, "--model.lr_scheduler.warmup_steps=1", "--data.sequence_length=32", "--data.batch_size=2")


def blocks(page, language):
    """Returns the fenced blocks of a language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands(page):
    """Returns the words of each command, behind `python -m core`."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]
    return [words[3:] for words in found if words[:3] == ["python", "-m", "core"]]


def shortened(words):
    """Returns a command that takes seconds, as the guide's own may take minutes."""
    recipes = [word.removeprefix("recipes/") for word in words if word.startswith("recipes/")]
    if words[0] == "fit" and recipes:
        return [*words, "--config", f"recipes/shrunken/{recipes[-1]}"]
    if words[0] == "fit" and "--print_config" not in words:
        if "--ckpt_path" in words:
            return [*words, "--trainer.max_steps=3", *SHORT[1:]]
        return [*words, *FIRST]
    return [*words, "--trainer.limit_val_batches=1"] if words[0] == "validate" else words


@pytest.fixture
def folder(tmp_path):
    """A user's folder: some text and prompts of their own, and two runs to compare."""
    (tmp_path / "prompts.txt").write_text("The function\nIf you\nThis is\n", encoding="utf-8")
    [template] = blocks(HOUSE / "docs" / "generation.md", "jinja")
    (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
    turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]
    chats = [json.dumps({"messages": turns, "user": number}) for number in range(80)]
    (tmp_path / "chats.jsonl").write_text("\n".join(chats), encoding="utf-8")
    reviews = [
        json.dumps({"text": f"It is {w}, {n}", "label": w}) for n in range(40) for w in ("good", "bad")
    ]
    (tmp_path / "reviews.jsonl").write_text("\n".join(reviews), encoding="utf-8")
    problems = [json.dumps({"question": f"{n} + {n}?", "answer": f"#### {2 * n}"}) for n in range(80)]
    (tmp_path / "problems.jsonl").write_text("\n".join(problems), encoding="utf-8")
    tuning_files.pairs(tmp_path)
    for name in ("notes", "corpus"):
        (tmp_path / name).mkdir()
        for number in range(12):
            text = f"# Note {number}\n" + f"The function {number} returns words and words. " * 60
            (tmp_path / name / f"{number}.md").write_text(text, encoding="utf-8")
    return tmp_path


def execute(words, folder):
    # one cache for all guides, most of which begin with the quickstart's text
    environment = {"XDG_CACHE_HOME": str(workshop() / "cache-of-guides")}
    return run(words, folder, cwd=folder, environments=[environment], timeout=240)


def guides():
    """Yields pages with commands. Real chat models take long; test_recipes.py tries their recipes."""
    for page in (page for page in PAGES if commands(page)):
        mark = pytest.mark.slow if page.stem == "chat-model" else pytest.mark.ci
        yield pytest.param(page, id=page.stem, marks=mark)


@pytest.mark.parametrize("page", list(guides()))
def test_the_commands_of_a_guide_run(page, folder):
    found = commands(page)
    if any(words[0] == "compare" for words in found):
        for _ in range(2):
            assert execute(["fit", "--config", "quickstart", *FIRST], folder).code == 0
    if page.stem == "chat-model":
        tuning_files.base_folder(folder)
    for words in found:
        done = execute(shortened(words), folder)
        assert done.code == 0, f"{' '.join(words)}\n{done.error_text}"


def modules(page):
    """Yields (file, source) of each Python block that the text before gives the name of a file in a folder."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"`([\w/]+\.py)` holds\n+```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_python_of_the_guide_to_generation_runs(capsys):
    [(_, source)] = modules(HOUSE / "docs" / "generation.md")
    names = {"__name__": "example"}
    exec(compile(source, "generation.md", "exec"), names)
    assert capsys.readouterr().out == f"{names['texts']}\n"
    assert all(0 < len(ids) <= 10 for ids in names["texts"])


def configs():
    return [(page, text) for page in PAGES for text in blocks(page, "yaml")]


@pytest.mark.parametrize(("page", "text"), configs(), ids=lambda part: getattr(part, "stem", ""))
def test_the_yaml_of_a_guide_is_a_config(page, text, tmp_path, monkeypatch, capsys):
    assert "base" in yaml.safe_load(text)
    for name, source in modules(page):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(bytes_tokenizer(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--offline", "--config", "mine.yaml"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", [*PAGES, HOUSE / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_to_files_that_are_there(page):
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [link for link in links if link and not (page.parent / link).exists()]


def test_every_guide_is_in_the_index():
    index = (HOUSE / "docs" / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES[1:] if page.name != "README.md" and f"({page.name})" not in index]


def test_the_threat_model_names_tests_that_exist():
    """A path is relative to the folder in the head of its table; `::test_x` alone is in the file before it."""
    folder, last, found = HOUSE / "tests", HOUSE, []
    for line in (HOUSE / "docs" / "threat-model.md").read_text(encoding="utf-8").splitlines():
        if head := re.search(r"\| held by (?:`(.*)` )?\|$", line):
            folder = HOUSE / "tests" / (head[1] or "")
        for path, name in re.findall(r"`((?:[\w./]*/)?test_\w+\.py)?(?:::(test_\w+))?`", line):
            if path or name:
                last = folder / path if path else last
                found.append(f"{last}::{name}")
                assert last.is_file(), last
                assert not name or f"def {name}(" in last.read_text(encoding="utf-8"), found[-1]
    assert len(found) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_modules_of_ours_that_a_guide_names_exist(page):
    named = re.findall(r"`((?:core|toolkit|conformance|tests)/[\w/.]*)`", page.read_text(encoding="utf-8"))
    missing = [
        name for name in named if not (HOUSE / name).exists() and not (HOUSE / "tests" / name).exists()
    ]
    assert not missing
