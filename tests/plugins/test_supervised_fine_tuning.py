"""Answers weigh as asked, packed or not and on any ranks; noise is NEFTune's; data without masks are refused."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from conformance.runs import run
from core.errors import ConfigError
from datamodules.instruction_datamodule import InstructionDataModule
from plugins.networks.gemma3 import Gemma3
from plugins.networks.llama import Llama
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.supervised_fine_tuning import SupervisedFineTuning, most_probable
from tests.support.largest_tensor import LargestTensor
from tests.support.records import build, chat
from tests.support.reference_models import lively
from tests.support.same_run import TOLERANCE, differences, fit, one_process
from tests.support.small_networks import DENSE

SIZES = {**DENSE, "vocab_size": 320, "max_sequence_length": 128}
CHATS = [{"messages": chat("a?", "yes", "b?", "a long answer" * (n % 3 + 1))} for n in range(12)]


def batches(tmp_path, pack):
    data = build(
        InstructionDataModule, tmp_path, CHATS, template="chatml", sequence_length=128, pack=pack, shuffle=False
    )  # fmt: skip
    order = {"sequence_length": 128, "batch_size": 3, "pad": True}
    return [batch for _, batch in data.packed("train", **order)]


def by_hand(network, batch, weigh):
    """Returns weighted sum and weights, answer by answer."""
    total = weights = 0.0
    losses = F.cross_entropy(network.logits(network(batch)).double().flatten(0, 1), batch["labels"].flatten(), reduction="none")  # fmt: skip
    losses = losses.view_as(batch["labels"])
    for row, labels in enumerate(batch["labels"]):
        for document in batch["document_ids"][row].unique():
            places = ((batch["document_ids"][row] == document) & (labels >= 0)).nonzero().flatten().tolist()
            answers = [[place for place in places if place - places.index(place) == start] for start in dict.fromkeys(p - places.index(p) for p in places)]  # fmt: skip
            assert not places or len(answers) == 2
            parts = {"token": [[p] for p in places], "answer": answers, "conversation": [places] if places else []}[weigh]  # fmt: skip
            for part in parts:
                total += losses[row, part].mean().item()
                weights += 1
    return total, weights


@pytest.mark.parametrize("weigh", ["token", "answer", "conversation"])
@pytest.mark.parametrize("chunk", [None, 37])
def test_weights_are_exact_and_packing_changes_nothing(weigh, chunk, tmp_path):
    network = lively(Llama(**SIZES))
    found = []
    for pack in (True, False):
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in batches(tmp_path, pack):
            loss, figures = SupervisedFineTuning(weigh, chunk_tokens=chunk).loss(network, batch)
            total, weight = by_hand(network, batch, weigh)
            assert loss.total.item() == pytest.approx(total, rel=1e-5)
            assert loss.weight.item() == pytest.approx(weight, rel=1e-5)
            plain, _ = CausalLM().loss(network, batch)
            assert figures["token_loss"].total.item() == pytest.approx(plain.total.item(), rel=1e-6)
            assert loss.tokens == plain.tokens
            best = network.logits(network(batch)).argmax(-1)
            right = ((best == batch["labels"]) & (batch["labels"] >= 0)).sum()
            assert figures["accuracy"].total == right
            sums += torch.tensor([loss.total.item(), loss.weight.item(), right.item()], dtype=torch.float64)
        found.append(sums.tolist())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_by_token_its_gradients_are_causal_lms(tmp_path):
    batch, found = batches(tmp_path, True)[0], []
    for objective in (CausalLM(), SupervisedFineTuning(), SupervisedFineTuning(chunk_tokens=50)):
        network = lively(Llama(**SIZES))
        objective.loss(network, batch)[0].mean.backward()
        found.append([weight.grad for weight in network.parameters()])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.allclose(one, two, rtol=1e-4, atol=1e-6 * one.abs().max())


def test_noise_is_within_alpha_over_the_root_of_length_and_width(tmp_path):
    network, batch = lively(Llama(**SIZES)).train(), batches(tmp_path, True)[0]
    seen = []
    network.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    objective = SupervisedFineTuning(noise=5.0)
    torch.manual_seed(0)
    first = objective.train().loss(network, batch)[0].total
    torch.manual_seed(0)
    assert objective.loss(network, batch)[0].total == first
    assert objective.loss(network, batch)[0].total != first
    noise = seen[0] - network.embed_tokens(batch["input_ids"])
    for row, documents in enumerate(batch["document_ids"]):
        for document in documents.unique():
            here = noise[row, documents == document]
            most = 5 / (len(here) * 32) ** 0.5
            assert 0.8 * most < here.abs().max() <= most * (1 + 1e-5)
            assert abs(here.mean()) < 0.25 * most
    objective.eval()
    assert objective.loss(network, batch)[0].total == objective.loss(network, batch)[0].total


def test_mistakes_are_refused():
    with pytest.raises(ConfigError, match="weigh=token, answer, conversation, not 'row'"):
        SupervisedFineTuning("row")
    with pytest.raises(ConfigError, match="noise from 0 upwards"):
        SupervisedFineTuning(noise=-1.0)
    with pytest.raises(ConfigError, match="chunk_tokens auto, from 1 upwards"):
        SupervisedFineTuning(chunk_tokens=0)


def test_a_network_that_returns_logits_has_the_same_loss_in_chunks():
    capped = Gemma3(**DENSE, head_dim=8, sliding_window=4, global_every=2, final_soft_cap=30.0)
    ids = torch.arange(10)[None]
    found = []
    for chunk in (None, 3):
        capped.zero_grad()
        loss = SupervisedFineTuning(chunk_tokens=chunk).loss(capped, {"input_ids": ids, "labels": ids})[0]
        loss.mean.backward()
        found.append([loss.total.detach(), *(p.grad.clone() for p in capped.parameters())])
    for one, other in zip(*found, strict=True):  # sums of ten float32 in another order
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_data_whose_labels_are_all_tokens_are_refused(tmp_path):
    done = run(["check", "--config=quickstart", "--model.objective=SupervisedFineTuning"], tmp_path)
    assert done.code == 2
    assert "select InstructionDataModule" in done.error_text
    assert len(done.error_text.splitlines()) <= 10


@pytest.mark.ci
@pytest.mark.parametrize(
    ("weigh", "strategy"),
    [
        ("answer", {"class_path": "FSDP"}),
        ("token", {"class_path": "HybridParallel", "init_args": {"tensor": 2, "data_shard": 1}}),
    ],
    ids=["sharded", "shared vocabulary"],
)
def test_it_trains_on_ranks_as_in_one_process(weigh, strategy):
    overlay = {"data": {"class_path": "tests.support.uneven.UnevenAnswers"}, "model": {"objective": {"class_path": "plugins.objectives.supervised_fine_tuning.SupervisedFineTuning", "init_args": {"weigh": weigh, "chunk_tokens": 9}}}}  # fmt: skip
    found, expected = fit({**overlay, "trainer": {"strategy": strategy}}, 2), one_process(overlay)
    apart = differences(found, expected)
    assert max(apart.values()) < TOLERANCE, apart
    for step, figures in expected.record["figures"].items():
        assert found.record["figures"][step]["train/accuracy"] == pytest.approx(
            figures["train/accuracy"], rel=1e-6
        )


def test_where_ranks_share_a_vocabulary_none_has_all_logits():
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (8,))
        own = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
        shared = DTensor.from_local(own, mesh, [Shard(1)], run_check=False)
        with LargestTensor() as largest:
            found = most_probable(shared)
        assert torch.equal(found, 200 + own.argmax(-1))  # the fake group sends what this rank has
        assert largest.bytes <= own.numel() * 8  # ids
    finally:
        dist.destroy_process_group()
