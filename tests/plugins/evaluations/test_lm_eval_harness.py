"""lm-eval's tasks on our networks: the numbers of lm-eval's own model on the exported network, and task folders as data."""

import json
import math
import os

import pytest
import torch

from core.__main__ import main
from core.errors import ConfigError
from tests.support.harness_tasks import TASKS, write_tasks
from tests.support.stored_networks import FAMILIES, lively_network, store, tokenizer_json
from toolkit.evaluation import EvaluatedModel
from toolkit.evaluation_results import evaluate

pytest.importorskip("lm_eval")

from plugins.evaluations.harness_model import HarnessModel
from plugins.evaluations.lm_eval_harness import LMEvalHarness


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("harness") / "tasks")


@pytest.fixture(autouse=True)
def data_sets_are_kept_here(tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def small_model(family="Llama"):
    kind, arguments = FAMILIES[family]
    return EvaluatedModel(lively_network(kind, arguments).eval(), tokenizer_json(), 0, [0], batch_size=5)


def measured(folder, model, **arguments):
    with torch.no_grad():
        return evaluate("harness", LMEvalHarness(str(folder), **arguments), model)


@pytest.mark.ci
def test_requests_and_figures_are_those_of_lm_evals_own_model_on_the_export(folder, tmp_path, monkeypatch):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = small_model()
    path = store(model.network, FAMILIES["Llama"][1], tmp_path / "net.ckpt")
    exported = str(tmp_path / "hf")
    assert main(["export", "--ckpt_path", str(path), "--output", exported]) == 0
    monkeypatch.chdir(folder)  # where lm-eval looks for data files
    theirs = lm_eval.simple_evaluate(
        # its cache of logits takes the first tokens of a continuation for the last ones of a shorter one
        HFLM(exported, tokenizer=exported, device="cpu", batch_size=3, logits_cache=False),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    harness, compared = HarnessModel(model), 0
    for name, samples in theirs["samples"].items():
        for sample in samples:
            arguments = [tuple(one) for one in sample["arguments"]]
            with torch.no_grad():
                own = {
                    "choice": harness.loglikelihood,
                    "last_word": harness.loglikelihood,
                    "whole": harness.loglikelihood_rolling,
                    "written": lambda some: harness.generate_until(some, [0] * len(some)),
                }[name](arguments)
            for ours, [other] in zip(own, sample["resps"], strict=True):
                if name == "written":
                    assert ours == other
                else:
                    values = (ours, other) if name == "whole" else (ours[0], other[0])
                    assert values[0] == pytest.approx(
                        values[1], abs=1e-5, rel=1e-6
                    )  # theirs are sums in float32
                    assert name == "whole" or ours[1] == other[1]
                compared += 1
    assert compared == 6 * (4 + 1 + 1 + 1)

    found = measured(folder, model)
    for task, metric in [
        ("choice", "acc"),
        ("choice", "acc_norm"),
        ("last_word", "perplexity"),
        ("whole", "word_perplexity"),
        ("whole", "bits_per_byte"),
        ("written", "exact_match"),
    ]:
        assert found.groups[task][metric].value == pytest.approx(
            theirs["results"][task][f"{metric},none"], rel=1e-6
        )


def test_figures_of_a_choice_are_those_of_the_whole_forward(folder):
    """Worked out here from the logits of each text alone, in float64, without lm-eval's tasks."""
    model = small_model("GPT")
    found = measured(folder, model, tasks=["choice"], num_fewshot=0)
    items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    right = 0
    for item in items:
        values = []
        for choice in item["choices"]:
            before = model.encode([item["question"]])[0]
            ids = torch.tensor(model.encode([f"{item['question']} {choice}"])[0])
            with torch.no_grad():
                logits = model.network.logits(model.network({"input_ids": ids[None, :-1]}))[0].double()
            logs = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
            values.append(float(logs[len(before) - 1 :].sum()))
        right += values.index(max(values)) == item["answer"]
    assert found.figures["acc"].value == right / len(items)
    assert (found.items, list(found.groups)) == (6, [])


def test_filters_repeats_and_what_is_no_mean(tmp_path, capsys):
    filtered = (
        TASKS["written"]
        .replace("task: written", "task: filtered")
        .replace("max_gen_toks: 12", "max_gen_toks: 4, do_sample: true")
        + "  - {metric: bleu, aggregation: bleu, higher_is_better: true}\n"
        + "repeats: 2\nfilter_list:\n  - {name: first, filter: [{function: take_first}]}\n"
        + "  - {name: letter, filter: [{function: regex, regex_pattern: '([a-z])'}, {function: take_first}]}\n"
    )
    with pytest.warns(UserWarning, match="filtered: bleu is no mean over documents: left out"):
        found = measured(
            write_tasks(tmp_path / "tasks", filtered=filtered), small_model(), tasks=["filtered"]
        )
    assert set(found.figures) == {"exact_match/first", "exact_match/letter"}
    assert all(len(row["answers"][0]) == 2 for row in found.rows)
    assert any(one != other for row in found.rows for one, other in row["answers"])  # drawn with other seeds


def test_groups_and_what_files_include(tmp_path):
    common = TASKS["last_word"].replace("task: last_word\n", "")
    folder = write_tasks(
        tmp_path / "tasks",
        words="include: shared/common\ntask: words\ntag: short\nnum_fewshot: 0\n",
        both="group: both\ntask: [words, choice]\n",
    )
    (folder / "shared").mkdir()
    (folder / "shared" / "common").write_text(common)
    model = small_model()
    assert set(measured(folder, model, tasks=["both"]).groups) == {"choice", "words"}
    assert {item.group for item in LMEvalHarness(str(folder), ["short"], limit=1).items(model)} == {"words"}


REFUSED = {
    "!function": ('doc_to_text: "{{question}}"', "doc_to_text: !function helper.text"),
    "`class`": ("output_type:", "class: helper.Task\noutput_type:"),
    "__class__": ("{{question}}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "'someone/corpus'": ("dataset_path: json", "dataset_path: someone/corpus"),
    "'pandas'": ("dataset_path: json", "dataset_path: pandas"),
    "'cache_dir'": ("data_files:", "cache_dir: /elsewhere, data_files:"),
    "files elsewhere": ("test: items.jsonl", "test: 'https://example.org/items.jsonl'"),
    "'acd'. Did you mean acc": ("metric: acc", "metric: acd"),
    "no YAML": ("task:", "task: ["),
    "no path inside the folder": ("task:", "include: ../../other.yaml\ntask:"),
}


@pytest.mark.parametrize("word", REFUSED)
def test_a_task_folder_is_data(word, tmp_path):
    folder = write_tasks(tmp_path / "tasks", last_word=TASKS["last_word"].replace(*REFUSED[word]))
    (folder / "helper.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ntext = str\nTask = object\n")
    with pytest.raises(ConfigError) as caught:
        LMEvalHarness(str(folder)).items(small_model())
    assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 10
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_the_user_trusts_may_run_code(tmp_path, monkeypatch):
    lines = TASKS["last_word"].replace('doc_to_text: "{{question}}"', "doc_to_text: !function helper.text")
    folder = write_tasks(tmp_path / "mine", last_word=lines)
    (folder / "helper.py").write_text("def text(doc):\n    return doc['question'].upper()\n")
    monkeypatch.setenv("LEYDEN_TRUST", "other,mine")
    items = LMEvalHarness(str(folder), ["last_word"]).items(small_model())
    assert items[0].content == [["loglikelihood", "THE CAT SAT", " a"]]


def test_mistakes_of_the_user(folder):
    with pytest.raises(ConfigError, match=r"no task 'chioce' in .* Did you mean choice"):
        LMEvalHarness(str(folder), ["chioce"]).items(small_model())
    with pytest.raises(ConfigError, match="no folder nowhere"):
        LMEvalHarness("nowhere").items(small_model())
    for arguments in ({}, {"folder": "tasks", "limit": 0}, {"folder": "tasks", "num_fewshot": -1}):
        with pytest.raises(ConfigError):
            LMEvalHarness(**arguments)
    with pytest.raises(ConfigError, match="no token that begins or ends a text"):
        LMEvalHarness(str(folder)).items(EvaluatedModel(small_model().network, tokenizer_json()))
    long = write_tasks(folder.parent / "long", written=TASKS["written"].replace("12", "64"))
    with pytest.raises(ConfigError, match="Lower max_gen_toks"):
        measured(long, small_model(), tasks=["written"])


def test_the_command_evaluates_a_checkpoint(folder, tmp_path, capsys):
    kind, arguments = FAMILIES["GPT"]
    path = store(lively_network(kind, arguments), arguments, tmp_path / "net.ckpt")
    config = tmp_path / "harness.yaml"
    config.write_text(
        "trainer:\n  callbacks:\n    - class_path: Evaluate\n      init_args:\n        evaluations:\n"
        f"          harness: {{class_path: LMEvalHarness, init_args: {{folder: {folder}, limit: 3}}}}\n"
    )
    assert (
        main(
            ["evaluate", "--ckpt_path", str(path), "--config", str(config), "--output", str(tmp_path / "out")]
        )
        == 0
    )
    found = json.loads((tmp_path / "out/step-00000007/results.json").read_text())["sets"]["harness"]
    expected = measured(folder, small_model("GPT"), limit=3)
    assert found["items"] == 12
    assert math.isclose(
        found["figures"]["bits_per_byte"][0], expected.figures["bits_per_byte"].value, rel_tol=1e-6
    )
    assert os.listdir(tmp_path / "out/step-00000007").count("harness.jsonl") == 1
