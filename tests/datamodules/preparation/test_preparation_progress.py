"""Progress is a share of the source's bytes, because tasks differ in size."""

from datamodules.preparation.preparation_progress import watched


def record(number, found=False):
    counts = {"documents": 10, "tokens": 100, "bytes": 1000}
    return {"number": number, "found": found, "splits": {"train": counts}, "sources": {"a": counts}}


def shown(records, capsys, sizes):
    assert list(watched(iter(records), len(records), sizes)) == records
    return capsys.readouterr().err.splitlines()


def test_lines_say_how_many_bytes_are_done(capsys):
    some = [record(1), record(0), record(2), record(3)]
    lines = shown(some, capsys, [3_000_000, 1_000_000, 56_000_000, 40_000_000])
    assert [line.split(":")[0] for line in lines] == [
        "tasks 3/4, 60.0 MB of 100 MB",  # a line for each tenth of the bytes
        "tasks 4/4, 100 MB of 100 MB",
    ]
    assert lines[-1].endswith(" 0:00:00 left")


def test_what_an_earlier_run_did_counts_as_done(capsys):
    first, last = shown([record(0, found=True), record(1)], capsys, [50, 50])
    assert first == "tasks 1/2, 50 bytes of 100 bytes: done by an earlier run"
    assert last.startswith("tasks 2/2, 100 bytes of 100 bytes: ")


def test_without_sizes_tasks_are_counted(capsys):
    for sizes in (None, [0, 0]):
        lines = shown([record(0), record(1)], capsys, sizes)
        assert [line.split(":")[0] for line in lines] == ["tasks 1/2", "tasks 2/2"]
