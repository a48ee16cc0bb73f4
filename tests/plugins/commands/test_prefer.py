"""`prefer`: a real server, asked over HTTP and by a real browser; what it stores, and what it makes of it."""

import http.client
import json
import os
import re
import signal
import time

import numpy as np
import pytest

from core.__main__ import main
from core.errors import ConfigError
from plugins.commands.prefer_report import Rate, rates, strengths, wilson
from plugins.commands.prefer_tasks import read_tasks
from plugins.commands.prefer_votes import Votes, read_votes
from tests.support import browser
from tests.support.started import Started

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> & \"quotes\""


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_answers(folder, models=("base", "tuned"), prompts=6):
    """Writes files as `generate` does; returns their NAME=FILE words."""
    for model in models:
        records = [
            {"prompt": f"Question {n}?\n{HOSTILE}", "text": f"{model} says {n}. {HOSTILE}", "ids": [1]}
            for n in range(prompts)
        ]
        records.append({"prompt": "Same?", "text": "Yes.", "ids": [2], "finish_reason": "stop"})
        records.append({"prompt": f"Only {model}", "text": "x"})
        (folder / f"{model}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return [f"{model}={folder / f'{model}.jsonl'}" for model in models]


class Comparing(Started):
    """A server process on a free port."""

    def __init__(self, folder, answers, *words):
        self.output = folder / "compared"
        super().__init__(
            ["prefer", "--port=0", f"--output={self.output}", *words, "--answers", *answers], folder
        )
        found = self.until(r"# open (http://127\.0\.0\.1:(\d+)(/[\w-]{32}/))")
        self.url, self.port, self.path = found[1], int(found[2]), found[3]

    def ask(self, path="task", body=None, method=None, **headers):
        """Returns status, headers and JSON (or text) of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        path = path if path.startswith("/") else self.path + path
        given = {"Content-Type": "application/json"} if body is not None else {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, data, given | headers)
        answer = connection.getresponse()
        text, kind = answer.read().decode(), answer.headers.get("content-type", "")
        connection.close()
        return answer.status, answer.headers, json.loads(text) if "json" in kind else text

    def choose(self, choice):
        state = self.ask()[2]
        return self.ask("choice", {"task": state["task"], "choice": choice})[2]


def test_choices_over_http_become_preference_data(tmp_path):
    answers = write_answers(tmp_path)
    server = Comparing(tmp_path, answers)
    assert "# 6 pairs, 0 of them compared, 1 of equal answers left out" in server.said
    state = server.ask()[2]
    assert (state["total"], state["done"], state["undo"]) == (6, 0, False)
    first, shown = state["task"], {"left": state["left"], "right": state["right"]}
    assert {text.split()[0] for text in shown.values()} == {"base", "tuned"}
    assert not any("model" in key for key in state)
    chosen = {}
    for n, choice in enumerate(("left", "right", "tie", "skip")):
        state = server.ask()[2]
        chosen[state["task"]] = state.get(choice, "")
        state = server.choose(choice)
        assert (state["done"], state["undo"]) == (n + 1, True)
    [pair] = [
        one for one in lines(tmp_path / "compared" / "preferences.jsonl") if one["chosen"] == shown["left"]
    ]
    assert pair["rejected"] == shown["right"]
    assert pair["chosen_model"] == shown["left"].split()[0]
    state = server.ask("undo", {})[2]
    assert (state["done"], state["task"]) == (3, list(chosen)[-1])  # what was undone is asked again
    server.process.kill()
    server.end()
    server = Comparing(tmp_path, answers, "--seed", "1")  # in another order
    assert "# 6 pairs, 3 of them compared" in server.said
    server.ask("choice", {"task": first, "choice": "tie"})  # the last choice for a task counts
    for _ in range(3):
        state = server.choose("left")
    assert state == {"total": 6, "done": 6, "undo": True}
    assert server.end() == 143
    assert "Traceback" not in server.said
    votes = read_votes(tmp_path / "compared")
    assert len(votes) == 6
    assert votes[first]["choice"] == "tie"
    assert len(lines(tmp_path / "compared" / "preferences.jsonl")) == 4


def test_the_data_module_reads_what_was_chosen(tmp_path, capsys):
    from datamodules.preference_datamodule import PreferenceDataModule
    from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
    from tests.conformance.conftest import bytes_tokenizer

    tasks, _ = read_tasks(write_answers(tmp_path, prompts=40), seed=0)
    votes = Votes(tmp_path / "compared")
    for n, task in enumerate(tasks):
        votes.add(task, "tie" if n % 10 == 0 else task.models[n % 2], task.models[0])
    votes.close()
    data = PreferenceDataModule(
        source=str(tmp_path / "compared" / "preferences.jsonl"),
        tokenizer=PretrainedTokenizer(bytes_tokenizer()),
        template="plain",
        sequence_length=512,
        batch_size=2,
        validation_fraction=0.2,
        cache_dir=str(tmp_path / "cache"),
    )
    data.prepare_data()
    assert "32 for train, 4 for validation" in capsys.readouterr().err


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    server = Comparing(folder, write_answers(folder))
    yield server
    assert server.end(signal.SIGINT) == 130
    assert "Traceback" not in server.said


def test_the_page_is_static_and_loads_nothing_else(server):
    for path in ("", "page.js", "page.css", "task"):
        status, headers, text = server.ask(path)
        assert status == 200
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "http" not in str(text).replace("http-equiv", "")
    script = server.ask("page.js")[2]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(", script)


def test_what_is_not_asked_by_the_page_is_refused(server):
    task = server.ask()[2]["task"]
    choice = {"task": task, "choice": "left"}
    refused = {
        "another path": server.ask("/task"),
        "no path": server.ask("/"),
        "another token": server.ask(f"/{'x' * 32}/choice", choice),
        "another host": server.ask("task", Host="evil.example"),
        "a form of another site": server.ask("choice", choice, **{"Content-Type": "text/plain"}),
        "a request without type": server.ask("undo", b"{}", **{"Content-Type": ""}),
        "a reading request": server.ask("choice"),
        "another task": server.ask("choice", choice | {"task": "none"}),
        "another choice": server.ask("choice", choice | {"choice": "base"}),
        "no JSON": server.ask("choice", b"{"),
        "no object": server.ask("choice", b"[]"),
        "no texts": server.ask("choice", {"task": [], "choice": {}}),
        "a large body": server.ask("choice", {"task": "x" * 10_000}),
        "nothing to undo": server.ask("undo", {}),
    }
    statuses = {what: status for what, (status, _, _) in refused.items()}
    expected = [404, 404, 404, 400, 415, 415, 405, 404, 400, 400, 400, 400, 413, 409]
    assert list(statuses.values()) == expected, statuses
    assert server.ask()[2]["done"] == 0


def test_one_process_writes_at_a_time(server, tmp_path):
    folder = str(server.output)
    with pytest.raises(ConfigError, match="in use by another"):
        Votes(type(tmp_path)(folder))


def test_a_line_that_was_cut_off_is_taken_away(tmp_path):
    tasks, _ = read_tasks(write_answers(tmp_path), seed=0)
    votes = Votes(tmp_path / "out")
    for task in tasks[:2]:
        votes.add(task, "tuned", "base")
    votes.close()
    path = tmp_path / "out" / "votes.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    (tmp_path / "out" / "preferences.jsonl").unlink()
    votes = Votes(tmp_path / "out")
    assert list(votes.last) == [tasks[0].id]
    votes.add(tasks[1], "tuned", "base")
    votes.close()
    assert path.read_bytes() == whole
    assert len(lines(tmp_path / "out" / "preferences.jsonl")) == 2


def test_sides_and_order_depend_on_the_seed_alone(tmp_path):
    words = write_answers(tmp_path, prompts=200)
    tasks, _ = read_tasks(words, seed=3)
    again, _ = read_tasks(words[::-1], seed=3)
    other, _ = read_tasks(words, seed=4)
    assert tasks == again
    assert tasks != other
    assert set(tasks) == set(other)
    lefts = [task.left(3) for task in tasks]
    assert lefts == [task.left(3) for task in again]
    assert 70 < sum(lefts) < 130  # 4 standard deviations of 200 throws


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty"),
        ("{", ":1: it is no JSON"),
        ('{"prompt": "a", "txt": "b"}', ":1 has no text 'text'. Did you mean txt?"),
        ('{"prompt": "a", "text": 3}', ":1 has no text 'text'."),
        ('["a"]', ":1 has no text 'prompt'."),
        ('{"prompt": "a", "text": "\\ud800"}', ":1: "),
        ('{"prompt": "other", "text": "b"}', "no two have a prompt in common"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, told, capsys):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "text": "b"}\n')
    (tmp_path / "b.jsonl").write_text(content)
    words = [f"--answers=a={tmp_path / 'a.jsonl'}", f"b={tmp_path / 'b.jsonl'}"]
    assert main(["prefer", f"--output={tmp_path / 'out'}", "--answers", words[0][10:], words[1]]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) <= 10
    assert not (tmp_path / "out").exists()


def test_mistakes_on_the_command_line(tmp_path, capsys):
    file = f"a={tmp_path / 'a.jsonl'}"
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "text": "b"}\n')
    for words, told in (
        ([], "for two models or more, or --report"),
        (["--answers", file], "two or more models"),
        (["--answers", file, file], "names a twice"),
        (["--answers", file, "b"], "write NAME=FILE"),
        (["--answers", file, f"tie={tmp_path}"], "Take another name"),
        (["--answers", file, "b=/no/such"], "No such file"),
        (["--report"], "No such file"),
        (["--report", "--answers", file], "leave --answers out"),
    ):
        assert main(["prefer", f"--output={tmp_path / 'out'}", *words]) == 2
        assert told in capsys.readouterr().err


def vote(n, models, choice, left=None):
    return {
        "task": str(n),
        "prompt": "p",
        "models": list(models),
        "answers": ["x", "y"],
        "left": left or models[0],
        "choice": choice,
    }


def test_the_report(tmp_path, capsys):
    wanted = [*["tuned"] * 60, *["base"] * 30, *["tie"] * 10, *["skip"] * 5]
    (tmp_path / "votes.jsonl").write_text(
        "".join(json.dumps(vote(n, ("base", "tuned"), c)) + "\n" for n, c in enumerate(wanted))
    )
    assert main(["prefer", f"--output={tmp_path}", "--report"]) == 0
    shown = capsys.readouterr().out
    assert "100 choices, 5 skipped" in shown
    assert "35.0%   26.4%   44.7%     30    10    60  base over tuned" in shown
    assert "33.3%   24.5%   43.6%  the left answer preferred" in shown
    assert "Elo" not in shown


def test_the_interval_is_wilsons():
    """statsmodels' proportion_confint(method="wilson") gives these."""
    assert wilson(0.5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.161125), abs=1e-6)
    assert wilson(1.0, 20) == pytest.approx((0.838875, 1.0), abs=1e-6)


