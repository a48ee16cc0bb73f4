# ruff: noqa: F811
"""The callback Evaluate, the command `evaluate`, and the part of `compare` on evaluations: one real run."""

import csv
import importlib.util
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml

from conformance.case import tiny, with_text
from conformance.runs import run
from conformance.workshop import text
from tests.support.cli_runs import core  # noqa: F401
from tests.support.harness_tasks import write_tasks


def overlay(**more):
    """Returns a configuration with evaluations on 30 of the run's documents."""
    reader = {"class_path": "TextDocuments", "init_args": {"source": str(text())}}
    documents = {"documents": reader, "max_documents": 30}
    sets = {
        "texts": {"class_path": "Perplexity", "init_args": documents},
        "sure": {"class_path": "Calibration", "init_args": documents},
        "samples": {"class_path": "SampleDiversity", "init_args": {"samples": 2, "max_new_tokens": 5}},
    }
    found = {"class_path": "Evaluate", "init_args": {"every_n_steps": 8, "evaluations": sets}}
    return {"trainer": {"callbacks": [found, *more.get("callbacks", [])], **more.get("trainer", {})}}


def config(**more):
    every = {"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": 8}}
    trainer = {"max_steps": 24, "logger": [{"class_path": "MetricsCSV"}], "plugins": [{"class_path": "AtomicCheckpoint"}],  "limit_val_batches": 0, **more}  # fmt: skip
    return with_text(tiny([overlay(callbacks=[every], trainer=trainer)]), {})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    values = config()
    values["trainer"]["default_root_dir"] = str(folder / "runs" / "one")
    (folder / "run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (folder / "evaluation.yaml").write_text(yaml.safe_dump(overlay(), sort_keys=False))
    done = run(["fit", "--config", str(folder / "run.yaml")], folder, cwd=folder)
    assert done.code == 0, done.stderr
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def results(folder, step):
    return json.loads((folder / f"step-{step:08d}" / "results.json").read_text())["sets"]


@pytest.mark.ci
def test_a_run_logs_figures_and_a_checkpoint_has_the_same(folder, core):
    run_folder = folder / "runs" / "one"
    with open(run_folder / "metrics.csv") as file:
        logged = {int(row["step"]): row for row in csv.DictReader(file)}
    done = core("evaluate", "--ckpt_path", run_folder / "checkpoints" / "step-00000016.ckpt", "--config",
                "evaluation.yaml", "--output", "out")  # fmt: skip
    assert done.code == 0, done.err
    found, stored = results(folder / "out", 16), results(run_folder / "evaluation", 16)
    assert found == stored  # to the last bit
    for name, one in found.items():
        assert one["items"] == (8 if name == "samples" else 30)
        for figure, (value, low, high) in one["figures"].items():
            assert float(logged[16][f"eval/{name}/{figure}"]) == value
            assert (
                name != "texts" or low <= value <= high
            )  # the calibration error of resampled items is larger
    assert [step for step, row in logged.items() if row["eval/texts/perplexity"]] == [8, 16, 24]
    [*_, last] = (run_folder / "evaluation").glob("step-*")
    lines = [json.loads(line) for line in (last / "texts.jsonl").read_text().splitlines()]
    total = {name: sum(line["sums"][name] for line in lines) for name in ("nats", "tokens")}
    losses = results(run_folder / "evaluation", int(last.name[5:]))["texts"]["figures"]["loss_nats_per_token"]
    assert losses[0] == pytest.approx(total["nats"] / total["tokens"], rel=1e-12)


class Pictures(HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources = []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]


def test_the_report_needs_no_other_file(folder):
    place = folder / "runs" / "one" / "evaluation"
    page = Pictures()
    page.feed((place / "report.html").read_text())
    assert len(page.sources) == 2  # over steps, calibration
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in page.sources)
    report = (place / "report.md").read_text()
    assert "Step 24, " in report
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", report):
        assert (place / picture).is_file()
    with open(place / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["step"] for row in rows} == {"8", "16", "24"}
    assert {"loss_nats_per_token", "bits_per_byte", "ece", "distinct_2"} <= {row["figure"] for row in rows}


def verdicts(out):
    return {
        tuple(line.split()[:2]): re.split(r"\s{2,}", line)[-1]
        for line in out.splitlines()
        if line[:5] == "texts"
    }


