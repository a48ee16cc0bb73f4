"""`watch`: tables that grow, hostile run folders, a real server asked over HTTP, and a real browser."""

import csv
import http.client
import io
import json
import math
import os
import re
import shutil
import signal
import time

import numpy as np
import pytest

from conformance.workshop import workshop
from core.__main__ import main
from plugins.commands import watch_runs, watch_table
from plugins.commands.watch_runs import PNG, Runs
from plugins.commands.watch_table import POINTS, Table, thinned
from plugins.loggers.metrics_csv import MetricsCSV
from tests.support import browser
from tests.support.started import Started
from toolkit import pictures
from toolkit.diagnosis import Finding, write_findings

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def table_of(folder):
    return Table(lambda: open(folder / "metrics.csv", "rb"))


def log(logger, steps):
    for step in steps:
        logger.log_metrics({"train/loss": 1 / step, "train/tokens": 64.0 * step}, step)
        if step % 4 == 0:
            logger.log_metrics({f"val/{step // 40}": 2 / step}, step)


def held(table):
    found = {name: table.curve(name) for name in table.names()}
    return {name: (one["step"], one["value"]) for name, one in found.items() if one}


def test_a_table_that_grows_is_read_as_a_new_one(tmp_path):
    """Rows that are appended, replaced, dropped, and columns that are added: as MetricsCSV writes them."""
    logger, table, before = MetricsCSV(str(tmp_path)), table_of(tmp_path), -1
    for steps in (range(1, 3), range(3, 9), range(9, 10), range(10, 90), range(60, 95)):
        if steps[0] == 60:
            logger.go_back(59)
        log(logger, steps)
        table.look()
        assert table.changes > before
        before = table.changes
        table.look()
        assert table.changes == before  # nothing is new
        fresh = table_of(tmp_path)
        fresh.look()
        assert held(table) == held(fresh)
    expected = [float(f"{1 / step:.7g}") for step in range(1, 95)]
    assert held(table)["train/loss"] == ([float(step) for step in range(1, 95)], expected)
    assert table.newest()["step"] == 94


def test_only_what_was_appended_is_read(tmp_path):
    log(MetricsCSV(str(tmp_path)), range(1, 300))
    path, read = tmp_path / "metrics.csv", []

    class Counting(io.FileIO):
        def read(self, size=-1):
            read.append(super().read(size))
            return read[-1]

    table = Table(lambda: Counting(path))
    table.look()
    assert table.newest()["step"] == 299
    read.clear()
    with open(path, "a") as file:
        file.write("300,0.5,19200.0" + "," * (len(table.names()) - 2) + "\n")
    table.look()
    assert table.newest()["step"] == 300
    assert sum(map(len, read)) < 500 < path.stat().st_size / 10


def test_a_file_cut_off_anywhere_shows_its_complete_rows(tmp_path):
    text = b"step,train/loss\n1,0.5\n2,nan\n3,x\nno row\n4,1e400\n,7\n5,0.25\n"
    for length in range(len(text) + 1):
        (tmp_path / "metrics.csv").write_bytes(text[:length])
        table = table_of(tmp_path)
        table.look()
        steps = held(table).get("train/loss", ([], []))[0]
        rows = text[:length].count(b"\n") - 1
        assert steps == [1.0, 2.0, 4.0, 5.0][: {-1: 0, 0: 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 3, 6: 3, 7: 4}[rows]]
    assert held(table)["train/loss"] == ([1.0, 2.0, 4.0, 5.0], [0.5, None, None, 0.25])


def test_a_long_curve_keeps_its_extremes():
    values = np.sin(np.arange(100_000) / 5000)
    values[71_234], values[20_001], values[5] = 9.0, -9.0, math.nan
    kept = thinned(values)
    assert len(kept) <= POINTS + 2
    assert {0, 71_234, 20_001, 99_999} <= set(kept)
    assert (np.diff(kept) > 0).all()


def test_tokens_and_time_of_a_step(tmp_path):
    logger = MetricsCSV(str(tmp_path))
    for step in (10, 20, 30):
        logger.log_metrics({"train/tokens": 1000.0 * step, "throughput/step_time_ms": 500.0}, step)
    logger.log_metrics({"val/loss": 2.0}, 30)
    table = table_of(tmp_path)
    table.look()
    assert table.curve("val/loss") == {"step": [30.0], "tokens": [30_000.0], "time": [15.0], "value": [2.0]}


