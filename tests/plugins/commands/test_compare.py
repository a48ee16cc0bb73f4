"""`compare`: figures against closed forms, the picture's curves, and what the three files hold."""

import base64
import re
from copy import deepcopy
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest
import yaml

from core.__main__ import main
from plugins.commands.compare import difference_rows, read_runs, result_rows, seconds_at
from plugins.commands.compare_report import Curves, as_html, as_markdown, draw
from plugins.loggers.metrics_csv import MetricsCSV
from tests.conftest import TINY


@pytest.fixture
def make_run(tmp_path):
    """Writes a run folder as `fit` leaves it, with the logger that `fit` uses."""

    def make(name, rows, config=None):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        logger = MetricsCSV(str(folder))
        for step, figures in rows.items():
            logger.log_metrics(figures, step)
        logger.finalize("success")
        (folder / "config.yaml").write_text(yaml.safe_dump(config or {"seed_everything": 0}))
        return str(folder)

    return make


def figures(loss, tokens, rate=None, step_ms=None, val=None, gib=None):
    names = (
        "train/loss",
        "train/tokens",
        "throughput/tokens_per_second",
        "throughput/step_time_ms",
        "val/loss",
        "throughput/peak_memory_gib",
    )
    values = (loss, tokens, rate, step_ms, val, gib)
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


MEASURED = {
    10: figures(5.0, 1000.0, gib=3.25),
    20: figures(4.0, 2000.0, 100.0, 1000.0, val=4.5, gib=1.5),  # resumed: another process
    30: figures(3.0, 3000.0, 300.0, 3000.0),
    40: figures(2.0, 4000.0, 200.0, 2000.0, val=3.5),
}


def test_results_are_the_closed_forms(make_run):
    [run] = read_runs([make_run("a", MEASURED)])
    assert run.training.steps.tolist() == [10, 20, 30, 40]
    assert run.training.seconds.tolist() == [10, 20, 50, 70]  # the first interval as the one after it
    assert run.validation.tokens.tolist() == [2000, 4000]
    assert run.validation.seconds.tolist() == [20, 70]
    assert result_rows([run])[1] == (
        "a",
        "40",
        "4,000",
        "2.0000",
        "3.5000",
        "3.5000 (step 40)",
        "200",
        "3.25 GiB",
        "0:01:10",
    )


def test_the_training_loss_weighs_tokens_over_the_last_tenth(make_run):
    rows = {1: figures(9.0, 900.0), 2: figures(4.0, 910.0), 3: figures(2.0, 1000.0)}
    [run] = read_runs([make_run("a", rows)])
    assert result_rows([run])[1][3] == f"{(4.0 * 10 + 2.0 * 90) / 100:.4f}"


def test_validations_where_no_training_figure_was_logged(make_run):
    rows = {**MEASURED, 25: {"val/loss": 4.0}, 50: {"val/loss": 3.0}, 5: {"val/loss": 6.0}}
    [run] = read_runs([make_run("a", dict(sorted(rows.items())))])
    assert run.validation.steps.tolist() == [5, 20, 25, 40, 50]
    assert run.validation.tokens.tolist() == [500, 2000, 2500, 4000, 5000]
    np.testing.assert_allclose(run.validation.seconds, [5, 20, 35, 70, 87.5])
    assert result_rows([run])[1][5] == "3.0000 (step 50)"


@pytest.mark.parametrize(
    ("step_ms", "seconds"),
    [
        ([np.nan, 1000.0, np.nan, 3000.0], [10, 20, 50, 80]),  # resumed before the third
        ([1000.0, 2000.0, np.nan, np.nan], [10, 30, 50, 70]),
        ([np.nan] * 4, [np.nan] * 4),
    ],
)
def test_intervals_that_were_not_measured_count_as_their_neighbour(step_ms, seconds):
    steps = np.array([10, 20, 30, 40])
    np.testing.assert_allclose(seconds_at(steps, np.array(step_ms)), seconds)


