"""Each decoder family computes what transformers computes with the same weights: block by block, and its gradients."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from plugins.networks.bert import BERT
from plugins.networks.deepseek_v3 import DeepSeekV3
from plugins.networks.gemma3 import Gemma3
from plugins.networks.gpt import GPT
from plugins.networks.hybrid import Hybrid
from plugins.networks.llama import Llama
from plugins.networks.mamba2 import Mamba2
from plugins.networks.mistral import Mistral
from plugins.networks.olmo2 import OLMo2
from plugins.networks.olmo_hybrid import OLMoHybrid
from plugins.networks.parts.recurrent_mixer import StateCache
from plugins.networks.qwen2 import Qwen2
from plugins.networks.qwen3 import Qwen3
from tests.support.found_on_ranks import found_on_ranks
from tests.support.reference_models import blocks_of, both, hidden_states, lively, renamed, tokens
from tests.support.small_networks import LATENT

SMALL = {
    "vocab_size": 61,
    "n_layer": 3,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 32,
    "intermediate_size": 96,
    "max_sequence_length": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
GPT2 = {"vocab_size": 61, "n_layer": 3, "n_head": 4, "n_embd": 32, "max_sequence_length": 64}
GEMMA = {**SMALL, "head_dim": 12, "sliding_window": 8, "global_every": 2, "query_pre_attn_scalar": 12}
MAMBA = {"vocab_size": 61, "n_layer": 3, "n_embd": 32, "head_dim": 16, "state_size": 8}
DELTA = {**SMALL, "attention_every": 2, "key_dim": 6, "value_dim": 10}

CASES = {  # sequences are of 50 tokens: longer than the windows, and than the original length of scaled positions
    "Llama-llama3": (Llama, {**SMALL, "rope_scaling": LLAMA3, "tie_embeddings": False}),
    "Llama-linear": (Llama, {**SMALL, "rope_scaling": LINEAR, "rope_theta": 100.0, "n_kv_head": None}),
    "Llama-yarn": (Llama, {**SMALL, "rope_scaling": YARN, "rope_theta": 10000.0}),
    "Llama-biases": (Llama, {**SMALL, "bias": True, "mlp_bias": True, "head_dim": 12}),
    "Mistral": (Mistral, {**SMALL, "sliding_window": 8}),
    "Mistral-everywhere": (Mistral, {**SMALL, "sliding_window": None}),
    "Qwen2": (Qwen2, SMALL),
    "Qwen2-windows": (Qwen2, {**SMALL, "tie_embeddings": False, "sliding_window": 8, "max_window_layers": 1}),
    "Qwen3": (Qwen3, {**SMALL, "head_dim": 12}),
    "Qwen3-windows": (Qwen3, {**SMALL, "tie_embeddings": False, "sliding_window": 8, "max_window_layers": 1}),
    "OLMo2": (OLMo2, SMALL),
    "OLMo2-tied": (OLMo2, {**SMALL, "tie_embeddings": True, "n_kv_head": None, "rope_scaling": YARN}),
    "Gemma3": (Gemma3, GEMMA),
    "Gemma3-scaled": (Gemma3, {**GEMMA, "query_pre_attn_scalar": 30, "rope_scaling": LINEAR, "final_soft_cap": 3.0}),
    "GPT2": (GPT, GPT2),
    "Mamba2": (Mamba2, {**MAMBA, "tie_embeddings": False}),
    "Mamba2-groups": (Mamba2, {**MAMBA, "n_groups": 2, "bias": True, "conv_bias": False}),
    "OLMoHybrid": (OLMoHybrid, DELTA),
    "OLMoHybrid-rotary": (OLMoHybrid, {**DELTA, "rope_theta": 100.0, "negative_eigenvalues": False}),
}  # fmt: skip


HYBRIDS = {
    "Hybrid": (
        Hybrid,
        {**SMALL, "n_layer": 5, "state_size": 8, "sliding_window": 8, "mixers": ["attention", "gated_delta_net", "mamba2", "gated_linear_attention", "sliding_window"]},
    )
}  # fmt: skip
"""What transformers has no form for."""

HYBRIDS = {
    "Hybrid": (
        Hybrid,
        {**SMALL, "n_layer": 5, "state_size": 8, "sliding_window": 8, "mixers": ["attention", "gated_delta_net", "mamba2", "gated_linear_attention", "sliding_window"]},
    )
}  # fmt: skip
"""What transformers has no form for."""

NEAR = {"GPT2": 1e-5, "Mamba2": 5e-6, "Mamba2-groups": 5e-6, "OLMoHybrid": 2e-5, "OLMoHybrid-rotary": 2e-5}
"""What is not bitwise: GPT-2's matrices are the other way round in transformers; recurrences are summed in another order,
and the delta rule reads what it wrote. Relative to the largest value."""


def apart(actual, expected):
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("name", CASES)
def test_every_block_and_every_gradient_is_that_of_transformers(name):
    network, reference = both(*CASES[name])
    ids = tokens()
    batch = {"input_ids": ids}
    actual = hidden_states(network.blocks, lambda: network.logits(network(batch)))
    expected = hidden_states(blocks_of(reference), lambda: reference(ids, use_cache=False).logits)
    assert len(actual) == len(expected) == 4
    assert expected[-1].std() > 0.3
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert apart(ours, theirs) <= NEAR.get(name, 0.0), index
    for logits in (actual[-1], expected[-1]):
        logits.logsumexp(-1).sum().backward()
    gradients = renamed(network, {name: weight.grad for name, weight in reference.named_parameters()})
    for key, weight in network.named_parameters():
        if name != "GPT2" or not key.endswith(
            "k_proj.bias"
        ):  # it shifts all scores of a query alike: its gradient is 0
            assert apart(weight.grad, gradients[key]) < max(1e-6, NEAR.get(name, 0.0)), key


@pytest.mark.parametrize("name", CASES)
def test_a_cache_gives_the_hidden_states_of_the_whole_sequence(name):
    network_class, arguments = CASES[name]
    network = lively(network_class(**arguments))
    cache = network.new_cache(2, 50)
    with torch.inference_mode():
        expected = network({"input_ids": tokens()})
        pieces = tokens().split(
            (20, 1, 1, 3, 1, 12, 1, 11), dim=1
        )  # a prompt beyond the window, several tokens at once
        actual = torch.cat([network({"input_ids": ids}, cache) for ids in pieces], dim=1)
    assert apart(actual, expected) < 1e-5
    for window, one in zip(network.windows, cache, strict=True):
        assert one.length == 50
        if isinstance(one, StateCache):
            assert one.state.shape[0] == 2
            continue
        assert one.keys.shape[2] == (50 if window is None else window - 1)  # all that is kept


@pytest.mark.parametrize("name", CASES)
def test_documents_of_a_row_are_computed_as_alone(name):
    network_class, arguments = CASES[name]
    network = lively(network_class(**arguments)).double()
    lengths = (19, 1, 30)
    packed = {
        "input_ids": tokens(),
        "document_ids": torch.repeat_interleave(torch.tensor([3, 5, 7]), torch.tensor(lengths)).expand(2, -1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).expand(2, -1),
    }
    with torch.no_grad():
        together = network(packed).split(lengths, dim=1)
        alone = [network({"input_ids": ids}) for ids in tokens().split(lengths, dim=1)]
    # tables of positions are of float32, and sines of one position are the same in both
    assert max(apart(one, other) for one, other in zip(together, alone, strict=True)) < 1e-6


FUSED = {
    "Qwen3": (Qwen3, {**SMALL, "sliding_window": 70, "max_window_layers": 1}),
    "Gemma3": (Gemma3, {**GEMMA, "sliding_window": 70}),
    "DeepSeekV3": (DeepSeekV3, LATENT),
    "BERT": (BERT, {"vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32, "intermediate_size": 48}),
    "Hybrid": (Hybrid, {**SMALL, "mixers": ["attention", "gated_delta_net", "block_sparse"], "sliding_window": 70}),
}  # fmt: skip


def documents_of(lengths):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
    places = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    return {"input_ids": tokens(length=sum(lengths)), "document_ids": ids, "position_ids": places}


def computed(network, batch):
    """Returns hidden states, and gradients of the weights that they come from."""
    network.zero_grad()
    hidden = network(batch)
    hidden.square().mean().backward()
    return [hidden.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", FUSED)
def test_masks_of_flex_attention_are_those_of_booleans(name, monkeypatch):
    """On CUDA they are FlexAttention's; here their attention is written out."""
    network_class, arguments = FUSED[name]
    network = lively(network_class(**{**arguments, "max_sequence_length": 256})).double()
    batch, lengths = documents_of((20, 1, 129, 30)), (20, 1, 129, 30)
    found, masks = [], []
    network.blocks[-1].register_forward_pre_hook(lambda block, given: masks.append(given[2]))
    for fused in (False, True):
        monkeypatch.setattr("plugins.networks.parts.decoder.takes_fused_masks", lambda *_, on=fused: on)
        found.append(computed(network, batch))
        assert isinstance(masks[-1], BlockMask) == fused
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-11)
    with torch.no_grad():
        for one, ids in zip(found[1][0].split(lengths, 1), batch["input_ids"].split(lengths, 1), strict=True):
            assert apart(one, network({"input_ids": ids})) < 1e-6  # tables of positions are of float32


