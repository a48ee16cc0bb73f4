"""Classes of texts: transformers' losses, exact figures over batches and ranks, refusals."""

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.functional import classification

from core.contracts import TokenSum
from core.errors import ConfigError
from core.training.token_sums import TokenSums
from plugins.checkpoints.initial_weights import InitialWeights
from plugins.networks.bert import BERT
from plugins.networks.llama import Llama
from plugins.objectives.balanced_routing import BalancedRouting
from plugins.objectives.sequence_classification import SequenceClassification
from tests.support.reference_models import both, lively, tokens
from tests.support.same_run import TOLERANCE, differences, fit, one_process
from tests.support.small_networks import DENSE
from tests.support.stored_networks import store

NAMES = ["bad", "fair", "good"]
LENGTHS = (50, 31, 12, 1)


def texts(position="last", rows=4, seed=0):
    """Returns padded texts with a class at one token of each, and for transformers ids and mask."""
    ids = tokens(rows, 50, seed=seed)
    lengths = torch.tensor([LENGTHS[row % 4] for row in range(rows)])
    places = torch.arange(50).expand(rows, 50)
    inside = places < lengths[:, None]
    classes = torch.randint(len(NAMES), (rows,), generator=torch.Generator().manual_seed(seed))
    labels = torch.full_like(ids, -100)
    at = torch.zeros(rows, dtype=torch.int64) if position == "first" else lengths - 1
    labels[torch.arange(rows), at] = classes
    batch = {"input_ids": ids.masked_fill(~inside, 0), "labels": labels, "document_ids": torch.where(inside, 0, -1)}  # fmt: skip
    batch["position_ids"] = torch.where(inside, places, 0)
    return batch, classes, at


def prepared(network, **options):
    objective = SequenceClassification(NAMES, **options)
    objective.change_network(network)
    return lively(objective, seed=1)


def test_the_loss_of_a_decoder_is_that_of_transformers():
    from transformers import LlamaForSequenceClassification

    network, reference = both(Llama, DENSE)
    objective = prepared(network)
    with torch.no_grad():
        objective.head.output.bias.zero_()
    batch, classes, _ = texts()
    reference.config.num_labels = len(NAMES)
    theirs = LlamaForSequenceClassification(reference.config).eval()
    theirs.model.load_state_dict(reference.model.state_dict(), strict=True)
    theirs.score.weight = objective.head.output.weight
    expected = []
    for row in range(4):  # each alone: without padding the last token is the label's
        one = theirs(
            input_ids=batch["input_ids"][row : row + 1, : LENGTHS[row]], labels=classes[row : row + 1]
        )
        expected.append(one.loss)
    loss, figures = objective.loss(network, batch)
    assert loss.mean.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-6)
    assert (int(loss.tokens), float(loss.weight)) == (4, 4.0)
    assert "accuracy" in figures


@pytest.mark.parametrize("several", [False, True])
def test_the_loss_of_an_encoder_with_a_pooler_is_that_of_transformers(several):
    from transformers import BertForSequenceClassification

    sizes = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32, "max_sequence_length": 64, "intermediate_size": 48}  # fmt: skip
    with_head, reference = both(BERT, sizes)
    network = BERT(**sizes, head=False).eval()
    network.load_state_dict({k: v for k, v in with_head.state_dict().items() if not k.startswith("head.")})
    objective = prepared(network, pooler=True, several=several)
    reference.config.num_labels = len(NAMES)
    reference.config.problem_type = "multi_label_classification" if several else "single_label_classification"
    theirs = BertForSequenceClassification(reference.config).eval()
    theirs.bert.load_state_dict(reference.bert.state_dict(), strict=False)
    theirs.bert.pooler.dense.load_state_dict(objective.head.pooler.state_dict())
    theirs.classifier.load_state_dict(objective.head.output.state_dict())
    batch, classes, at = texts("first")
    wanted = classes
    if several:
        wanted = torch.randint(2, (4, 3), generator=torch.Generator().manual_seed(5)).float()
        batch["targets"] = torch.zeros(4, 50, 3)
        batch["targets"][torch.arange(4), at] = wanted
        batch["labels"] = batch["labels"].clamp(max=0)
    mask = (batch["document_ids"] == 0).long()
    expected = theirs(input_ids=batch["input_ids"], attention_mask=mask, labels=wanted)
    loss, _ = objective.loss(network, batch)
    assert loss.mean.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    found = objective.predict(network, batch)
    if several:
        assert [[name in one["prediction"] for name in NAMES] for one in found] == (expected.logits > 0).tolist()  # fmt: skip
    else:
        assert [one["prediction"] for one in found] == [NAMES[k] for k in expected.logits.argmax(1)]
        chances = expected.logits.softmax(1).amax(1).tolist()
        assert [one["probability"] for one in found] == pytest.approx(chances, rel=1e-5)


def test_weights_of_classes_are_those_of_torchs_cross_entropy():
    network = lively(Llama(**DENSE))
    objective, (batch, classes, at) = prepared(network), texts()
    table = torch.tensor([0.5, 1.0, 3.0])
    batch["weights"] = torch.zeros(4, 50)
    batch["weights"][torch.arange(4), at] = table[classes]
    loss, _ = objective.loss(network, batch)
    scores = objective.scores(network, batch)[torch.arange(4), at]
    assert loss.mean.item() == pytest.approx(F.cross_entropy(scores, classes, weight=table).item(), rel=1e-6)
    assert loss.weight.item() == pytest.approx(table[classes].sum().item())


