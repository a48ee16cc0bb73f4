"""A loss whose tokens weigh differently is the same on any ranks, and tokens are counted as they are."""

import math

import pytest
import torch

from core.contracts import IGNORED_LABEL, TokenSum
from core.training.token_sums import TokenSums
from tests.support.same_run import TOLERANCE, differences, fit, one_process
from tests.support.tiny_training import Record, module, tiny_gpt, uneven_batches
from tests.support.tiny_training import fit as fit_here
from tests.support.weighted import RowWeighted

WEIGHTED = {"model": {"objective": {"class_path": "tests.support.weighted.RowWeighted"}}}


@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy",
    [
        {"class_path": "HybridParallel", "init_args": {"pipeline": 2}},
        {"class_path": "FSDP"},
        {"class_path": "DDP"},
        {"class_path": "DeepSpeedZero", "init_args": {"stage": 2}},
    ],
    ids=lambda strategy: strategy["class_path"],
)
def test_on_two_ranks_it_is_the_run_of_one_process(strategy):
    apart = differences(fit({"trainer": {"strategy": strategy}} | WEIGHTED, 2), one_process(WEIGHTED))
    assert max(apart.values()) <= TOLERANCE, apart


@pytest.mark.parametrize("accumulation", [1, 3])
def test_means_are_over_weights_and_tokens_are_tokens(accumulation, tmp_path):
    batches, record = uneven_batches(accumulation), Record()
    options = {"max_steps": 1, "accumulate_grad_batches": accumulation}
    fit_here(tmp_path, module(objective=RowWeighted()), batches, [record], **options)
    torch.manual_seed(0)
    reference = tiny_gpt()
    rows, labels = [], 0
    for batch in batches:
        logits = reference.logits(reference(batch))
        for one, wanted in zip(logits, batch["labels"], strict=True):
            rows.append(torch.nn.functional.cross_entropy(one, wanted))
            labels += int((wanted != IGNORED_LABEL).sum())
    loss = torch.stack(rows).mean()
    loss.backward()
    largest = max(float(p.grad.abs().max()) for p in reference.parameters())
    for found, parameter in zip(record.gradients[0], reference.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6 * largest)
    figures = record.figures[0]
    assert figures["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert figures["train/perplexity"] == pytest.approx(math.exp(float(loss.detach())), rel=1e-5)
    assert figures["train/tokens"] == labels


def test_sums_go_through_a_checkpoint_and_those_of_older_ones_count_weights():
    sums, figures = (
        TokenSums(),
        {"loss": TokenSum(*torch.tensor([3.0, 4.0, 0.5])), "more": TokenSum(*torch.tensor([1.0, 2.0]))},
    )
    sums.add(figures)
    sums.add(figures)
    state = sums.state_dict(lambda flat: torch.stack([flat, flat]))
    for world_size, tokens in {2: 8, 1: 16}.items():
        again = TokenSums()
        again.load_state_dict(state, 0, world_size, torch.device("cpu"))
        assert again.means(lambda flat: flat) == ({"loss": 6.0, "more": 0.5}, tokens)
    del state["tokens"]
    again.load_state_dict(state, 1, 2, torch.device("cpu"))
    assert again.means(lambda flat: flat) == ({"loss": 6.0, "more": 0.5}, 1)
    empty = TokenSums()
    again.load_state_dict(empty.state_dict(lambda flat: flat), 0, 1, torch.device("cpu"))
    again.add(figures)
    assert again.means(lambda flat: flat) == ({"loss": 6.0, "more": 0.5}, 4)
    again.load_state_dict(empty.state_dict(lambda flat: flat), 0, 1, torch.device("cpu"))
    for tokens in (2**24, 1, 1, 1):
        again.add({"loss": TokenSum(torch.tensor(3.0), torch.tensor(tokens))})
    assert again.means(lambda flat: flat)[1] == 2**24 + 3


def test_a_sum_is_a_pair_as_before():
    total, tokens = plain = TokenSum(torch.tensor(6.0), torch.tensor(3))
    assert (plain.mean, plain.weight, len(plain)) == (2.0, tokens, 2)
    assert plain == (total, tokens)
    weighted = TokenSum(total, tokens, torch.tensor(0.5))
    assert (weighted.mean, weighted.tokens) == (12.0, 3)
    assert TokenSum(torch.tensor(0.0), torch.tensor(0), torch.tensor(0.0)).mean == 0