def test_a_run_without_throughput_and_validation_has_a_curve_over_tokens(make_run, capsys, tmp_path):
    bare = {step: figures(float(9 - step), 100.0 * step) for step in range(1, 6)}
    names = [make_run("bare", bare), make_run("measured", MEASURED)]
    runs = read_runs(names)
    assert result_rows(runs)[1][4:] == ("-", "-", "-", "-", "-")
    training, over_time, *_ = draw(runs).axes
    assert len(training.lines) == 2
    finite = [line for line in over_time.lines if np.isfinite(line.get_xdata()).any()]
    assert [line.get_label() for line in finite] == ["measured (3.500)"]
    assert len(draw(runs[:1]).axes) == 1
    assert main(["compare", *names, "--output", str(tmp_path / "out")]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "No times, which the callback Throughput logs from the second logged step on: bare." in output


def test_the_picture_holds_the_curves_under_their_units(make_run):
    figure = draw(read_runs([make_run("a", MEASURED), make_run("b", MEASURED)]))
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == [
        "training loss (nats per token)",
        "validation loss (nats per token)",
    ]
    assert [axes.get_xlabel() for axes in figure.axes[2:]] == ["label tokens seen", "training time (s)"]
    lines = [[line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes]
    assert lines[0] == 2 * [[[1000, 5], [2000, 4], [3000, 3], [4000, 2]]]
    assert lines[1] == 2 * [[[10, 5], [20, 4], [50, 3], [70, 2]]]
    assert lines[2:] == [2 * [[[2000, 4.5], [4000, 3.5]]], 2 * [[[20, 4.5], [70, 3.5]]]]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a (3.500)", "b (3.500)"]
    assert len({line.get_color() for line in figure.axes[0].lines}) == 2


def test_a_long_curve_is_smoothed_and_losses_that_are_not_finite_are_left_out(make_run):
    generator = np.random.default_rng(0)
    losses = 3 + generator.normal(size=400)
    losses[17] = np.nan
    rows = {step: figures(loss, 10.0 * step) for step, loss in enumerate(losses, start=1)}
    raw, smooth = draw(read_runs([make_run("a", rows)])).axes[0].lines
    kept = losses[np.isfinite(losses)]
    np.testing.assert_array_equal(raw.get_ydata(), kept)
    middle = 200
    assert smooth.get_ydata()[middle] == pytest.approx(kept[middle - 9 : middle + 10].mean())
    assert smooth.get_ydata()[0] == kept[0]
    assert smooth.get_ydata()[-1] == pytest.approx(kept[-10:].mean())
    assert len(smooth.get_xdata()) == len(kept)


def test_the_first_losses_do_not_squeeze_the_rest(make_run):
    losses = {1: 90.0, 50: 5.0, 60: 6.0, 100: 3.0}
    rows = {step: figures(loss, 10.0 * step) for step, loss in losses.items()}
    axes = draw(read_runs([make_run("a", rows), make_run("b", MEASURED)])).axes[0]
    assert axes.get_ylim() == pytest.approx((2 - 0.03 * 4, 6 + 0.03 * 4))


def test_what_differs_is_told_for_all_runs(make_run):
    def config(lr, *callbacks):
        return {
            "trainer": {"callbacks": list(callbacks), "default_root_dir": f"runs/{lr}"},
            "model": {"optimizer": {"class_path": "AdamW", "init_args": {"lr": lr, "eps": 1e-8}}},
        }

    stop = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "01:00"}}
    runs = read_runs(
        [
            make_run("a", MEASURED, config(0.1, "Throughput", stop)),
            make_run("b", MEASURED, config(0.2, "Throughput")),
            make_run("c", MEASURED, config(0.1, "LossCurve", "Throughput")),
        ]
    )
    assert difference_rows(runs) == [
        ("", "a", "b", "c"),
        ("trainer.callbacks.LossCurve", "(absent)", "(absent)", "yes"),
        ("trainer.callbacks.Timer", "(duration=01:00)", "(absent)", "(absent)"),
        ("model.optimizer.lr", "0.1", "0.2", "0.1"),
    ]


