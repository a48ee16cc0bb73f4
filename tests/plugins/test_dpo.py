"""DPO against trl's trainer and the papers' formulas; what it refuses; batches that are filled up or split."""

import math

import pytest
import torch

from core.errors import ConfigError
from plugins.cli.selection import describe
from plugins.objectives.dpo import DPO
from plugins.objectives.kto import KTO
from plugins.objectives.orpo import ORPO
from plugins.objectives.simpo import SimPO
from plugins.strategies.hybrid_parallel import HybridParallel
from tests.support.trl_losses import (
    BETA,
    SMOOTHING,
    STORED,
    T,
    batch,
    log_probabilities,
    of_trl,
    ours,
    stored,
)
from toolkit.selection import Run

KINDS = {"sigmoid": 0.0, "ipo": 0.0, "hinge": 0.0, "robust": SMOOTHING}


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_trl(kind):
    loss, _, gradient = ours(DPO(kind, BETA, KINDS[kind]))
    value, theirs = stored(kind)
    assert loss.mean.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-14)


@pytest.mark.slow
def test_the_stored_values_are_those_of_the_installed_trl():
    pytest.importorskip("trl", "1.16")
    import json

    now, then = of_trl(), json.loads(STORED.read_text())["losses"]
    assert now.keys() == then.keys()
    for name, (value, gradient) in now.items():
        assert value == pytest.approx(then[name][0], rel=1e-9)
        torch.testing.assert_close(torch.tensor(gradient), torch.tensor(then[name][1]), rtol=1e-6, atol=1e-9)


def margins():
    given = batch()
    rewards = BETA * (log_probabilities(given["logits"], given["labels"]).sum(1) - given["reference"][:, 0])
    return rewards[::2], rewards[1::2]


def test_smoothing_is_conservative_dpo():
    """The expectation over labels that are swapped with probability s."""
    loss, _, _ = ours(DPO("sigmoid", BETA, SMOOTHING))
    expected = 0.0
    for chosen, rejected in zip(*margins(), strict=True):
        p = 1 / (1 + math.exp(rejected - chosen))
        expected -= (1 - SMOOTHING) * math.log(p) + SMOOTHING * math.log(1 - p)
    assert loss.total.item() == pytest.approx(expected, rel=1e-12)


def test_pairs_weigh_the_same_and_tokens_are_those_of_labels():
    loss, figures, _ = ours(DPO(beta=BETA))
    chosen, rejected = margins()
    assert (loss.weight.item(), loss.tokens.item()) == (4, (batch()["labels"] >= 0).sum().item())
    for name, value in {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": (chosen > rejected).double(),
    }.items():
        assert figures[name].mean.item() == pytest.approx(value.mean().item(), rel=1e-12), name


@pytest.mark.parametrize("objective", [DPO(), SimPO(), ORPO(), KTO()], ids=lambda one: type(one).__name__)
def test_rows_that_fill_a_batch_change_nothing(objective):
    """Also not where there is nothing else."""
    given = batch()
    filled = {name: torch.cat((value, torch.zeros_like(value[:2]))) for name, value in given.items()}
    filled["labels"][-2:] = -100
    loss, figures, gradient = ours(objective, **filled)
    expected, theirs, unfilled = ours(objective)
    assert (loss.weight, loss.tokens) == (expected.weight, expected.tokens)
    torch.testing.assert_close(loss.total, expected.total, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient[:-2], unfilled, rtol=1e-12, atol=1e-15)
    assert gradient[-2:].abs().max() == 0
    assert all(figures[name].weight == theirs[name].weight for name in figures)
    empty = {"labels": torch.full_like(given["labels"], -100)}
    loss, _, gradient = ours(objective, **empty)
    assert (loss.total.item(), loss.weight.item(), gradient.abs().max().item()) == (0, 0, 0)


@pytest.mark.parametrize("objective", [DPO(beta=BETA), SimPO(), ORPO()], ids=lambda one: type(one).__name__)
def test_a_batch_in_parts_has_the_sums_of_the_whole(objective):
    whole, figures, _ = ours(objective)
    parts = [ours(objective, **{k: v[rows] for k, v in batch().items()}) for rows in (slice(2), slice(2, 8))]
    torch.testing.assert_close(sum(part[0].total for part in parts), whole.total, rtol=1e-12, atol=0)
    assert sum(part[0].weight for part in parts) == whole.weight
    for name, figure in figures.items():
        torch.testing.assert_close(
            sum(part[1][name].total for part in parts), figure.total, rtol=1e-12, atol=1e-14
        )


def test_half_a_pair_and_no_reference_are_refused():
    with pytest.raises(ConfigError, match="7 rows has half a record"):
        ours(DPO(), **{name: value[:7] for name, value in batch().items()})
    with pytest.raises(ConfigError, match=r"no reference.*\n.*callbacks.=ReferenceLogProbabilities"):
        DPO().loss(None, {"labels": torch.zeros(2, T)})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "hinged"}, "did you mean hinge|hinge"),
        ({"beta": 0.0}, "beta above 0"),
        ({"beta": float("nan")}, "beta above 0"),
        ({"label_smoothing": 0.5}, "from 0 to below 0.5"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "0 with kind=ipo"),
        ({"chunk_tokens": 0}, "chunk_tokens from 1"),
    ],
)
def test_values_out_of_range_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        DPO(**arguments)


def faults(kind, config, **strategy):
    own = describe("model.objective", kind, f"x.{kind.__name__}", {})
    other = describe("trainer.strategy", HybridParallel, "x.HybridParallel", strategy)
    return list(kind.preflight(Run((own, other), config), own))


def test_what_does_not_fit_a_run_is_said_before_it():
    pairs, answers = ({"data": {"paired": paired}} for paired in (True, False))
    missing = "DPO compares with the network that the run starts from: add --trainer.callbacks+=ReferenceLogProbabilities"
    assert faults(DPO, pairs) == [missing]
    assert faults(SimPO, pairs) == []
    assert (
        "SimPO takes pairs, and data.paired=False has single answers: KTO takes them"
        in faults(SimPO, answers)[0]
    )
    assert "KTO takes single answers, and data.paired=True has pairs: DPO, ORPO" in faults(KTO, pairs)[0]
    assert faults(ORPO, pairs, pipeline=2) == [
        "ORPO needs whole answers, of both rows of a record, on one rank: set pipeline to 1"
    ]