def test_dropout_of_attention_and_functions_of_others_have_masks_of_booleans(monkeypatch):
    monkeypatch.setattr("plugins.networks.parts.decoder.takes_fused_masks", lambda *_: True)
    network, place = GPT(**{**GPT2, "attention_dropout": 0.1}), (torch.device("cpu"), 50)
    assert network.eval()._fuses(*place)
    assert not network.train()._fuses(*place)
    assert network.eval().replace_attention(lambda q, k, v, *rest, **options: v)
    assert not network._fuses(*place)
    network.replace_attention(torch.nn.functional.scaled_dot_product_attention)
    assert network._fuses(*place)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_flex_attention_gives_the_gradients_of_booleans_and_waits_for_nothing(name):
    network_class, arguments = FUSED[name]
    network = lively(network_class(**{**arguments, "n_embd": 64, "max_sequence_length": 256}))
    batch, found = documents_of((20, 1, 129, 30)), []
    for device in ("cpu", "cuda", "cuda"):
        network, batch = network.to(device), {key: value.to(device) for key, value in batch.items()}
        if len(found) == 2 and name != "DeepSeekV3":  # experts count their tokens
            torch.cuda.set_sync_debug_mode("error")  # the kernels are compiled
        try:
            gradients = computed(network, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([one.cpu() for one in gradients])
    for one, other in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-3)  # TF32 is off; other order of sums