class Collector(HTMLParser):
    """Takes an HTML file apart: cells of the tables, sources of pictures, tags that are open."""

    def __init__(self):
        super().__init__()
        self.cells, self.sources, self.open = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_html_needs_no_other_file_and_shows_names_as_they_are():
    results = [("run", "time"), ("<b>&|x", "1")]
    page = Collector()
    curves = Curves(results, [("", "x")], "notes < here", b"picture")
    page.feed(as_html(curves, None))
    assert page.cells == ["run", "time", "<b>&|x", "1"]
    assert page.open == []
    assert page.sources == ["data:image/png;base64," + base64.b64encode(b"picture").decode()]
    assert "\n| &lt;b>&\\|x | 1 |\n" in as_markdown(curves, None)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two real runs of 8 steps."""
    folder = tmp_path_factory.mktemp("real")
    config = deepcopy(TINY)
    config["trainer"] |= {"max_steps": 8, "val_check_interval": 4, "logger": ["MetricsCSV"]}
    config["trainer"]["callbacks"].append("Throughput")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it: restored afterwards
        for extra in ([], ["--model.optimizer.lr=0.1"]):
            assert main(["fit", "--config", "tiny.yaml", *extra]) == 0
    return folder / "runs"


@pytest.mark.ci
def test_two_real_runs(real, tmp_path, capsys):
    names = [str(real / "tiny"), str(real / "tiny-2")]
    assert main(["compare", *names, "--output", str(tmp_path / "a" / "b")]) == 0
    folder = tmp_path / "a" / "b"
    assert sorted(path.name for path in folder.iterdir()) == ["compare.html", "compare.md", "compare.png"]
    picture = matplotlib.image.imread(folder / "compare.png")
    assert picture.shape == (1170, 1680, 4)
    assert picture.std() > 0.05  # not blank
    encoded = re.search(r"base64,([\w+/=]+)", (folder / "compare.html").read_text())[1]
    assert base64.b64decode(encoded) == (folder / "compare.png").read_bytes()
    text = (folder / "compare.md").read_text()
    assert "| tiny | 8 | 512 |" in text
    assert "| model.optimizer.lr | 0.01 | 0.1 |" in text
    assert text.count("\n| ") == 5  # two tables: 3 and 2 rows
    runs = read_runs(names)
    assert all(run.timed and run.tokens_per_second > 0 for run in runs)
    assert "| memory |" in text
    assert "<th>memory</th>" in (folder / "compare.html").read_text()
    shown = re.findall(r"\| ([\d.]+) GiB \|", text)
    assert [float(gib) for gib in shown] == [pytest.approx(run.peak_memory_gib, abs=0.006) for run in runs]
    assert [run.validation.steps.tolist() for run in runs] == [[4, 8], [4, 8]]
    printed = capsys.readouterr().out
    assert "model.optimizer.lr  0.01  0.1" in printed
    assert f"Written: {folder}/compare.html, compare.md, compare.png" in printed


@pytest.mark.ci
def test_a_run_that_ended_before_its_first_logged_step_is_told_so(real, monkeypatch, capsys):
    monkeypatch.chdir(real.parent)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    brief = ["fit", "--config", "tiny.yaml", "--trainer.log_every_n_steps=50"]
    for folder, validations in (("validated", 4), ("silent", 0)):
        words = [f"--trainer.default_root_dir=brief/{folder}", f"--trainer.limit_val_batches={validations}"]
        assert main([*brief, *words]) == 0
        assert main(["compare", f"brief/{folder}"]) == 2
        output = capsys.readouterr().err
        assert "the run ended before its first logged step." in output
        assert "Its log_every_n_steps is 50 and its max_steps 8: train for longer" in output
        assert "add the logger" not in output


def test_runs_of_one_folder_name_are_told_apart(make_run):
    names = [make_run("x/run", MEASURED), make_run("y/run", MEASURED)]
    assert [run.name for run in read_runs(names)] == names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{tmp}/rum"], "There is no run folder {tmp}/rum. Did you mean {tmp}/run?"),
        (["{tmp}"], "{tmp} is no run, it holds 10: name one, such as {tmp}/backwards."),
        (["{tmp}/run", "{tmp}/x/../run"], "A run is given twice"),
        (["{tmp}/x"], "has no metrics.csv: add the logger MetricsCSV"),
        (["{tmp}/early"], "holds no train/loss"),
        (["{tmp}/foreign"], "is not as MetricsCSV writes it"),
        (["{tmp}/binary"], "is not as MetricsCSV writes it: 'utf-8' codec"),
        (["{tmp}/stepless"], "is not as MetricsCSV writes it: 'step'"),
        (["{tmp}/squared"], "is not as MetricsCSV writes it: could not convert string to float: '²'"),
        (["{tmp}/backwards"], "its steps do not rise"),
        (["{tmp}/shrinking"], "its train/tokens do not rise"),
        (["{tmp}/untrained"], "no row has both"),
        (["{tmp}/nul"], "is not as MetricsCSV writes it"),
        (["{tmp}/folder"], "has no metrics.csv"),
        (["x" * 300], "File name too long"),
        (["{tmp}/run/metrics.csv/x"], "There is no run folder"),
        (["{tmp}/run", "--output", "{tmp}/run/metrics.csv"], "cannot be written"),
        ([], "required: RUN_DIR"),
    ],
)
def test_what_cannot_be_compared_is_said(words, expected, make_run, tmp_path, capsys):
    make_run("run", MEASURED)
    (tmp_path / "x").mkdir()
    for name, text in {
        "early": "step,val/loss\n",
        "foreign": "step,train/loss,train/tokens\n1,a,2\n",
        "binary": b"\xff\x00\xfe\n",
        "stepless": "train/loss,train/tokens\n1,2\n",
        "squared": "step,train/loss,train/tokens\n²,1,2\n",
        "backwards": "step,train/loss,train/tokens\n2,1,2\n1,1,3\n",
        "shrinking": "step,train/loss,train/tokens\n1,1,2\n2,1,1\n",
        "untrained": "step,train/loss,train/tokens\n1,nan,nan\n",
        "nul": "step,train/loss,train/tokens\n1,\0,2\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "folder" / "metrics.csv").mkdir(parents=True)
    assert main(["compare", *(word.format(tmp=tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert expected.format(tmp=tmp_path) in error
    assert len(error.splitlines()) <= 10