def test_files_of_a_hostile_folder_are_not_followed_or_waited_for(tmp_path, monkeypatch):
    secret = tmp_path / "secret.txt"
    secret.write_text("=== step 1\nsecret")
    run = tmp_path / "runs" / "run"
    (run / "doctor").mkdir(parents=True)
    (run / "metrics.csv").symlink_to("/dev/zero")
    (run / "samples.txt").symlink_to(secret)
    os.mkfifo(run / "techniques.txt")
    os.mkfifo(run / ".claimed")
    (run / "config.yaml").write_text("trainer: &a [*a, {max_steps: !!python/name:os.system x}]")
    (run / "spike_rollbacks.json").write_text("[" * 100_000)
    (run / "doctor" / "findings.jsonl").write_text(
        '{"step": 3}\nno JSON\n{"deep": [[[1]]], "text": "' + "x" * 100 + '"}\n7\n'
    )
    (tmp_path / "runs" / "link").symlink_to(run)
    [found] = Runs([str(tmp_path / "runs")]).all()
    summary = found.summary()
    assert "metrics.csv: " in summary["note"]
    assert (summary["step"], summary["max_steps"]) == (None, None)
    texts = found.texts()
    assert (texts["samples"], texts["techniques"], texts["rollbacks"]) == ([], "", [])
    assert texts["findings"] == [{"step": "3"}, {"deep": "[[[1]]]", "text": "x" * 100}]
    monkeypatch.setattr(watch_table, "MOST_BYTES", 100)
    (run / "metrics.csv").unlink()
    log(MetricsCSV(str(run)), range(1, 20))
    for _ in range(2):
        summary = found.summary()
    assert "are shown" in summary["note"]
    assert summary["step"] < 19


def test_pictures_and_reports_have_plain_names_and_bounded_sizes(tmp_path, monkeypatch):
    run = write_run(tmp_path / "runs")
    (run / "evaluation" / "step-00000010" / "deep").mkdir(parents=True)
    (run / "evaluation" / "step-00000020").mkdir()
    (run / "spike_report").mkdir()
    shown = ["evaluation/step-00000020/recall.png", "loss_curve.png", "spike_report/step-00000003.png"]
    others = ["evaluation/step-00000010/recall.png", "evaluation/step-00000010/deep/x.png", ".hidden.png", "a b.png",
              "\u00e4.png", "x.svg"]  # fmt: skip
    for name in (*shown, *others):
        (run / name).write_bytes(PNG + name.encode())
    (tmp_path / "secret.png").write_bytes(PNG)
    (run / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.png").write_bytes(PNG)
    (run / "linked").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(run / "pipe.png")
    (run / "page.png").write_text("<script>")
    (run / "large.png").write_bytes(PNG + b"x" * 300)
    for step in range(9):
        (run / "spike_report" / f"step-0000000{step}.md").write_text(f"# Spike at step {step}")
    (run / "evaluation" / "report.md").write_text("# Evaluation " + "x" * 100_000)
    monkeypatch.setattr(watch_runs, "MOST_PICTURE_BYTES", 200)
    [found] = Runs([str(tmp_path / "runs")]).all()
    texts = found.texts()
    assert [one["name"] for one in texts["pictures"]] == sorted([*shown, "large.png", "page.png"])
    assert [found.picture(name) for name in shown] == [PNG + name.encode() for name in shown]
    refused = [
        *others,
        "link.png",
        "linked/x.png",
        "pipe.png",
        "page.png",
        "large.png",
        "../../secret.png",
        "",
        "config.yaml",
    ]
    assert {found.picture(name) for name in refused} == {None}
    assert [one["name"] for one in texts["reports"]] == [
        "evaluation/report.md",
        *(f"spike_report/step-0000000{step}.md" for step in (8, 7, 6, 5)),
    ]
    assert len(texts["reports"][0]["text"]) == 1 << 16


def test_folders_that_are_removed_meanwhile(tmp_path):
    (tmp_path / "runs").mkdir()
    runs = Runs([str(tmp_path / "runs")])
    write_run(tmp_path / "runs")
    [found] = runs.all()
    found.summary()
    shutil.rmtree(tmp_path / "runs")
    assert runs.all() == [found]
    assert found.summary()["note"] == "no figures yet"
    assert found.texts()["samples"] == []


def write_run(folder, name="run", steps=60, text="The cat"):
    run = folder / name
    run.mkdir(parents=True)
    with open(run / "metrics.csv", "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["step", "train/loss", "train/tokens", "throughput/step_time_ms", "val/loss", f"gradient_norm/{HOSTILE}",
                       *(f"gradient_norm/block.{n}" for n in range(3))])  # fmt: skip
        for step in range(10, 10 * steps, 10):
            rows.writerow(
                [step, 10 / step, step * 512, 20.0, 11 / step if step % 50 == 0 else "", 1, 1, 2, 3]
            )
    (run / "config.yaml").write_text("trainer: {max_steps: 1000}\n")
    (run / "samples.txt").write_text(
        f"=== step 10, seed 0\n--- The\n{text} {HOSTILE}\n\n=== step 20, seed 0\n--- The\nnewer\n"
    )
    (run / "techniques.txt").write_text("technique  kind\nThroughput  callbacks\n")
    write_findings([Finding("rate_too_high", 40, f"it rises {HOSTILE}", 0.8, "Lower it")], run)
    (run / "stacks.rank1.txt").write_text("Thread")
    return run