def test_the_same_network_does_not_differ_and_a_better_one_does(folder, core):
    checkpoints = folder / "runs" / "one" / "checkpoints"
    for name, step in (("a", 16), ("b", 16), ("c", 24)):
        path = checkpoints / f"step-{step:08d}.ckpt"
        done = core("evaluate", "--ckpt_path", path, "--config", "evaluation.yaml", "--output", f"runs/{name}/evaluation",
                    "--only", "texts", "--batch_size", {"a": 3}.get(name, 16))  # fmt: skip
        assert done.code == 0, done.err
    first, second = ("runs/a/evaluation/step-00000016", "runs/b/evaluation/step-00000016")
    done = core("compare", first, second, "--output", "compared")
    assert done.code == 0, done.err
    assert set(verdicts(done.out).values()) == {"no difference"}
    done = core("compare", first, "runs/c/evaluation/step-00000024", "--output", "compared")
    assert set(verdicts(done.out).values()) == {"lower"}
    assert "adjusted for the 3 comparisons" in " ".join(done.out.split())
    assert (folder / "compared" / "evaluations.png").read_bytes()[:4] == b"\x89PNG"
    assert "| lower |" in (folder / "compared" / "compare.md").read_text()


def test_runs_are_compared_with_their_curves_and_few_items_are_said_to_be_few(folder, core):
    shutil.copytree("runs/one", "runs/two")
    for path in Path("runs/two/evaluation/step-00000024").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for number, line in enumerate(lines):
            line["digest"] = line["digest"] if number < 4 else f"{number}"
            line["sums"] = (
                {name: value * 1.01 for name, value in line["sums"].items()}
                if "nats" in line["sums"]
                else line["sums"]
            )
            line["sums"] |= {"tokens": line["sums"]["tokens"] / 1.01} if "nats" in line["sums"] else {}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = core("compare", "runs/one", "runs/two")
    assert done.code == 0, done.err
    assert verdicts(done.out)["texts", "loss_nats_per_token"] == "too few items"
    assert "texts: two is compared over the 4 items that both have" in " ".join(done.out.split())
    page = Path("runs/compare/compare.html").read_text()
    assert page.count("data:image/png;base64,") == 2


@pytest.mark.ci
def test_a_difference_shows_among_many_comparisons(folder, core):
    """A p-value of 1,000 resamples is at least 1/1,001, which 55 comparisons adjust to 0.055."""
    others = [f"runs/{name}" for name in "abcde"]
    for name in others:
        shutil.copytree("runs/one/evaluation", f"{name}/evaluation")
    last = [f"{name}/evaluation/step-00000024" for name in others]
    done = core("compare", "runs/one/evaluation/step-00000008", *last, "--output", "compared")
    assert done.code == 0, done.err
    assert "adjusted for the 55 comparisons" in " ".join(done.out.split())
    assert set(verdicts(done.out).values()) == {"lower"}


def test_sums_that_no_evaluation_writes_are_a_mistake(folder, core):
    shutil.copytree("runs/one", "runs/odd")
    for name in ("one", "odd"):
        path = Path(f"runs/{name}/evaluation/step-00000024/texts.jsonl")
        results_file = path.with_name("results.json")
        kind = "plugins.evaluations.needle_in_haystack.NeedleInHaystack"
        results_file.write_text(
            results_file.read_text().replace("plugins.evaluations.perplexity.Perplexity", kind)
        )
        path.write_text(path.read_text().replace('"nats"', '"needles_at_<b>": 1, "needles"'))
    done = core("compare", "runs/one", "runs/odd")
    assert (done.code, "the sums of its items are not as Evaluate writes them" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "quickstart"], ["there are no evaluations", "techniques/perplexity"]),
        (["--config", "evaluation.yaml", "--only", "text"], ["no such evaluation", "texts"]),
        (["--config", "wrong.yaml"], ["Perplexty", "Perplexity"]),
        (["--config", "bad_name.yaml"], ["'a/b' cannot be a name"]),
        (["--config", "nothing.yaml"], ["nowhere.jsonl"]),
        (["--config", "number.yaml"], ["there are no evaluations"]),
        (
            ["--config", "evaluation.yaml", "--trainer.devices=2", "--dtype", "bfloat16"],
            ["--trainer.precision"],
        ),
        (["--config", "evaluation.yaml", "--trainer.device=2"], ["'device'", "devices"]),
        (["--config", "evaluation.yaml", "--trainer.strategy=FSDQ"], ["FSDQ", "fsdp"]),
    ],
)
def test_a_mistake_is_explained_and_nothing_is_written(folder, core, words, said):
    for name, old, new in (("wrong", "Perplexity", "Perplexty"), ("bad_name", "texts:", "a/b:"),
                           ("nothing", str(text()), "nowhere.jsonl")):  # fmt: skip
        Path(f"{name}.yaml").write_text(Path("evaluation.yaml").read_text().replace(old, new))
    Path("number.yaml").write_text("trainer: {callbacks: [{class_path: Evaluate, init_args: 3}]}")
    done = core("evaluate", "--ckpt_path", "runs/one", *words, "--output", "out")
    assert done.code == 2
    assert "# " not in done.err  # nothing was measured
    assert len(done.err.splitlines()) <= 10
    assert all(word in done.err for word in said), done.err
    assert not Path("out").exists()


