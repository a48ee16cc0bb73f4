"""Virtual tokens: what concatenation gives, in packed rows, with caches and in rows of different lengths; peft's values."""

import copy
import json

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from callbacks.activation_checkpointing import ActivationCheckpointing
from conformance.runs import run
from core.errors import ConfigError
from plugins.adapters.p_tuning import PTuning
from plugins.adapters.prefix_tuning import PrefixTuning
from plugins.adapters.prompt_tuning import PromptTuning
from plugins.commands.export import export
from plugins.networks.bert import BERT
from plugins.networks.deepseek_v3 import DeepSeekV3
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.mistral import Mistral
from plugins.networks.qwen3 import Qwen3
from tests.support.adapted_checkpoints import store_adapted, store_base
from tests.support.reference_models import both, lively, tokens
from tests.support.same_run import fit, one_process, weights_apart
from tests.support.small_networks import DENSE, LATENT, LENGTHS, packed
from tests.support.stored_networks import MLP, tokenizer_json

COUNT = 5
PLAIN = {key: value for key, value in DENSE.items() if key not in ("n_kv_head", "intermediate_size")}
FAMILIES = [(Llama, DENSE), (Qwen3, DENSE), (GPT, PLAIN)]
ADAPTERS = [PromptTuning(COUNT), PTuning(COUNT), PTuning(COUNT, "lstm", 24), PrefixTuning(COUNT)]


def adapted(network, adapter):
    """Returns a copy of a network with virtual tokens, drawn so that they matter."""
    network = copy.deepcopy(network)
    copy.deepcopy(adapter).change_network(network)
    torch.manual_seed(1)
    for parameter in network.virtual.parameters():
        nn.init.normal_(parameter, std=0.4)
    network.virtual.to(next(network.parameters()).dtype)
    return network.eval()


def concatenated(plain, embeddings, ids):
    """Returns the hidden states of texts (B, T) behind virtual tokens, computed as one sequence by the network as it is."""
    count, rows = len(embeddings), len(ids)
    positions = torch.arange(count, count + ids.shape[1])
    text = plain._embedded(ids, positions)
    hidden = torch.cat((embeddings.expand(rows, -1, -1), text), dim=1)
    batch = {"input_ids": torch.zeros(rows, count + ids.shape[1], dtype=torch.int64)}
    return plain.forward_blocks(batch, hidden, range(plain.n_layer))[:, count:]


@pytest.mark.parametrize(("network_class", "arguments"), FAMILIES)
@pytest.mark.parametrize("adapter", ADAPTERS[:3], ids=["prompt", "mlp", "lstm"])
def test_it_is_the_network_with_the_tokens_in_front(network_class, arguments, adapter):
    plain = lively(network_class(**arguments)).double()
    network = adapted(plain, adapter)
    ids = tokens(length=40)
    expected = concatenated(plain, network.virtual.embedded(), ids)
    found = network({"input_ids": ids})
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(found, plain({"input_ids": ids}), atol=0.01)
    weights = [*network.virtual.parameters()]
    one = torch.autograd.grad(found.square().sum(), weights)
    other = torch.autograd.grad(concatenated(plain, network.virtual.embedded(), ids).square().sum(), weights)
    assert all(torch.allclose(*pair, rtol=1e-7, atol=1e-8) for pair in zip(one, other, strict=True))
    assert network.max_sequence_length == arguments["max_sequence_length"] - COUNT
    assert {name for name, p in network.named_parameters() if p.requires_grad} == {
        f"virtual.{name}" for name, _ in network.virtual.named_parameters()
    }


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["prompt", "mlp", "lstm", "prefix"])
@pytest.mark.parametrize(
    ("network_class", "arguments"), [*FAMILIES, (Mistral, {**DENSE, "sliding_window": 6})]
)
def test_documents_caches_and_rows_of_different_lengths_change_nothing(network_class, arguments, adapter):
    network = adapted(lively(network_class(**arguments)).double(), adapter)
    batch = packed()
    whole, at = network(batch), 0
    for length in LENGTHS:  # each document alone
        alone = network({"input_ids": batch["input_ids"][:, at : at + length]})
        assert torch.allclose(whole[:, at : at + length], alone, rtol=1e-9, atol=1e-9)
        at += length
    ids = tokens(length=30)
    expected = network({"input_ids": ids})
    with torch.no_grad():
        cache, found, at = network.new_cache(2, 30), [], 0
        for size in (7, 1, 1, 4, 17):
            found.append(network({"input_ids": ids[:, at : at + size]}, cache))
            at += size
        assert torch.allclose(torch.cat(found, 1), expected, rtol=1e-8, atol=1e-8)
        padding = torch.tensor([0, 9])
        rows = torch.stack([ids[0], torch.cat((torch.zeros(9, dtype=torch.int64), ids[1, :21]))])
        cache, found = network.new_padded_cache(padding, 30), []
        for part in (rows[:, :25], rows[:, 25:26], rows[:, 26:]):
            found.append(network({"input_ids": part}, cache))
        found = torch.cat(found, 1)
        assert torch.allclose(found[0], expected[0], rtol=1e-8, atol=1e-8)
        assert torch.allclose(found[1, 9:], expected[1, :21], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["prompt", "mlp", "lstm", "prefix"])