class Watched(Started):
    """A server process on a free port."""

    def __init__(self, *folders):
        super().__init__(["watch", "--port=0", *map(str, folders)], workshop())
        found = self.until(r"# open (http://127\.0\.0\.1:(\d+)(/[\w-]{32}/))")
        self.url, self.port, self.path = found[1], int(found[2]), found[3]

    def ask(self, path, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path if path.startswith("/") else self.path + path, headers=headers)
        answer = connection.getresponse()
        text, kind = answer.read().decode(errors="replace"), answer.headers.get("content-type", "")
        connection.close()
        return answer.status, answer.headers, json.loads(text) if "json" in kind else text


def test_over_http(tmp_path):
    folder = tmp_path / "runs"
    run = write_run(folder)
    (run / "loss_curve.png").write_bytes(PNG)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    server = Watched(folder)
    [summary] = server.ask("runs")[2]["runs"]
    assert (summary["name"], summary["step"], summary["max_steps"], summary["state"]) == (
        "run",
        590,
        1000,
        "ended",
    )
    assert summary["groups"] == {"loss": 2, "train": 1, "throughput": 1, "gradient_norm": 4}
    assert (summary["stalls"], summary["findings"]) == (["stacks.rank1.txt"], 1)
    figures = server.ask("figures?run=0&groups=loss,none")[2]
    assert figures["version"] == summary["version"]
    assert figures["figures"].keys() == {"train/loss", "val/loss"}
    assert figures["figures"]["val/loss"]["tokens"][0] == 50 * 512
    texts = server.ask("texts?run=0")[2]
    assert [sample.splitlines()[0] for sample in texts["samples"]] == [
        "=== step 20, seed 0",
        "=== step 10, seed 0",
    ]
    with open(run / "metrics.csv", "a") as file:
        file.write("600,0.5,1,1,,1,1,1,1\n")
    write_run(folder, "later")
    first, second = server.ask("runs")[2]["runs"]
    assert first["version"] > summary["version"]
    assert (first["step"], second["name"]) == (600, "later")
    for path in ("", "page.js", "page.css", "runs"):
        status, headers, _ = server.ask(path)
        assert status == 200
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
    script = server.ask("page.js")[2]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(|https?://", script
    )
    status, headers, _ = server.ask("picture?run=0&name=loss_curve.png")
    assert (status, headers["content-type"]) == (200, "image/png")
    assert "img-src 'self'" in headers["content-security-policy"]
    refused = {
        "a picture that is none": server.ask("picture?run=0&name=config.yaml")[0],
        "a picture elsewhere": server.ask("picture?run=0&name=../later/x.png")[0],
        "no token": server.ask("/runs")[0],
        "another token": server.ask(f"/{'x' * 32}/runs")[0],
        "another host": server.ask("runs", Host="evil.example")[0],
        "writing": server.ask("runs", method="POST")[0],
        "no such run": server.ask("figures?run=7&groups=loss")[0],
        "no number": server.ask("figures?run=../..&groups=loss")[0],
        "a file": server.ask("../config.yaml")[0],
    }
    assert list(refused.values()) == [404, 404, 404, 404, 400, 405, 404, 404, 404], refused
    assert server.end(signal.SIGINT) == 130
    assert "Traceback" not in server.said
    after = {path: path.stat().st_mtime_ns for path in before if path.name not in ("metrics.csv", "runs")}
    assert after == {path: time for path, time in before.items() if path in after}  # nothing was written


