"""`python -m core`: cheap commands, wrong commands, and the folder it is called from."""

import os
import subprocess
import sys

import pytest

from core import __version__, catalog
from core.__main__ import main
from core.errors import ConfigError
from tests.conftest import HOUSE, run_core

HEAVY = ("torch", "lightning", "jsonargparse", "litdata", "numpy")


@pytest.fixture
def spied(tmp_path):
    """A folder whose sitecustomize writes the names of all imported modules to `imported` at exit."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, pathlib, sys\n"
        f"out = pathlib.Path({str(tmp_path / 'imported')!r})\n"
        "atexit.register(lambda: out.write_text('\\n'.join(sys.modules)))\n"
    )
    return tmp_path


def imported(folder):
    return set((folder / "imported").read_text().splitlines())


@pytest.mark.parametrize("arguments", [["--help"], [], ["plugins", "list"], ["--version"], ["fitt"]])
def test_cheap_commands_import_nothing_heavy_and_answer_within_a_second(arguments, spied):
    before = os.times()
    done = run_core(*arguments, PYTHONPATH=str(spied))
    after = os.times()
    assert "core.catalog" in imported(spied)  # the spy works
    assert not imported(spied) & set(HEAVY)
    assert done.returncode == (2 if arguments == ["fitt"] else 0), done.stderr
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 1, f"{spent:.2f} s of CPU time"


def test_help_lists_every_command_with_what_it_does(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for entry in catalog.entries():
        if entry.kind == "commands":
            assert entry.summary(), entry
            assert any(line.split(maxsplit=1) == [entry.name, entry.summary()] for line in lines), entry


def test_plugins_list_shows_every_technique_with_what_it_does(capsys):
    assert main(["plugins", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(catalog.entries()) + 1
    for entry in catalog.entries():
        if entry.package == "leyden":
            assert entry.summary(), f"{entry.name} has no docstring at {entry.class_path}"
            row = [entry.kind, entry.name, "leyden", entry.version, *entry.summary().split()]
            assert row in [line.split() for line in lines]


def test_plugins_list_selects_by_kind_package_and_word(capsys, packages):
    packages.add(
        "acme_tools", {"leyden.callbacks": {"AcmeGuard": "acme_tools:AcmeGuard"}}, "class AcmeGuard: ''"
    )

    def names(*options):
        assert main(["plugins", "list", *options]) == 0
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]

    assert names("--kind", "loggers") == ["MetricsCSV", "Mlflow", "Trackio", "Wandb"]
    assert names("--package", "acme_tools") == ["AcmeGuard"]
    assert "WarmupCosine" in names("--search", "COSINE")
    assert "GPT" not in names("--search", "cosine")
    assert main(["plugins", "list", "--package", "acme_tool"]) == 2
    assert "named 'acme_tool' registers a technique. Did you mean acme_tools?" in capsys.readouterr().err


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"leyden {__version__}\n"


def test_an_unknown_command_ends_with_2_and_names_the_nearest(capsys):
    assert main(["validdate"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[0] == "There is no command named 'validdate'. Did you mean validate?"


def test_at_most_ten_lines_of_a_message_are_shown(capsys, packages):
    source = "from core.errors import ConfigError\ndef long(_): raise ConfigError('line\\n' * 30)\n"
    packages.add("acme_long", {"leyden.commands": {"long": "acme_long:long"}}, source)
    assert main(["long"]) == 2
    assert capsys.readouterr().err == "line\n" * 10


def test_an_interrupt_ends_with_130_and_no_traceback(capsys, packages):
    source = "def stop(_): raise KeyboardInterrupt\n"
    packages.add("acme_stop", {"leyden.commands": {"stop": "acme_stop:stop"}}, source)
    assert main(["stop"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_a_mistake_of_ours_is_told_in_short_and_shown_on_demand(packages, capsys):
    packages.add("acme_bug", {"leyden.commands": {"bug": "acme_bug:bug"}}, "def bug(_): return 1 / 0\n")
    assert main(["bug"]) == 1
    message = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in message
    assert "acme_bug.py:1 in bug" in message
    assert len(message.splitlines()) <= 10
    with pytest.raises(ZeroDivisionError):
        main(["bug", "--debug"])
    assert not issubclass(ZeroDivisionError, ConfigError)


@pytest.fixture
def namesakes(tmp_path):
    """A folder of a user's with packages and configs named like ours."""
    for name in ("plugins", "callbacks", "datamodules", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package was imported')\n")
    (tmp_path / "mine.py").write_text("def hello(_): print('mine')\n")
    return tmp_path


@pytest.mark.parametrize("call", [["-m", "core"], ["leyden"]])
def test_folders_named_like_ours_do_not_get_in_the_way(call, namesakes):
    script = os.path.join(os.path.dirname(sys.executable), "leyden")
    if call == ["leyden"] and not os.path.exists(script):
        pytest.skip("the console script is not installed")
    command = [sys.executable, *call] if call[0] == "-m" else [script]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "plugins", "list"], cwd=namesakes, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WarmupCosine" in done.stdout
    assert "Linear warm-up" in done.stdout  # its source was found, in our folder


