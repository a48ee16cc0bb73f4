"""What the README says of the techniques is what the catalogue holds."""

from pathlib import Path

from core.__main__ import main

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_table_of_techniques_is_current(capsys):
    assert main(["plugins", "list", "--package", "leyden", "--markdown"]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") > 20
    assert table in README.read_text(encoding="utf-8"), f"put this table into README.md:\n{table}"