@pytest.mark.parametrize("several", [False, True])
def test_accuracy_and_macro_f1_over_batches_are_those_of_torchmetrics(several):
    network = lively(Llama(**DENSE))
    names = [*NAMES, "never"]
    objective = SequenceClassification(names, several=several)
    objective.change_network(network)
    lively(objective, seed=1)
    with torch.no_grad():
        objective.head.output.bias[3] = -1e4
    sums, found, wanted = TokenSums(), [], []
    around = BalancedRouting(objective).eval()  # whose figures are those of what is within it
    for seed in range(5):
        batch, classes, at = texts(rows=3 + seed, seed=seed)
        here = torch.arange(len(at)), at
        if several:
            classes = torch.randint(2, (len(at), 4), generator=torch.Generator().manual_seed(seed))
            classes[:, 3] = 0
            batch["targets"] = torch.zeros(*batch["labels"].shape, 4)
            batch["targets"][here] = classes.float()
            batch["labels"] = batch["labels"].clamp(max=0)
        with torch.no_grad():
            loss, figures = around.loss(network, batch)
            scores = objective.scores(network, batch)[here]
        sums.add({"loss": loss, **figures})
        found += (scores > 0).long().tolist() if several else scores.argmax(1).tolist()
        wanted += classes.tolist()
    means, count = sums.means(lambda values: values)
    summary = around.summary(means)
    found, wanted = torch.tensor(found), torch.tensor(wanted)
    if several:  # torchmetrics counts a class that is nowhere as 0 there
        accuracy = classification.multilabel_exact_match(found, wanted, 4)
        f1 = classification.multilabel_f1_score(found[:, :3], wanted[:, :3], 3)
    else:
        accuracy = classification.multiclass_accuracy(found, wanted, 4, average="micro")
        f1 = classification.multiclass_f1_score(found, wanted, 4)
    assert count == len(found)
    assert summary["accuracy"] == pytest.approx(accuracy.item(), rel=1e-6)  # theirs are float32
    assert summary["macro_f1"] == pytest.approx(f1.item(), rel=1e-6)
    assert set(summary) == {"loss", "accuracy", "macro_f1"}


def test_classes_are_those_of_the_data():
    objective = SequenceClassification()
    with pytest.raises(ConfigError, match="does not know the classes"):
        objective.change_network(Llama(**DENSE))
    objective.take_labels(NAMES)
    objective.take_labels(NAMES)
    assert objective.outputs == 3
    with pytest.raises(ConfigError, match="has the classes bad, fair, good, and the data have good, bad"):
        objective.take_labels(["good", "bad"])
    for labels in ([], ["a"], ["a", "a"]):
        with pytest.raises(ConfigError, match="two or more different classes"):
            SequenceClassification(labels)
    with pytest.raises(ConfigError, match="dropout from 0 to below 1, not 1"):
        SequenceClassification(dropout=1.0)
    network = lively(Llama(**DENSE))
    with pytest.raises(ConfigError, match="several=true is for batches with targets"):
        prepared(network, several=True).loss(network, texts()[0])
    with pytest.raises(ConfigError, match="no head"):
        SequenceClassification(NAMES).loss(network, texts()[0])


def test_a_batch_without_labels_has_no_sums():
    network = lively(Llama(**DENSE))
    batch, _, _ = texts()
    batch["labels"].fill_(-100)
    loss, figures = prepared(network).loss(network, batch)
    assert all(one.total == 0 and one.tokens == 0 for one in (loss, *figures.values()))
    assert isinstance(loss, TokenSum)


OVERLAY = {
    "data": {"class_path": "tests.support.uneven.UnevenAnswers"},
    "model": {
        "network": {"init_args": {"tie_embeddings": False}},
        "objective": {
            "class_path": "SequenceClassification",
            "init_args": {"labels": [str(n) for n in range(64)]},
        },
    },
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy",
    [{"class_path": "DDP"}, {"class_path": "FSDP"}, {"class_path": "HybridParallel", "init_args": {"tensor": 2}}],
    ids=lambda one: one["class_path"],
)  # fmt: skip
def test_it_trains_on_ranks_as_in_one_process(strategy):
    expected = one_process(OVERLAY)
    assert "objective.head.output.weight" in expected.checkpoint()["state_dict"]
    found = fit({**OVERLAY, "trainer": {"strategy": strategy}}, 2)
    apart = differences(found, expected)
    assert max(apart.values()) < TOLERANCE, apart
    one, other = (max(run.record["figures"].items())[1] for run in (found, expected))
    assert one["val/macro_f1"] == pytest.approx(other["val/macro_f1"], abs=1e-12)


@pytest.mark.parametrize("ours", [False, True])
def test_it_starts_from_an_encoder_that_predicts_masked_tokens(ours, tmp_path):
    sizes = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32, "max_sequence_length": 64, "intermediate_size": 48}  # fmt: skip
    with_head, reference = both(BERT, sizes)
    path = tmp_path / "bert"
    if ours:
        store(with_head, sizes, path := tmp_path / "masked.ckpt")
    else:
        reference.save_pretrained(path)
    network = BERT(**sizes, head=False)
    InitialWeights(str(path)).change_network(network)
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, with_head.state_dict()[name])