@pytest.mark.parametrize("init", ["HIS = 1\nfrom core import part", None])
def test_a_folder_core_does_not_hide_an_editable_installation(init, tmp_path):
    """Its finder comes behind sys.path, so that `python -m core` imports the folder of the working directory first."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "part.py").write_text("PART = 1\n")
    if init:
        (tmp_path / "core" / "__init__.py").write_text(init)
    (tmp_path / "editable.py").write_text(
        "import sys, runpy\n"
        "from importlib.machinery import PathFinder\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(HOUSE)!r} + '/core' * name.startswith('core.')])\n"
        "sys.meta_path.append(Finder)\n"
        "sys.argv[1:] = ['plugins', 'list']\n"
        "runpy.run_module('core', run_name='__main__', alter_sys=True)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "editable.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "WarmupCosine" in done.stdout


def test_the_users_folder_comes_last_and_is_there_once(namesakes, monkeypatch):
    monkeypatch.chdir(namesakes)
    monkeypatch.setattr(sys, "path", ["", str(namesakes), *sys.path])
    assert main(["--version"]) == 0
    assert sys.path.count(str(namesakes)) + sys.path.count("") == 1
    assert sys.path[-1] == str(namesakes)
    assert sys.path.index(str(HOUSE)) < len(sys.path) - 1


def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "core", "plugins", "list"],
        cwd=HOUSE,
        env=environment,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", [["fit", "--config"], ["generate", "--ckpt_path"], ["plugins", "show"]])
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a\0b", r"'a\x00b' is no text: it has a NUL character, or is not UTF-8"),
        ("a\udcff", r"'a\udcff' is no text"),
        ("\ud800", "is not UTF-8"),
    ],
)
def test_words_that_are_no_text_end_with_2(command, word, expected, capsys):
    assert main([*command, word]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="bytes as arguments")
def test_bytes_that_are_not_utf_8_end_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "core", "plugins", "show", b"\xff"], cwd=HOUSE, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert r"The argument '\udcff' is no text" in done.stderr


PATHS = {
    "too-long": "x" * 300,
    "deep": "x/" * 3000,
    "below-a-file": "file/below",
    "loop": "loop",
    "nul-in-a-file": "nul.yaml",
}
COMMANDS = [
    ["fit", "--config"],
    ["check", "--config"],
    ["fit", "--ckpt_path"],
    ["generate", "--ckpt_path"],
    ["consolidate"],
    ["compare"],
    ["verify-data"],
    ["inspect-data"],
    ["prepare", "--config"],
    ["plugins", "show"],
    ["config", "diff", "quickstart"],
    ["launch", "--cluster=slurm", "--dry-run", "fit", "--config"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("path", PATHS)
def test_what_the_system_refuses_ends_with_2(command, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "nul.yaml").write_text('trainer: {default_root_dir: "a\\0b"}\n')
    (tmp_path / "loop").symlink_to("loop")
    if command[0] == "consolidate":
        command = [*command, PATHS[path], "out"]
    elif (command[0], path) == ("config", "nul-in-a-file"):
        pytest.skip("it compares the value")
    else:
        command = [*command, PATHS[path]]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert 1 <= len(error.splitlines()) <= 10
    assert "Traceback" not in error
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "loop", "nul.yaml"]