@pytest.mark.ci
def test_what_the_run_evaluated_at_the_step_stays(folder, core):
    place = folder / "runs" / "one" / "evaluation"
    before, pages = results(place, 24), (place / "report.html").read_text().count("data:image/png")
    stored = (place / "step-00000024" / "sure.jsonl").read_text()
    values = yaml.safe_load(Path("evaluation.yaml").read_text())
    [callback] = values["trainer"]["callbacks"]
    texts = callback["init_args"]["evaluations"].pop("texts")
    callback["init_args"]["evaluations"] = {"further": texts}
    Path("further.yaml").write_text(yaml.safe_dump(values))
    for _ in range(2):
        done = core("evaluate", "--ckpt_path", "runs/one", "--config", "further.yaml")
        assert done.code == 0, done.err
    after = results(place, 24)
    assert after.pop("further") == before["texts"]
    assert after == before
    assert (place / "step-00000024" / "sure.jsonl").read_text() == stored
    assert (place / "report.html").read_text().count("data:image/png") == pages
    done = core("evaluate", "--ckpt_path", "runs/one/checkpoints/step-00000024.ckpt", "--config", "further.yaml",
                "--output", "out")  # fmt: skip
    assert results(folder / "out", 24).keys() == {"further"}
    (place / "step-00000024" / "results.json").write_text("{")
    done = core("evaluate", "--ckpt_path", "runs/one", "--config", "further.yaml")
    assert (done.code, "Evaluate again" in done.err, "# further" in done.err) == (2, True, False)


def test_options_of_the_trainer_measure_whatever_is_validated(folder, core):
    words = ["evaluate", "--ckpt_path", "runs/one", "--config", "evaluation.yaml", "--only", "texts"]
    assert core(*words, "--output", "plain").code == 0
    done = core(*words, "--output", "out", "--trainer.devices=1", "--trainer.limit_val_batches=0")
    assert done.code == 0, done.err
    assert results(folder / "out", 24) == results(folder / "plain", 24)


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["FSDP"], id="items are shared"),
        pytest.param(
            ["HybridParallel", "--trainer.strategy.tensor=2", "--trainer.strategy.data_shard=1"],
            id="the network is sharded",
        ),
        pytest.param(
            ["HybridParallel", "--trainer.strategy.context=2"], id="tokens are shared", marks=pytest.mark.ci
        ),
        pytest.param(
            ["DeepSpeedZero", "--trainer.strategy.stage=3"], id="rows are shared", marks=pytest.mark.slow
        ),
    ],
)
def test_two_ranks_give_the_figures_of_one_process(folder, core, words):
    values = yaml.safe_load(Path("evaluation.yaml").read_text())
    if importlib.util.find_spec("lm_eval"):
        harness = {"folder": str(write_tasks(folder / "tasks")), "limit": 3}
        sets = values["trainer"]["callbacks"][0]["init_args"]["evaluations"]
        sets["harness"] = {"class_path": "LMEvalHarness", "init_args": harness}
        Path("evaluation.yaml").write_text(yaml.safe_dump(values))
    words = ["evaluate", "--ckpt_path", "runs/one", "--config", "evaluation.yaml", "--trainer.devices=2", "--trainer.strategy", *words]  # fmt: skip
    assert core(*words[:5], "--output", "one").code == 0
    done = run([*words, "--output", "two"], folder / "out", ranks=2, cwd=folder)
    assert done.codes == (0, 0), done.error_text
    alone, both = results(folder / "one", 24), results(folder / "two", 24)
    assert both.keys() == alone.keys()
    for name, one in alone.items():
        expected = torch.tensor(list(one["figures"].values()), dtype=torch.float64)
        found = torch.tensor(list(both[name]["figures"].values()), dtype=torch.float64)
        # sums of a sharded matrix are rounded elsewhere, which an exponential of 20 nats makes larger; samples differ by nothing
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    rows = [(folder / place / "step-00000024" / "samples.jsonl").read_text() for place in ("one", "two")]
    assert rows[0] == rows[1]
    assert "perplexity" in done.stdout
    assert sorted(Path("runs").iterdir()) == [Path("runs/one")]
