"""Networks with experts: against transformers with the same weights, and what routing must keep."""

import json
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn

from core.errors import ConfigError
from plugins.networks.deepseek_v3 import DeepSeekV3
from plugins.networks.dots1 import Dots1
from plugins.networks.mixtral import Mixtral
from plugins.networks.olmoe import OLMoE
from plugins.networks.parts import moe
from plugins.networks.parts.latent_attention import LatentAttention
from plugins.networks.parts.moe import Experts, Router, SparseMLP, capacity, places
from plugins.networks.qwen3_moe import Qwen3MoE
from tests.support.reference_models import (
    blocks_of,
    both,
    hidden_states,
    lively,
    reference_of,
    renamed,
    tokens,
)
from tests.support.small_networks import LATENT
from toolkit.routing import RoutesTokens, count_loads, recorded

SMALL = {
    "vocab_size": 61,
    "n_layer": 3,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 32,
    "intermediate_size": 48,
    "n_experts": 6,
    "experts_per_token": 2,
    "max_sequence_length": 64,
}
DOTS = {**SMALL, "n_experts": 8, "experts_per_token": 3, "expert_size": 24, "dense_layers": 1}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.3,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
CASES = {
    "Mixtral": (Mixtral, SMALL),
    "Mixtral-windows": (Mixtral, {**SMALL, "sliding_window": 8, "tie_embeddings": True, "head_dim": 12}),
    "OLMoE": (OLMoE, SMALL),
    "OLMoE-normalised": (OLMoE, {**SMALL, "normalise_weights": True, "n_kv_head": None, "experts_per_token": 6}),
    "Qwen3MoE": (Qwen3MoE, {**SMALL, "head_dim": 12}),
    "Qwen3MoE-as-they-are": (Qwen3MoE, {**SMALL, "head_dim": 12, "normalise_weights": False, "bias": True}),
    "Dots1": (Dots1, DOTS),
    "DeepSeekV3": (DeepSeekV3, LATENT),
    "DeepSeekV3-lite": (DeepSeekV3, {**LATENT, "q_lora_rank": None, "rope_scaling": YARN, "groups": 1, "groups_per_token": 1}),
    "Dots1-groups": (Dots1, {**DOTS, "groups": 4, "groups_per_token": 2, "normalise_weights": False}),
}  # fmt: skip


def pair(name):
    """Returns a network of ours and transformers', whose balancing biases change what is chosen."""
    network, reference = both(*CASES[name])
    generator = torch.Generator().manual_seed(3)
    for ours, theirs in zip(network.routers, blocks_of(reference)[-len(network.routers) :], strict=True):
        if ours.e_score_correction_bias is not None:
            bias = 0.1 * torch.randn(len(ours.weight), generator=generator)
            ours.e_score_correction_bias.copy_(bias)
            theirs.mlp.gate.e_score_correction_bias.copy_(bias)
    reference.set_experts_implementation("eager")
    return network, reference


def apart(actual, expected):
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("name", CASES)
def test_every_block_and_every_gradient_is_that_of_transformers(name):
    network, reference = pair(name)
    ids = tokens()
    with recorded(network) as routings:
        actual = hidden_states(network.blocks, lambda: network.logits(network({"input_ids": ids})))
    expected = hidden_states(blocks_of(reference), lambda: reference(ids, use_cache=False).logits)
    assert len(actual) == len(expected) == 4
    assert expected[-1].std() > 0.3
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert apart(ours, theirs) < 1e-6, index
    assert len(routings) == len(network.routers)
    assert all(len(routing.experts.unique()) == len(network.routers[0].weight) for routing in routings)
    for logits in (actual[-1], expected[-1]):
        logits.logsumexp(-1).sum().backward()
    gradients = renamed(
        network,
        {name: weight.grad for name, weight in reference.named_parameters()}
        | {
            name: buffer
            for name, buffer in reference.state_dict().items()
            if name.endswith("correction_bias")
        },
    )
    for key, weight in network.named_parameters():
        assert apart(weight.grad, gradients[key]) < 3e-6, key


@pytest.mark.parametrize("name", CASES)
def test_a_cache_gives_the_hidden_states_of_the_whole_sequence(name):
    network, _ = pair(name)
    cache = network.new_cache(2, 50)
    with torch.inference_mode():
        expected = network({"input_ids": tokens()})
        pieces = tokens().split((20, 1, 1, 3, 1, 12, 1, 11), dim=1)
        actual = torch.cat([network({"input_ids": ids}, cache) for ids in pieces], dim=1)
    assert apart(actual, expected) < 1e-5


def test_a_cache_of_latents_is_small_and_both_forms_of_attention_to_it_agree(monkeypatch):
    network = pair("DeepSeekV3-lite")[0].double()
    absorbs = LatentAttention._absorbs
    found, used = [], set()
    for form in (absorbs, lambda self, tokens: False):
        monkeypatch.setattr(
            LatentAttention, "_absorbs", lambda self, n, form=form: used.add(form(self, n)) or form(self, n)
        )
        cache = network.new_cache(2, 50)
        with torch.inference_mode():
            found.append(
                torch.cat([network({"input_ids": ids}, cache) for ids in tokens().split((40, 1, 9), 1)], 1)
            )
        assert used >= {False}  # 40 tokens at once are cheaper with keys and values
    assert used == {True, False}
    assert apart(*found) < 1e-6  # rotations are in float32
    values = sum(layer.keys.numel() + layer.values.numel() for layer in cache)
    assert values == 3 * 2 * 50 * (
        16 + 8
    )  # layers, rows, tokens; keys and values would be 4 heads of 20 + 10


