"""Evaluate: closed form, what it leaves alone, failures. What it writes: tests/plugins/commands/test_evaluate_command.py."""

import json

import pytest
import torch
import torch.nn.functional as F

from callbacks.evaluate import Evaluate
from core.errors import ConfigError
from datamodules.preparation.readers.text_documents import TextDocuments
from plugins.evaluations.perplexity import Perplexity
from toolkit.evaluation import Evaluation, Item

TEXT = "What is measured is the loss of this text. " * 3


class Failing(Evaluation):
    def items(self, model):
        return [Item("one", 1)]

    def measure(self, model, items):
        torch.rand(1)  # the run's generators are put back
        raise ConfigError("it cannot be measured")

    @staticmethod
    def figures(sums):
        return {}


@pytest.fixture
def perplexity(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text(TEXT)
    return Perplexity(TextDocuments(str(tmp_path / "texts")), window=1000)


def test_the_loss_is_that_of_the_network_and_a_failure_ends_nothing(fit, tmp_path, perplexity, capsys):
    evaluate = Evaluate({"text": perplexity, "failing": Failing()}, every_n_steps=4)
    done = fit(tmp_path, [evaluate], max_steps=10, limit_val_batches=0)
    network = done.module.network.eval()
    ids = torch.tensor([256, *perplexity_ids(done.trainer.datamodule)])
    with torch.no_grad():
        logits = network.logits(network({"input_ids": ids[None, :-1]}))[0].double()
    folder = tmp_path / "evaluation"
    assert [path.name for path in sorted(folder.glob("step-*"))] == [f"step-{n:08d}" for n in (4, 8, 10)]
    found = json.loads((folder / "step-00000010" / "results.json").read_text())["sets"]
    assert list(found) == ["text"]
    [loss, low, high] = found["text"]["figures"]["loss_nats_per_token"]
    # each log-probability is rounded to float32
    assert loss == pytest.approx(float(F.cross_entropy(logits, ids[1:])), rel=1e-6)
    assert low is high is None  # of a single document
    assert done.trainer.callback_metrics["eval/text/loss_nats_per_token"] == loss
    assert capsys.readouterr().err.count("evaluation failing: it cannot be measured") == 3


def perplexity_ids(data):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(data.tokenizer_json).encode(TEXT).ids


def test_the_trained_weights_are_bitwise_those_of_a_run_without(fit, tmp_path, perplexity):
    options = {"max_steps": 8, "limit_val_batches": 0}
    runs = [
        fit(tmp_path, callbacks, **options)
        for callbacks in ([Evaluate({"text": perplexity, "failing": Failing()}, every_n_steps=2)], [])
    ]
    for one, other in zip(*(run.module.parameters() for run in runs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"evaluations": {}}, "evaluations is empty"),
        ({"evaluations": {"../x": Failing()}}, "'../x' cannot be a name"),
        ({"evaluations": {"x": Failing()}, "every_n_steps": 0}, "every_n_steps must be at least 1"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        Evaluate(**arguments)


def test_a_mistake_shows_before_training(fit, tmp_path, perplexity):
    perplexity.group_by = "domain"
    with pytest.raises(
        ConfigError, match=r"evaluation text: Perplexity.group_by: the documents have no 'domain'"
    ):
        fit(tmp_path, [Evaluate({"text": perplexity})], max_steps=2, limit_val_batches=0)
