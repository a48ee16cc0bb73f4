"""CausalLM against torch's own cross-entropy: value, gradient, ignored labels, precision."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from core.errors import ConfigError
from plugins.cli.selection import describe
from plugins.networks.gpt import GPT
from plugins.objectives import chunked
from plugins.objectives.causal_lm import CausalLM, cross_entropy
from plugins.objectives.chunked import in_chunks
from plugins.strategies.ddp import DDP
from plugins.strategies.deepspeed_zero import DeepSpeedZero
from plugins.strategies.fsdp import FSDP
from tests.support.largest_tensor import LargestTensor
from toolkit.selection import Run

VOCAB, B, T = 37, 3, 12


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = GPT(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=16, max_sequence_length=T)
    with torch.no_grad():  # far from uniform, so that a wrong label or position shows
        network.output_weight.mul_(20)
    return network


@pytest.fixture
def batch():
    tokens = torch.randint(VOCAB, (B, T + 1), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


def gradients(loss, network):
    network.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def reference(network, batch, reduction):
    """Cross-entropy with classes in the second dimension, (B, V, T), the layout torch documents."""
    logits = F.linear(network(batch), network.output_weight)
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction=reduction)


@pytest.mark.parametrize("ignored", [0, 7, B * T - 1])
def test_sum_mean_and_gradient_are_those_of_cross_entropy(ignored, network, batch):
    batch["labels"].view(-1)[
        torch.randperm(B * T, generator=torch.Generator().manual_seed(2))[:ignored]
    ] = -100
    loss, metrics = CausalLM().loss(network, batch)
    assert metrics == {}
    assert loss.tokens.item() == B * T - ignored
    torch.testing.assert_close(loss.total, reference(network, batch, "sum"), rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.mean, reference(network, batch, "mean"), rtol=1e-6, atol=0)
    ours = gradients(loss.mean, network)
    theirs = gradients(reference(network, batch, "mean"), network)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-7, msg=name)


def test_it_is_minus_the_sum_of_log_probabilities(network, batch):
    """From the definition, in float64."""
    loss, _ = CausalLM().loss(network, batch)
    logits = network.double().logits(network(batch))
    chosen = logits.softmax(-1).gather(-1, batch["labels"][..., None])
    assert loss.total.item() == pytest.approx(-chosen.log().sum().item(), rel=1e-5)


def test_an_ignored_position_has_no_influence_on_the_gradient_of_its_logits(network, batch):
    batch["labels"][:, 5:] = -100
    logits = []
    network.logits = lambda hidden: logits.append(F.linear(hidden, network.output_weight)) or logits[0]
    loss, _ = CausalLM().loss(network, batch)
    logits[0].retain_grad()
    loss.total.backward()
    assert logits[0].grad[:, :5].abs().min() > 0
    assert logits[0].grad[:, 5:].abs().max() == 0


def test_without_any_label_loss_and_gradient_are_zero_and_finite(network, batch):
    batch["labels"].fill_(-100)
    loss, _ = CausalLM().loss(network, batch)
    assert (loss.total.item(), loss.tokens.item(), loss.mean.item()) == (0, 0, 0)
    assert all(gradient.abs().max() == 0 for gradient in gradients(loss.mean, network).values())


def test_logits_of_a_bfloat16_network_are_compared_in_float32(network, batch):
    network.to(torch.bfloat16)
    loss, _ = CausalLM().loss(network, batch)
    logits = network.logits(network(batch))
    assert logits.dtype == torch.bfloat16
    assert loss.total.dtype == torch.float32
    wide = F.cross_entropy(logits.double().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    narrow = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    assert loss.total.item() == pytest.approx(wide.item(), rel=1e-6)
    assert narrow.item() != pytest.approx(wide.item(), rel=1e-6)  # what it would have been


def test_autocast_makes_no_difference_to_how_logits_are_compared(network, batch):
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = CausalLM().loss(network, batch)
        logits = network.logits(network(batch))
    assert logits.dtype == torch.bfloat16
    wide = F.cross_entropy(logits.double().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    assert loss.total.item() == pytest.approx(wide.item(), rel=1e-6)


def options_batch(batch):
    batch["labels"][0, 3:7] = -100
    return batch


def by_the_formulas(network, batch, smoothing, z_loss, l2):
    """Smoothing, z-loss and L2 as the papers write them, in float64, mean over the label tokens."""
    logits = network.logits(network(batch)).double().flatten(0, 1)
    labels = batch["labels"].flatten()
    logits, labels = logits[labels != -100], labels[labels != -100]
    target = torch.full_like(logits, smoothing / VOCAB)
    target[torch.arange(len(labels)), labels] += 1 - smoothing
    log_z = logits.exp().sum(-1).log()
    loss = -(target * (logits - log_z[:, None])).sum(-1).mean() + z_loss * (log_z**2).mean()
    return loss + l2 / 2 * sum((p.double() ** 2).sum() for p in network.parameters() if p.ndim > 1)


OPTIONS = [
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"l2": 1e-2},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "l2": 1e-3},
]


@pytest.mark.parametrize("chunk_tokens", [None, 5, 1000])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradient_are_those_of_the_formulas(options, chunk_tokens, network, batch):
    """In float64 but for the logits, which are compared in float32: rounding of 2^-24 relative to logits of 10."""
    network.double()
    batch = options_batch(batch)
    loss, figures = CausalLM(**options, chunk_tokens=chunk_tokens).loss(network, batch)
    expected = by_the_formulas(
        network,
        batch,
        **{
            "smoothing": options.get("label_smoothing", 0.0),
            "z_loss": options.get("z_loss", 0.0),
            "l2": options.get("l2", 0.0),
        },
    )
    assert loss.mean.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = gradients(loss.mean, network), gradients(expected, network)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6, msg=name)
    plain = reference(network, batch, "mean")
    assert figures["cross_entropy"].mean.item() == pytest.approx(plain.item(), rel=1e-6)
    assert ("z_loss" in figures) == bool(options.get("z_loss"))


def by_the_formulas_z(network, batch):
    logits = network.logits(network(batch)).double().flatten(0, 1)[batch["labels"].flatten() != -100]
    return (logits.exp().sum(-1).log() ** 2).mean().item()


def test_the_z_loss_is_logged_without_its_coefficient(network, batch):
    _, figures = CausalLM(z_loss=1e-4).loss(network, options_batch(batch))
    assert figures["z_loss"].mean.item() == pytest.approx(by_the_formulas_z(network, batch), rel=1e-5)


def test_validation_has_the_plain_cross_entropy(network, batch):
    objective = CausalLM(label_smoothing=0.1, z_loss=1e-2, l2=1e-2).eval()
    loss, figures = objective.loss(network, batch)
    assert figures == {}
    assert loss.total.item() == CausalLM().loss(network, batch)[0].total.item()


@pytest.mark.parametrize("chunk_tokens", [1, 7, B * T])
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(chunk_tokens, network, batch):
    batch = options_batch(batch)
    whole, chunked = (CausalLM(chunk_tokens=n).loss(network, batch)[0] for n in (None, chunk_tokens))
    torch.testing.assert_close(chunked.total, whole.total, rtol=1e-6, atol=0)
    expected, found = gradients(3 * whole.mean, network), gradients(3 * chunked.mean, network)
    for name in expected:  # sums of float32 in another order
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_in_chunks_no_tensor_holds_all_logits(training):
    torch.manual_seed(0)
    network = GPT(vocab_size=1000, n_layer=1, n_head=2, n_embd=8, max_sequence_length=64)
    tokens = torch.randint(1000, (16, 65))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    found = {}
    for chunk_tokens in (None, 32):
        with LargestTensor() as largest, torch.set_grad_enabled(training):
            loss = CausalLM(chunk_tokens=chunk_tokens).loss(network, batch)[0].mean
            if training:
                loss.backward()
        found[chunk_tokens] = largest.bytes
    assert found[None] >= 4 * 1000 * 16 * 64
    assert found[32] <= 4 * 1000 * 64  # a chunk, or the weights


def test_chunks_under_autocast_accumulate_in_float32(network, batch):
    with torch.autocast("cpu", torch.bfloat16):
        whole, chunked = (CausalLM(chunk_tokens=n).loss(network, batch)[0] for n in (None, 1))
    assert chunked.total.dtype == torch.float32
    assert chunked.total.item() == pytest.approx(whole.total.item(), rel=1e-5)
    expected, found = gradients(whole.mean, network), gradients(chunked.mean, network)
    for name in expected:
        if name.endswith("k_proj.bias"):  # 0 but for rounding: it changes no attention
            continue
        error = (found[name] - expected[name]).norm() / expected[name].norm()
        assert error < 2**-6, name  # a few roundings to bfloat16


def test_gradients_of_states_in_bf16_are_not_all_too_large_or_too_small_alike():
    """The mean divides by 15 tokens: rounded to bf16, 1/15 would scale them all by 1.0010."""
    torch.manual_seed(0)
    states, weight = torch.randn(15, 64).bfloat16(), torch.randn(VOCAB, 64).bfloat16()
    labels, found = torch.randint(VOCAB, (15,)), []
    network = GPT(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=64, max_sequence_length=T).bfloat16()
    network.output_weight.data.copy_(weight)
    for scale in (1.0, 1 / 15):
        given = states[None].clone().requires_grad_()
        (scale * chunked.sums_over_positions(cross_entropy, network, given, labels[None], 4)[0]).backward()
        found.append(given.grad)
    assert torch.equal(found[1], (found[0].double() * torch.tensor(1 / 15).double()).float().bfloat16())


class Capped(GPT):
    """Logits of its own, with a parameter of their own."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.cap = torch.nn.Parameter(torch.tensor(3.0))

    def logits(self, hidden):
        return self.cap * (super().logits(hidden) / self.cap).tanh()