@pytest.mark.parametrize("name", CASES)
def test_documents_of_a_row_are_computed_as_alone(name):
    network = pair(name)[0].double()
    lengths = (19, 1, 30)
    packed = {
        "input_ids": tokens(),
        "document_ids": torch.repeat_interleave(torch.tensor([3, 5, 7]), torch.tensor(lengths)).expand(2, -1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).expand(2, -1),
    }
    with torch.no_grad():
        together = network(packed).split(lengths, dim=1)
        alone = [network({"input_ids": ids}) for ids in tokens().split(lengths, dim=1)]
    assert max(apart(one, other) for one, other in zip(together, alone, strict=True)) < 1e-6


@pytest.mark.parametrize("name", ["Mixtral", "OLMoE", "Qwen3MoE", "Dots1", "DeepSeekV3", "DeepSeekV3-lite"])
def test_files_of_ours_are_read_by_transformers_and_theirs_by_us(name, tmp_path):
    import transformers

    network_class, arguments = CASES[name]
    reference = reference_of(network_class, arguments)
    reference.save_pretrained(tmp_path / "theirs")
    written = {
        key: tensor
        for path in Path(tmp_path / "theirs").glob("*.safetensors")
        for key, tensor in load_file(path).items()
    }
    config = json.loads((tmp_path / "theirs" / "config.json").read_text(encoding="utf-8"))
    network = network_class(**network_class.hugging_face.init_args(config)).eval()
    state = network.state_dict()
    plan = network.hugging_face.tensors({key: tensor.shape for key, tensor in state.items()})
    assert {stored.theirs for stored in plan} == set(written)
    assert plan == network.hugging_face.tensors(state)
    for stored in plan:
        pieces = stored.to_ours(written[stored.theirs], [len(state[key]) for key in stored.ours])
        for key, piece in zip(stored.ours, pieces, strict=True):
            (state[key] if stored.index is None else state[key][stored.index]).copy_(piece)
    ids = tokens()
    with torch.no_grad():
        expected = reference(ids).logits
        assert apart(network.logits(network({"input_ids": ids})), expected) < 1e-6
    ours = tmp_path / "ours"
    ours.mkdir()
    tensors = {
        stored.theirs: stored.to_theirs([state[key] for key in stored.ours]).contiguous() for stored in plan
    }
    save_file(tensors, ours / "model.safetensors", metadata={"format": "pt"})
    (ours / "config.json").write_text(
        json.dumps(network_class.hugging_face.config(network_class, arguments)), encoding="utf-8"
    )
    read, info = transformers.AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(read(ids).logits, expected)


def sparse(capacity_factor=None, n_experts=5, width=8):
    torch.manual_seed(0)
    mlp = SparseMLP(
        Router(width, n_experts, 2, capacity_factor=capacity_factor), Experts(n_experts, width, 12, "silu")
    )
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mlp


def by_token(mlp, x, kept=None):
    """Computes token by token what a mixture of experts is."""
    rows = []
    routing = mlp.router(x)
    for n, (experts, weights) in enumerate(zip(routing.experts.tolist(), routing.weights, strict=True)):
        total = torch.zeros_like(x[n])
        for slot, (expert, weight) in enumerate(zip(experts, weights, strict=True)):
            if kept is None or kept[n][slot]:
                stack = mlp.experts
                inner = nn.functional.silu(stack.gate_proj[expert] @ x[n]) * (stack.up_proj[expert] @ x[n])
                total = total + weight * (stack.down_proj[expert] @ inner)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("grouped", [True, False])
