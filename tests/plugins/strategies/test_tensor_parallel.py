"""What ranks of a tensor-parallel group exchange for a block, and what the compiler makes of it."""

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import compile_fx, config
from torch.distributed._symmetric_memory import _test_mode

from plugins.networks.deepseek_v3 import DeepSeekV3
from plugins.networks.gpt import GPT
from plugins.strategies.hybrid_parallel import HybridParallel
from tests.support.fake_ranks import shards
from tests.support.sent import Sent


def network():
    sizes = {"vocab_size": 64, "n_layer": 1, "n_head": 4, "n_embd": 32, "max_sequence_length": 16}
    return GPT(
        **sizes, position="rotary", norm="rmsnorm", activation="swiglu", bias=False, tie_embeddings=False
    )


def block_and_inputs(module, tokens):
    hidden = torch.randn(2, tokens, 32, requires_grad=True)
    rope = torch.randn(1, 16, 8)
    return module.network.blocks[0], (hidden, rope, None, None)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16 by autocast"])
@pytest.mark.parametrize(
    ("sequence", "kinds"),
    [(1, ["all_reduce"]), (2, ["all_gather", "reduce_scatter"])],
    ids=["tensor", "sequence"],
)
def test_attention_and_mlp_exchange_once_in_each_direction(sequence, kinds, precision):
    """Megatron-LM, arXiv:1909.08053, section 3, and 2205.05198, section 4.2.1: projections share what backward exchanges."""
    autocasts = precision == "bf16 by autocast"  # as of a precision with layers of its own
    formats = {"param_format": "fp32"} if autocasts else {}
    strategy = HybridParallel(tensor=2, sequence=sequence, loss_parallel=False, **formats)
    dtype, size = ("float32", 4) if precision == "32-true" else ("bfloat16", 2)
    with shards(network, strategy, 0, 2, precision="bf16-mixed" if autocasts else precision) as module:
        block, inputs = block_and_inputs(module, 16 // sequence)
        with Sent() as sent, torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            output = block(*inputs)
            assert sent.calls == {f"{kind} {dtype}": 2 for kind in kinds}
            output.sum().backward()
    assert sent.calls == {f"{kind} {dtype}": 4 for kind in kinds}
    assert sent.bytes == {f"{kind} {dtype}": 4 * 2 * 16 * 32 * size for kind in kinds}


def routed():
    """Latent attention, experts and a norm at the end, each with a part of the tokens at its input."""
    return DeepSeekV3(
        vocab_size=64, n_layer=2, n_head=4, n_embd=32, intermediate_size=64, max_sequence_length=16, n_experts=4,
        experts_per_token=2, expert_size=16, dense_layers=1, groups=1, groups_per_token=1, kv_lora_rank=16,
        q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("build", [network, routed])
def test_under_autocast_all_gathered_tokens_are_bf16(build):
    strategy = HybridParallel(tensor=2, sequence=2, loss_parallel=False, param_format="fp32")
    with shards(build, strategy, 0, 2, precision="bf16-mixed") as module:
        ids = torch.zeros(2, 16, dtype=torch.int64)
        with Sent() as sent, torch.autocast("cpu", torch.bfloat16):
            strategy.run_as_forward("compute_loss", {"input_ids": ids, "labels": ids})
    # attention, MLP or experts; the last norm
    assert sent.calls["all_gather bfloat16"] == 2 * len(module.network.blocks) + 1, sent.calls
    assert "all_gather float32" not in sent.calls, sent.calls


class Seen(Exception):
    """Ends the compilation: on a CPU the operators do not run."""


@pytest.mark.ci
@pytest.mark.parametrize("overlaps", [True, False])
def test_compiled_products_and_their_messages_become_one_operator(overlaps, monkeypatch):
    operators = []
    plain = compile_fx.post_grad_passes

    def noted(graph, *arguments):
        plain(graph, *arguments)
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        raise Seen

    monkeypatch.setattr(compile_fx, "post_grad_passes", noted)
    strategy = HybridParallel(tensor=2, sequence=2, loss_parallel=False, async_tensor=overlaps)
    with _test_mode(), config.patch(force_disable_caches=True), shards(network, strategy, 0, 2) as module:
        assert config._micro_pipeline_tp is overlaps
        block, inputs = block_and_inputs(module, 8)
        block.forward = torch.compile(block.forward)
        with pytest.raises(BackendCompilerFailed, match="Seen"):
            block(*inputs)
        strategy.teardown()
    assert config._micro_pipeline_tp is False
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):  # of attention and MLP
        assert sum(name in operator for operator in operators) == 2 * overlaps, operators
