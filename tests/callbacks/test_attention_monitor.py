"""AttentionMonitor against attention that is written out densely; tests/distributed/test_monitors.py has the strategies."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from callbacks.activation_checkpointing import ActivationCheckpointing
from callbacks.attention_monitor import AttentionMonitor
from core.errors import ConfigError
from core.language_module import LanguageModule
from plugins.networks.gemma3 import Gemma3
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from tests.support.tiny_training import Record, fit, module, tiny_gpt, uneven_batches
from toolkit import attention_scores
from toolkit.attention_scores import add_statistics, spaced

B, H, G, T, D = 2, 4, 2, 12, 8
CAP, WINDOW = 3.0, 5


def dense(q, k, mask, scale, cap, bias=0.0):
    """Returns logits (B, H, T, T) in float64, minus infinity where a key is not seen, and the entropies of the weights."""
    logits = torch.einsum("bhtd,bhsd->bhts", q.double(), k.double().repeat_interleave(H // G, 1)) * scale
    logits = (torch.tanh(logits / cap) * cap if cap else logits) + bias
    logits = torch.where(mask, logits, -torch.inf)
    return logits, torch.distributions.Categorical(logits=logits.clamp(min=-1e30)).entropy()


def documents():
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    return (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
CASES = {
    "causal": (None, True, None, CAUSAL, 0.0),
    "window": (CAUSAL.triu(1 - WINDOW), False, None, CAUSAL.triu(1 - WINDOW), 0.0),
    "documents and a soft cap": (documents(), False, CAP, documents(), 0.0),
    "a bias": (torch.arange(T * T).view(1, 1, T, T) / 50.0, False, None, CAUSAL | True, torch.arange(T * T).view(T, T) / 50.0),
    "not masked": (None, False, CAP, CAUSAL | True, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("most", [attention_scores.MOST, 5 * H * T, 1])
@pytest.mark.parametrize("queries", [T, 4])
@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_dense_attention(name, queries, most, monkeypatch):
    monkeypatch.setattr(attention_scores, "MOST", most)
    mask, causal, cap, seen, bias = CASES[name]
    generator = torch.Generator().manual_seed(0)
    q, k = (3 * torch.randn(B, heads, T, D, generator=generator) for heads in (H, G))
    sums, largest = torch.zeros(2, dtype=torch.float64), torch.tensor(-torch.inf)
    add_statistics(sums, largest, q, k, mask, causal, 0.7, cap, queries)
    logits, entropies = (x[:, :, spaced(T, queries)] for x in dense(q, k, seen, 0.7, cap, bias))
    assert sums[1] == B * H * queries
    # float32: rounding of products of 8 terms of up to 70
    assert float(sums[0]) == pytest.approx(float(entropies.sum()), rel=2e-6)
    assert float(largest) == pytest.approx(float(logits.max()), rel=1e-6)


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.elements = max(self.elements, made.numel() if isinstance(made, torch.Tensor) else 0)
        return made


def test_no_tensor_is_larger_than_keys_and_logits_of_a_block(monkeypatch):
    length = 512
    monkeypatch.setattr(attention_scores, "MOST", 8 * H * length)
    q, k = torch.zeros(1, H, length, D), torch.zeros(1, G, length, D)
    with Largest() as largest:
        add_statistics(torch.zeros(2), torch.tensor(-torch.inf), q, k, None, True, 1.0, None, length)
    # keys of H heads would be as large, all logits 64 times as large
    assert largest.elements == max(8 * H * length, q.numel())


def test_it_hears_what_a_network_attends_to(tmp_path):
    record, last = Record(), []
    monitor = AttentionMonitor(every_n_steps=2, queries=100)
    trained = module(lambda: tiny_gpt(n_kv_head=1, position="rotary"))
    batches = uneven_batches(2)
    first = fit(tmp_path, trained, batches, [monitor, ActivationCheckpointing(), record], max_steps=2)
    assert first.global_step == 2
    # The step's own weights: those after one step of the same run.
    again = module(lambda: tiny_gpt(n_kv_head=1, position="rotary"))
    fit(tmp_path, again, batches, [], max_steps=1)
    attention = again.network.layers[1].attention
    plain = attention.attend
    attention.attend = lambda q, k, v, *rest, **options: (
        last.append((q, k)),
        plain(q, k, v, *rest, **options),
    )[1]
    with torch.no_grad():
        logits = again(batches[1])
    [(q, k)] = last
    scores = (q.double() @ k.double().mT / q.shape[-1] ** 0.5).masked_fill(~CAUSAL, -torch.inf)
    entropy = torch.distributions.Categorical(logits=scores.clamp(min=-1e30)).entropy().mean()
    found = record.figures[1]
    assert found["attention/block.1/entropy"] == pytest.approx(float(entropy), rel=1e-5)
    assert found["attention/block.1/max_logit"] == pytest.approx(float(scores.max()), rel=1e-4)
    assert found["logits/max"] == pytest.approx(float(logits.abs().max()), rel=1e-5)
    assert trained.network.layers[1].attention.attend is plain  # nothing is left


def test_a_network_with_windows_and_documents_is_heard(tmp_path):
    sizes = dict(vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, head_dim=8, intermediate_size=16)
    network = lambda: Gemma3(**sizes, max_sequence_length=16, sliding_window=2, global_every=2)  # noqa: E731
    record = Record()
    batches = uneven_batches(1)
    batches[0]["document_ids"] = torch.zeros(2, 12, dtype=torch.int64)
    trained = LanguageModule(network, CausalLM(), lambda groups: torch.optim.SGD(groups, lr=0.0))
    fit(tmp_path, trained, batches, [AttentionMonitor(1, queries=100), record], max_steps=1)
    # at first all logits are alike: log 2 of a window of 2 tokens, and the mean of log t of all before
    uniform = torch.arange(1.0, 13).log()
    assert record.figures[0]["attention/block.0/entropy"] == pytest.approx(
        float(uniform.clamp(max=0.6931472).mean()), rel=0.1
    )
    assert record.figures[0]["attention/block.1/entropy"] == pytest.approx(float(uniform.mean()), rel=0.1)


def test_a_network_that_does_not_say_where_it_attends_is_refused(tmp_path):
    class Silent(GPT):
        def parts_by_kind(self):
            return {}

    silent = module(lambda: Silent(vocab_size=61, n_layer=1, n_head=2, n_embd=16, max_sequence_length=24))
    with pytest.raises(ConfigError, match="Silent does not say where it attends"):
        fit(tmp_path, silent, uneven_batches(1), [AttentionMonitor()], max_steps=1)
