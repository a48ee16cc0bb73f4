"""Networks that let their positions see each other beside attention are found, before they train on cut sequences."""

import pytest
import torch
from torch import nn

from plugins.networks.gpt import GPT
from tests.support.same_run import CONFIG, fit
from toolkit.positions import explain_position_mixing

SIZES = CONFIG["model"]["network"]["init_args"]


class Convolving(GPT):
    """Adds to each embedding a causal convolution that begins at zero; says that attention is all there is."""

    def __init__(
        self, vocab_size: int, n_layer: int, n_head: int, n_embd: int, max_sequence_length: int
    ) -> None:
        sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
        super().__init__(vocab_size=vocab_size, max_sequence_length=max_sequence_length, **sizes)
        self.convolution = nn.Conv1d(n_embd, n_embd, 3)
        self.embed_norm.register_forward_hook(self.convolve)
        self.init_weights()

    def init_weights(self):
        super().init_weights()
        if hasattr(self, "convolution"):
            nn.init.zeros_(self.convolution.weight)
            nn.init.zeros_(self.convolution.bias)

    def convolve(self, module, inputs, hidden):
        return hidden + self.convolution(nn.functional.pad(hidden.mT, (2, 0))).mT


class Counting(GPT):
    """Counts positions by itself."""

    def forward(self, batch, cache=None):
        return super().forward(
            {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}, cache
        )


class Deaf(GPT):
    """Says that it attends through another function, and does not."""

    def replace_attention(self, attention):
        return True


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "position": "rotary",
            "n_kv_head": 2,
            "norm": "rmsnorm",
            "activation": "swiglu",
            "norm_position": "post",
        },
    ],
    ids=["learned", "rotary"],
)
@pytest.mark.parametrize("format", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_all_that_mixes_positions_of_gpt(more, format):
    network = GPT(**SIZES, **more).to(format).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    own = network.layers[0].attention.attend
    assert explain_position_mixing(network) is None
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network.training
    assert all(layer.attention.attend is own for layer in network.layers)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Convolving, "mixes positions"), (Counting, "position_ids"), (Deaf, "does not call")],
)
def test_what_else_mixes_positions_is_found(kind, message):
    network = kind(**SIZES)
    assert message in explain_position_mixing(network)
    if kind is Convolving:
        assert not network.convolution.weight.any()


@pytest.mark.parametrize("method", ["ring", pytest.param("ulysses", marks=pytest.mark.ci)])
def test_a_run_with_cut_sequences_is_refused_on_every_rank(method):
    network = {"class_path": "tests.toolkit.test_positions.Convolving", "init_args": SIZES}
    strategy = {"class_path": "HybridParallel", "init_args": {"context": 2, "context_method": method}}
    done = fit(
        {"trainer": {"strategy": strategy}, "model": {"network": network}}, 2, name=f"convolving {method}"
    )
    assert done.codes == (2, 2)
    assert "context is 2, and sequences of Convolving cannot be split" in done.error_text
