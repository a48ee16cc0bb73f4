"""Every command answers a wrong option in a few lines, without its usage."""

import pytest

from core import catalog
from core.__main__ import main

COMMANDS = sorted(e.name for e in catalog.entries() if e.kind == "commands" and e.package == "leyden")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_option_is_a_mistake_and_no_usage(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command, "--no-such-option=1"]) == 2
    message = capsys.readouterr().err
    assert "usage:" not in message
    assert 1 <= len(message.splitlines()) <= 10
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["compare", "--outptu", "x", "runs/a"], "--output"),
        (["plugins", "list", "--serach=x"], "--search"),
        (["launch", "--cluster=slurm", "--nods=3", "fit"], "--nodes"),
    ],
)
def test_the_nearest_option_is_named(words, nearest, capsys):
    assert main(words) == 2
    assert f"Did you mean {nearest}?" in capsys.readouterr().err