@pytest.mark.parametrize("frozen", [False, True])
def test_chunks_of_logits_of_its_own_give_the_gradients_of_all_their_weights(frozen, batch):
    torch.manual_seed(0)
    network = Capped(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=16, max_sequence_length=T)
    network.cap.requires_grad_(not frozen)
    found = []
    for chunk_tokens in (None, 4):
        network.zero_grad()
        CausalLM(chunk_tokens=chunk_tokens).loss(network, batch)[0].mean.backward()
        found.append({name: p.grad.clone() for name, p in network.named_parameters() if p.requires_grad})
    assert ("cap" in found[1]) == (not frozen)
    for name, expected in found[0].items():  # sums of float32 in another order
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-7, msg=name)


def test_auto_computes_large_logits_in_equal_chunks_and_small_ones_at_once(network, batch, monkeypatch):
    calls = []

    def counted(parts, network, rows, labels, size):
        calls.append(size)
        return in_chunks(parts, network, rows, labels, size)

    monkeypatch.setattr(chunked, "in_chunks", counted)
    whole, auto = (CausalLM(chunk_tokens=n).loss(network, batch)[0].total for n in (None, "auto"))
    assert (calls, auto.item()) == ([], whole.item())
    monkeypatch.setattr(chunked, "LEAST", 10)
    monkeypatch.setattr(chunked, "LOGITS_BYTES", 4 * VOCAB * 16)
    large = CausalLM().loss(network, batch)[0].total
    assert calls == [12]  # 36 positions in chunks of at most 16
    torch.testing.assert_close(large, whole, rtol=1e-6, atol=0)
    CausalLM(chunk_tokens=None).loss(network, batch)
    CausalLM(chunk_tokens=18).loss(network, batch)
    assert calls == [12, 18]