def test_activations_that_are_computed_again_give_the_same_gradients(adapter):
    gradients = []
    for again in (False, True):
        network = adapted(lively(Llama(**DENSE)), adapter).train()
        if again:
            ActivationCheckpointing(1).change_network(network)
        network(packed()).square().sum().backward()
        gradients.append([parameter.grad for parameter in network.virtual.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["prompt", "mlp", "lstm", "prefix"])
def test_logits_are_pefts(adapter):
    import peft

    network, reference = both(Llama, DENSE)
    network = adapted(network, adapter)
    shared = {"num_virtual_tokens": COUNT, "task_type": "CAUSAL_LM"}
    virtual, ids = network.virtual, tokens(length=20)
    if isinstance(adapter, PrefixTuning):
        model = peft.get_peft_model(reference, peft.PrefixTuningConfig(**shared))
        layers = torch.stack((virtual.keys, virtual.values), 1).transpose(2, 3)  # (L, 2, n, G, D)
        values = layers.permute(2, 0, 1, 3, 4).reshape(COUNT, -1)
        model.prompt_encoder["default"].embedding.weight.data = values.detach().clone()
    elif isinstance(adapter, PTuning):
        kind = {"mlp": "MLP", "lstm": "LSTM"}[adapter.encoder]
        config = peft.PromptEncoderConfig(
            **shared, encoder_reparameterization_type=kind, encoder_hidden_size=adapter.hidden or 32, encoder_num_layers=2
        )  # fmt: skip
        model = peft.get_peft_model(reference, config)
        theirs = model.prompt_encoder["default"]
        theirs.embedding.weight.data = virtual.embeddings.detach().clone()
        theirs.mlp_head.load_state_dict(virtual.mlp.state_dict())
        if virtual.lstm is not None:
            theirs.lstm_head.load_state_dict(virtual.lstm.state_dict())
    else:
        model = peft.get_peft_model(reference, peft.PromptTuningConfig(**shared))
        model.prompt_encoder["default"].embedding.weight.data = virtual.embeddings.detach().clone()
    model.eval()
    expected = model(input_ids=ids).logits
    batch = {"input_ids": ids}
    if isinstance(adapter, PrefixTuning):  # theirs have no rotary position either, but move those of texts
        batch["position_ids"] = torch.arange(COUNT, COUNT + 20)
    found = network.logits(network(batch))
    assert torch.allclose(found, expected[:, -20:], rtol=1e-4, atol=2e-5 * expected.abs().max().item())


def test_files_of_peft_are_written_and_read(tmp_path):
    import peft

    path, _ = store_adapted(tmp_path, PromptTuning, store_base(tmp_path), count=COUNT)
    out = tmp_path / "peft"
    assert export(["--ckpt_path", str(path), "--format", "peft", "--output", str(out)]) == 0
    network, reference = both(Llama, MLP)
    PromptTuning(1, str(out)).change_network(network)
    assert network.virtual.count == COUNT
    ids = tokens(length=20)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(reference, out).eval()(input_ids=ids).logits[:, -20:]
        found = network.eval().logits(network({"input_ids": ids}))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    model = peft.PeftModel.from_pretrained(both(Llama, MLP)[1], out)
    model.save_pretrained(tmp_path / "theirs")
    again = both(Llama, MLP)[0]
    PromptTuning(weights=str(tmp_path / "theirs")).change_network(again)
    assert torch.equal(again.virtual.embeddings, network.virtual.embeddings)
    with pytest.raises(ConfigError, match="it was trained on another base"):
        PromptTuning(weights=str(out)).change_network(Llama(**DENSE | {"n_embd": 64, "n_head": 4}))


def test_mistakes_are_named():
    for adapter in (PromptTuning, PrefixTuning, PTuning):
        with pytest.raises(ConfigError, match=f"{adapter.__name__}: count is 0; it must be at least 1"):
            adapter(0)
        for network in (
            BERT(61, 1, 4, 32, 64, 48),
            DeepSeekV3(**LATENT),
            adapted(lively(Llama(**DENSE)), PromptTuning(2)),
        ):
            with pytest.raises(ConfigError, match="is no decoder whose blocks all attend"):
                adapter(2).change_network(network)
    with pytest.raises(ConfigError, match="no text fits behind them"):
        PromptTuning(64).change_network(Llama(**DENSE))
    with pytest.raises(ConfigError, match="encoder=mlp or encoder=lstm"):
        PTuning(encoder="gru")
    with pytest.raises(ConfigError, match="hidden is 0"):
        PTuning(hidden=0)
    network = adapted(lively(Llama(**DENSE)), PromptTuning(COUNT))
    with pytest.raises(ConfigError, match="60 tokens is longer than max_sequence_length, 59"):
        network({"input_ids": tokens(length=60)})


def test_on_the_meta_device_it_has_names_and_shapes():
    with torch.device("meta"):
        network = Llama(**DENSE)
    for adapter in ADAPTERS:
        other = copy.deepcopy(network)
        copy.deepcopy(adapter).change_network(other)
        real = adapted(lively(Llama(**DENSE)), adapter)
        assert {n: p.shape for n, p in other.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}  # fmt: skip
        assert all(p.is_meta for p in other.parameters())


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["DDP", "FSDP"])
@pytest.mark.parametrize("name", ["PTuning", "PrefixTuning", "BottleneckAdapter"])
def test_it_trains_on_ranks_as_in_one_process(name, strategy):
    callbacks = [{"class_path": name, "init_args": {"size" if name == "BottleneckAdapter" else "count": 3}}]
    network = {"init_args": {"max_sequence_length": 19}}
    # gradients of what is added are small: with the steps of a whole network they would hardly be clipped
    overlay = {"trainer": {"callbacks": callbacks, "gradient_clip_val": 1e-4}, "model": {"network": network}}
    ranks = {"trainer": {**overlay["trainer"], "strategy": {"class_path": strategy}}, "model": overlay["model"]}  # fmt: skip
    found, expected = fit(ranks, 2), one_process(overlay)
    assert found.code == 0, found.error_text
    for step, figures in expected.record["figures"].items():
        assert found.record["figures"][step]["train/loss"] == pytest.approx(figures["train/loss"], rel=1e-6)
        assert found.record["figures"][step]["train/grad_norm"] == pytest.approx(figures["train/grad_norm"], rel=1e-4)  # fmt: skip
    assert weights_apart(found, expected) < 1e-5


@pytest.mark.parametrize("adapter", [PromptTuning, PrefixTuning])
def test_a_checkpoint_generates_what_the_network_in_training_would(adapter, tmp_path):
    path, network = store_adapted(tmp_path, adapter, store_base(tmp_path), count=4)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert {name.removeprefix("network.") for name in state} == {
        f"virtual.{name}" for name, _ in network.virtual.named_parameters()
    }
    done = run(["generate", f"--ckpt_path={path}", "--prompt=th", "--temperature=0", "--max_new_tokens=12", "--json"], tmp_path)  # fmt: skip
    assert done.code == 0, done.error_text
    [record] = [json.loads(line) for line in done.stdout.splitlines()]
    ids = Tokenizer.from_str(tokenizer_json()).encode("th").ids
    for token in record["ids"]:  # without a cache
        with torch.no_grad():
            best = network.logits(network({"input_ids": torch.tensor([ids])}))[0, -1].argmax()
        assert token == best
        ids.append(token)
    done = run(["export", f"--ckpt_path={path}", f"--output={tmp_path / 'out'}"], tmp_path)
    assert done.code == 2
    assert f"{adapter.__name__} trained cannot be merged" in done.error_text
