"""Numbers of texts: transformers' loss, and a correlation that is exact over batches."""

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from core.training.token_sums import TokenSums
from plugins.networks.llama import Llama
from plugins.objectives.regression import Regression
from tests.support.reference_models import both, lively, tokens
from tests.support.small_networks import DENSE


def texts(seed, rows=4, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": tokens(rows, 30, seed=seed)}
    batch["labels"] = torch.full((rows, 30), -100)
    batch["labels"][:, -1] = 0
    batch["targets"] = torch.zeros(rows, 30)
    batch["targets"][:, -1] = torch.randn(rows, generator=generator) + offset
    return batch


def test_the_loss_is_that_of_transformers():
    from transformers import LlamaForSequenceClassification

    network, reference = both(Llama, DENSE)
    objective = Regression()
    objective.change_network(network)
    lively(objective, seed=1)
    with torch.no_grad():
        objective.head.output.bias.zero_()
    reference.config.num_labels, reference.config.problem_type = 1, "regression"
    theirs = LlamaForSequenceClassification(reference.config).eval()
    theirs.model.load_state_dict(reference.model.state_dict())
    theirs.score.weight = objective.head.output.weight
    batch = texts(0)
    ones = [
        theirs(input_ids=batch["input_ids"][row : row + 1], labels=batch["targets"][row, -1:])
        for row in range(4)
    ]
    expected = torch.stack([one.loss for one in ones]).mean()
    assert objective.loss(network, batch)[0].mean.item() == pytest.approx(expected.item(), rel=1e-6)
    found = [one["prediction"] for one in objective.predict(network, batch)]
    assert found == pytest.approx([one.logits.item() for one in ones], rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_the_correlation_over_batches_is_numpys(offset):
    network = lively(Llama(**DENSE))
    objective = Regression()
    objective.change_network(network)
    lively(objective, seed=1).eval()
    sums, pairs = TokenSums(), []
    for seed in range(5):
        batch = texts(seed, rows=2 + seed, offset=offset)
        with torch.no_grad():
            loss, figures = objective.loss(network, batch)
            found = objective.scores(network, batch)[:, -1, 0]
        sums.add({"loss": loss, **figures})
        pairs += zip(found.tolist(), batch["targets"][:, -1].tolist(), strict=True)
    summary = objective.summary(sums.means(lambda values: values)[0])
    predicted, wanted = np.array(pairs).T
    # float64 of squares around offset^2: what cancels leaves 1e-16 offset^2 of a variance of 1
    assert summary["pearson"] == pytest.approx(np.corrcoef(predicted, wanted)[0, 1], abs=1e-8)
    assert summary["loss"] == pytest.approx(((predicted - wanted) ** 2).mean(), rel=1e-6)
    assert set(summary) == {"loss", "pearson"}
    assert objective.train().loss(network, batch)[1] == {}


def test_what_is_constant_has_no_correlation_and_numbers_are_needed():
    objective = Regression()
    means = {"loss": 1.0, "prediction": 2.0, "target": 1.0, "prediction^2": 4.0, "target^2": 3.0}
    assert objective.summary(means | {"prediction target": 2.0}) == {"loss": 1.0, "pearson": 0.0}
    network = lively(Llama(**DENSE))
    objective.change_network(network)
    with pytest.raises(ConfigError, match=r"task=values"):
        objective.loss(network, {"input_ids": tokens(), "labels": tokens()})