def test_without_gradients_chunks_only_compute_the_logits():
    """Counted, of 2 N V C operations; kernels are given a vocabulary padded to 64."""
    torch.manual_seed(0)
    network = GPT(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=16, max_sequence_length=T)
    hidden, labels = torch.randn(B, T, 16), torch.randint(VOCAB, (B, T))
    counts = {}
    for trained in (False, True):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trained):
            states = hidden.clone().requires_grad_(trained)
            sums = chunked.sums_over_positions(cross_entropy, network, states, labels, 9)
        assert sums.requires_grad == trained
        counts[trained] = counter.get_total_flops()
    assert counts == {False: 2 * B * T * 64 * 16, True: 3 * 2 * B * T * 64 * 16}


@pytest.mark.gpu
def test_on_cuda_large_logits_take_the_memory_of_a_chunk():
    """All logits of 16,384 positions take 3.3 GB in float32, and the loss three times as much."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = GPT(vocab_size=50257, n_layer=1, n_head=2, n_embd=64, max_sequence_length=1024)
    tokens = torch.randint(50257, (16, 1025), device="cuda")
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    found = {}
    for chunk_tokens in (None, "auto"):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = CausalLM(chunk_tokens=chunk_tokens).loss(network, batch)[0].mean
        found[chunk_tokens] = gradients(loss, network)["embed_tokens.weight"], loss.item()
        peak = torch.cuda.max_memory_allocated()
    assert peak < 2**32
    assert found["auto"][1] == pytest.approx(found[None][1], rel=1e-5)
    error = (found["auto"][0] - found[None][0]).norm() / found[None][0].norm()
    assert error < 2**-6  # a few roundings to bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 1.1},
        {"z_loss": -1.0},
        {"l2": float("nan")},
        {"chunk_tokens": 0},
        {"chunk_tokens": "all"},
    ],
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        CausalLM(**options)


@pytest.mark.parametrize(
    ("strategy", "stage", "refused"),
    [(DDP, None, False), (FSDP, 2, True), (DeepSpeedZero, 2, False), (DeepSpeedZero, 3, True)],
)
def test_the_sum_over_all_weights_needs_whole_ones(strategy, stage, refused):
    own = describe("model.objective", CausalLM, "x.CausalLM", {"l2": 1e-3})
    other = describe("trainer.strategy", strategy, f"x.{strategy.__name__}", {"stage": stage})
    faults = list(CausalLM.preflight(Run((own, other), {}), own))
    assert len(faults) == refused
    assert (
        not refused
        or f"l2 is 0.001, a sum over full weights, and {strategy.__name__} shards them" in faults[0]
    )