def test_strengths_of_several_models_are_those_that_made_the_choices():
    models, true = ["a", "b", "c"], np.array([150.0, 0.0, -150.0])
    found = []
    for one, other in ((0, 1), (0, 2), (1, 2)):
        wins = round(100_000 / (1 + 10 ** ((true[other] - true[one]) / 400)))
        found.append(Rate((models[one], models[other]), wins, 0, 100_000 - wins))
    assert strengths(found, models) == pytest.approx(true, abs=0.1)
    always = [Rate(("a", "b"), 9, 0, 0), Rate(("a", "c"), 9, 0, 0), Rate(("b", "c"), 9, 0, 0)]
    assert np.isfinite(strengths(always, models)).all()


def test_the_report_of_several_models(tmp_path, capsys):
    random = np.random.default_rng(0)
    pairs = [("good", "poor"), ("good", "fair"), ("fair", "poor")]
    votes = [vote(n, pairs[n % 3], pairs[n % 3][int(random.random() > 0.8)]) for n in range(150)]
    (tmp_path / "votes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in votes))
    assert main(["prefer", f"--output={tmp_path}", "--report"]) == 0
    shown = capsys.readouterr().out
    order = re.findall(r"^ +(-?\d+) +(-?\d+) +(-?\d+)  (\w+)$", shown, re.MULTILINE)
    assert [name for *_, name in order] == ["good", "fair", "poor"]
    for value, low, high, _ in order:
        assert int(low) <= int(value) <= int(high)
    assert len(rates(votes)) == 3


SETTLED = """
const done = arguments[arguments.length - 1];
const look = () => document.getElementById("count").textContent.startsWith(arguments[0]) &&
  !document.getElementById("message").textContent.startsWith("Loading") ? done(true) : setTimeout(look, 20);
look();
"""
TEXTS = "return ['prompt', 'left', 'right'].map(name => document.getElementById(name).textContent);"


@pytest.mark.ci
@pytest.mark.skipif(not browser.installed(), reason="needs chromium and chromedriver")
def test_in_a_browser(tmp_path):
    server = Comparing(tmp_path, write_answers(tmp_path))
    with browser.Browser() as page:
        page.open(server.url)
        page.wait_for(SETTLED, "0 of 6")
        prompt, left, right = page.run(TEXTS)
        state = server.ask()[2]
        assert (prompt, left, right) == (state["prompt"], state["left"], state["right"])
        assert HOSTILE in prompt  # as text
        assert page.run("return document.title") == "Which answer is better?"
        assert page.run("return document.querySelectorAll('img, main script').length") == 0
        if folder := os.environ.get("LEYDEN_PICTURES"):
            with open(f"{folder}/prefer.png", "wb") as file:
                file.write(page.picture())
        page.click("[data-choice=left]")
        page.wait_for(SETTLED, "1 of 6")
        page.press("2")
        page.wait_for(SETTLED, "2 of 6")
        page.press("u")
        page.wait_for(SETTLED, "1 of 6")
        for n, key in enumerate(("right", "3", "s", "left")):
            page.press(key)
            page.wait_for(SETTLED, f"{2 + n} of 6")
        page.press("tab")
        page.press("enter")  # what has the focus is a button, or an answer, which does nothing
        page.press("1")
        page.wait_for(SETTLED, "6 of 6")
        assert page.run("return document.getElementById('task').hidden")
        assert "All pairs are compared" in page.run("return document.getElementById('message').textContent")
        loaded = page.run(
            "return performance.getEntriesByType('resource').map(one => new URL(one.name).origin)"
        )
        assert set(loaded) == {f"http://127.0.0.1:{server.port}"}
        choices = [one["choice"] for one in read_votes(tmp_path / "compared").values()]
        server.end()
        page.press("u")  # the server is gone: it says so
        deadline = time.monotonic() + 30
        while "not stored" not in page.run("return document.getElementById('message').textContent"):
            assert time.monotonic() < deadline
    assert len(choices) == 6
    assert choices.count("tie") == choices.count("skip") == 1
    first = lines(tmp_path / "compared" / "preferences.jsonl")[0]
    assert (first["chosen"], first["rejected"]) == (left, right)