WINDOWS = [name for name, (_, arguments) in CASES.items() if arguments.get("sliding_window")]


@pytest.mark.parametrize("name", WINDOWS)
def test_a_token_sees_the_last_tokens_of_each_layer_and_no_others(name):
    network_class, arguments = CASES[name]
    first = {"max_window_layers": 0} if "max_window_layers" in arguments else {}
    network = lively(network_class(**{**arguments, **first, "n_layer": 1}))
    changed = tokens()
    changed[:, 10] = (changed[:, 10] + 1) % 61
    with torch.no_grad():
        difference = (network({"input_ids": tokens()}) - network({"input_ids": changed})).abs().amax((0, 2))
    assert difference.nonzero().flatten().tolist() == list(range(10, 18))


def test_soft_caps_of_attention_are_those_of_transformers():
    """Its Gemma 3 has the function for them, and leaves it out."""
    import transformers
    from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

    def capped(module, *tensors, **options):
        return eager_attention_forward(module, *tensors, **options, softcap=2.0)

    transformers.AttentionInterface.register("capped_for_test", capped)
    transformers.AttentionMaskInterface.register("capped_for_test", transformers.masking_utils.eager_mask)
    network, reference = both(Gemma3, {**GEMMA, "query_pre_attn_scalar": 3})
    capping = Gemma3(**{**GEMMA, "query_pre_attn_scalar": 3}, attention_soft_cap=2.0).eval()
    capping.load_state_dict(network.state_dict())
    reference.set_attn_implementation("capped_for_test")
    ids = tokens()
    with torch.no_grad():
        actual = hidden_states(capping.blocks, lambda: capping.logits(capping({"input_ids": ids})))
        expected = hidden_states(blocks_of(reference), lambda: reference(ids, use_cache=False).logits)
        uncapped = network.logits(network({"input_ids": ids}))
    assert max(apart(one, other) for one, other in zip(actual, expected, strict=True)) < 1e-5
    assert apart(uncapped, expected[-1]) > 0.05


def _train_step_on_two_ranks(rank, file, names, sequence):
    """Returns how far gradients and, from a cache, hidden states are from those of one process."""
    from torch import distributed

    from plugins.strategies.tensor_parallel import apply

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = distributed.init_device_mesh("cpu", (2,))
    found = {}
    for name in names:
        network_class, arguments = HYBRIDS.get(name) or CASES[name]
        whole, split = (lively(network_class(**arguments)) for _ in range(2))
        apply(split, mesh, sequence=sequence, vocabulary=False)
        for network in (whole, split):
            network.logits(network({"input_ids": tokens()})).logsumexp(-1).sum().backward()
        for (key, expected), actual in zip(whole.named_parameters(), split.parameters(), strict=True):
            gradient = actual.grad.full_tensor() if hasattr(actual.grad, "full_tensor") else actual.grad
            found[f"{name}: {key}"] = apart(gradient, expected.grad)
        if not sequence:
            cache = split.new_cache(2, 50)
            with torch.no_grad():
                pieces = [split({"input_ids": ids}, cache) for ids in tokens().split((20, 1, 29), dim=1)]
                found[f"{name}: cache"] = apart(torch.cat(pieces, 1), whole({"input_ids": tokens()}))
    distributed.destroy_process_group()
    return found


@pytest.mark.ci
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_parallel_plans_give_the_gradients_of_one_process(tmp_path, sequence):
    names = ["Llama-biases", "Mistral", "Qwen2", "Qwen3", "OLMo2", "Gemma3-scaled", "Hybrid"]
    folder = tmp_path / "found"
    folder.mkdir()
    for found in found_on_ranks(
        _train_step_on_two_ranks, 2, folder, str(tmp_path / "rendezvous"), names, sequence
    ):
        cached = {name: found.pop(f"{name}: cache") for name in ([] if sequence else names)}
        assert len(found) > 20 * len(names)
        assert not {key: value for key, value in found.items() if not value < 1e-4}
        assert not {name: value for name, value in cached.items() if not value < 1e-5}