def test_a_mixture_is_the_weighted_sum_of_each_tokens_experts(grouped, monkeypatch):
    if not grouped:
        monkeypatch.setattr(moe, "groups_products", lambda *given: False)
    mlp, x = sparse(), torch.randn(17, 8, requires_grad=True)
    actual, expected = mlp(x), by_token(mlp, x)
    assert apart(actual, expected) < 1e-6
    inputs = (x, *mlp.parameters())
    for one, other in zip(
        torch.autograd.grad(actual.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        assert apart(one, other) < 1e-5


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_without_a_token_have_a_gradient_of_zero(grouped, monkeypatch):
    if not grouped:
        monkeypatch.setattr(moe, "groups_products", lambda *given: False)
    mlp = sparse(n_experts=64)
    mlp(torch.randn(3, 8)).sum().backward()
    used = mlp.experts.up_proj.grad.abs().sum((1, 2)) > 0
    assert 2 <= used.sum() <= 6
    mlp.zero_grad()
    mlp.experts(torch.zeros(0, 8), torch.zeros(64, dtype=torch.int64)).sum().backward()
    for weight in mlp.experts.parameters():
        assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_what_an_expert_has_no_room_for_adds_nothing():
    mlp, x = sparse(capacity_factor=0.6), torch.randn(40, 8)
    experts = mlp.router(x).experts
    room = capacity(0.6, experts, 5)
    assert room == 10  # 0.6 * 40 * 2 / 5, rounded up
    filled, kept = [0] * 5, torch.zeros(40, 2, dtype=torch.bool)
    for slot in range(2):  # all first choices before the second ones
        for token in range(40):
            expert = experts[token, slot]
            kept[token, slot] = filled[expert] < room
            filled[expert] += 1
    assert 0 < (~kept).sum() < 60
    assert torch.equal(places(experts, 5) < room, kept)
    assert apart(mlp(x), by_token(mlp, x, kept)) < 1e-6
    assert apart(mlp.eval()(x), by_token(mlp, x)) < 1e-6  # in evaluation nothing is dropped


def test_a_capacity_that_nothing_exceeds_changes_nothing():
    mlp, x = sparse(capacity_factor=5.0), torch.randn(24, 8, requires_grad=True)
    limited = mlp(x)
    mlp.router.capacity_factor = None
    plain = mlp(x)
    assert apart(limited, plain) < 1e-6
    inputs = (x, *mlp.parameters())
    for one, other in zip(
        torch.autograd.grad(limited.square().sum(), inputs),
        torch.autograd.grad(plain.square().sum(), inputs),
        strict=True,
    ):
        assert apart(one, other) < 1e-5


def test_the_width_of_experts_is_sharded_by_the_plan_for_tensor_parallelism():
    plan = Mixtral(**SMALL).tensor_parallel_plan()
    assert {f"layers.{index}.mlp.experts" for index in range(3)} <= set(plan)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.15.dev"),
    reason="until 2.15 torch traces grouped products in bfloat16 alone",
)
def test_a_compiled_network_computes_the_same_in_one_graph():
    network = lively(Mixtral(**SMALL))
    batch = {"input_ids": tokens()}
    with torch.no_grad():
        expected = network(batch)
        torch._dynamo.reset()
        actual = torch.compile(network, backend="aot_eager", fullgraph=True)(batch)
    assert apart(actual, expected) < 1e-6


def test_loads_are_counted_once_also_where_activations_are_computed_again():
    network = Mixtral(**SMALL)
    assert isinstance(network, RoutesTokens)
    loads, dropped = torch.zeros(3, 6, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    handles = count_loads(network, loads, dropped)
    block = network.blocks[1]
    inner = block.forward
    block.forward = lambda *given: torch.utils.checkpoint.checkpoint(inner, *given, use_reentrant=False)
    network({"input_ids": tokens()}).sum().backward()
    assert loads.sum(1).tolist() == [2 * 50 * 2] * 3
    assert not dropped.any()
    for handle in handles:
        handle.remove()
    network({"input_ids": tokens()})
    assert loads.sum() == 3 * 2 * 50 * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; DeepSeekV3 is read with 'sigmoid'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; DeepSeekV3 is read with 4"),
        ({"rope_interleave": False}, "rope_interleave is False"),
    ],
)
def test_a_config_of_another_deepseek_is_refused(more, message):
    config = DeepSeekV3.hugging_face.config(DeepSeekV3, LATENT)
    assert DeepSeekV3.hugging_face.init_args(config).items() >= LATENT.items()
    with pytest.raises(ConfigError, match=message):
        DeepSeekV3.hugging_face.init_args(config | more)


@pytest.mark.parametrize(
    ("network_class", "arguments", "message"),
    [
        (Mixtral, {"experts_per_token": 7}, "experts_per_token=7 is above n_experts=6"),
        (Mixtral, {"capacity_factor": 0.0}, "capacity_factor=0.0 must be above 0"),
        (Dots1, {"groups": 4}, "groups=4 does not divide n_experts=6"),
        (Dots1, {"groups": 3, "groups_per_token": 1, "experts_per_token": 3}, "1 of 3 groups have 2 experts"),
        (Dots1, {"groups_per_token": 2}, "groups_per_token=2 is above groups=1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(network_class, arguments, message):
    with pytest.raises(ConfigError, match=message):
        network_class(**SMALL | arguments)


@pytest.mark.gpu
def test_in_bf16_a_gpu_multiplies_all_experts_at_once_and_the_host_waits_for_nothing():
    torch.manual_seed(0)
    found = []
    for device in ("cpu", "cuda", "cuda"):
        network = lively(Qwen3MoE(**{**SMALL, "head_dim": 16, "n_embd": 64})).to(device)
        batch = {"input_ids": tokens(length=64).to(device)}
        if len(found) == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.autocast(device, torch.bfloat16):
                network(batch).float().square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([p.grad.cpu() for p in network.parameters() if p.grad is not None])
    for ours, same, cpu in zip(found[1], found[2], found[0], strict=True):
        assert float((ours - same).abs().max()) <= 1e-3 * float(same.abs().max())
        assert float((ours - cpu).norm()) <= 0.2 * float(
            cpu.norm()
        )  # roundings to bf16 may choose other experts