def test_mistakes(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["watch", str(tmp_path / "empty")]) == 2
    assert "There is no run in" in capsys.readouterr().err


LOOKS = """
const done = arguments[arguments.length - 1];
const look = () => document.querySelectorAll('figure canvas').length >= arguments[0] ? done(true) : setTimeout(look, 30);
look();
"""
IMAGES = """
const done = arguments[arguments.length - 1];
const look = () => [...document.images].filter(one => one.naturalWidth).length >= arguments[0] ? done(true) : setTimeout(look, 30);
look();
"""
INK = """
const canvas = [...document.querySelectorAll('figure')].find(one => one.textContent === arguments[0]).querySelector('canvas');
const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
const colours = new Set();
for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 250) colours.add([data[at], data[at + 1], data[at + 2]].join());
return [...colours];
"""


@pytest.mark.ci
@pytest.mark.skipif(not browser.installed(), reason="needs chromium and chromedriver")
def test_in_a_browser(tmp_path):
    folder = tmp_path / "runs"
    write_run(folder, "first")
    pictures.save(pictures.new_figure(2, 1), folder / "first" / "loss_curve.png")
    (folder / "first" / "spike_report").mkdir()
    (folder / "first" / "spike_report" / "step-00000020.md").write_text(f"# Spike at step 20 {HOSTILE}")
    (folder / "first" / "broken.png").write_text(HOSTILE)
    write_run(folder, "second", steps=40)
    server = Watched(folder)
    with browser.Browser() as page:
        page.open(server.url)
        page.wait_for(LOOKS, 3)
        assert {"42,122,226", "226,114,42"} <= set(page.run(INK, "train/loss"))  # a curve of each run
        page.run(
            "for (const one of document.querySelectorAll('details')) one.open = true;"
            "for (const id of ['log', 'axis', 'smoothing']) { const one = document.getElementById(id);"
            "if (id === 'log') one.checked = true; else one.value = id === 'axis' ? 'tokens' : 0.8;"
            "one.dispatchEvent(new Event('input')); one.dispatchEvent(new Event('change')); }"
        )
        page.wait_for(LOOKS, 8)
        if kept := os.environ.get("LEYDEN_PICTURES"):
            with open(f"{kept}/watch.png", "wb") as file:
                file.write(page.picture())
        page.click("#runs li:first-child input")
        deadline = time.monotonic() + 30
        while "42,122,226" in page.run(INK, "train/loss"):
            assert time.monotonic() < deadline
        write_run(folder, "third")
        page.wait_for(LOOKS.replace("'figure canvas'", "'#runs li'"), 3)
        text = page.run("return document.body.textContent")
        assert HOSTILE in text  # as text: in the name of a figure, a sample, a finding
        assert "a step did not end" in text
        assert page.run("return document.title") == "Runs"
        assert "# Spike at step 20" in text
        assert page.run("return document.querySelectorAll('main script').length") == 0
        # the picture is drawn, and what only has its name is not
        page.run("for (const one of document.images) one.loading = 'eager';")
        page.wait_for(IMAGES, 1)
        assert page.run("return [...document.images].map(one => [one.alt, one.naturalWidth > 0])") == [
            ["broken.png", False],
            ["loss_curve.png", True],
        ]
        loaded = page.run(
            "return performance.getEntriesByType('resource').map(one => new URL(one.name).origin)"
        )
        assert set(loaded) == {f"http://127.0.0.1:{server.port}"}
        assert server.end(signal.SIGINT) == 130
        deadline = time.monotonic() + 30
        while "Not up to date" not in page.run("return document.getElementById('message').textContent"):
            assert time.monotonic() < deadline
