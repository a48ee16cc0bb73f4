import itertools
import math

import jsonargparse
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conformance.runs import on_ranks
from core.contracts import Network
from core.errors import ConfigError
from core.technique import declaration_of
from plugins.networks.gpt import GPT
from plugins.networks.parts.positions import rotate, sinusoid_table

POSITIONS = ("learned", "sinusoidal", "rotary")
TINY = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32, "max_sequence_length": 24}
LLAMA = {
    "n_kv_head": 2,
    "position": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "tie_embeddings": False,
    "bias": False,
}


def tokens(batch_size=2, length=24, vocab_size=61, seed=0):
    return torch.randint(vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def lively(network, seed=0):
    """Replaces the small initial weights by ones that make attention and activations far from linear."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            embedding = any(word in name for word in ("embed", "wte", "wpe"))
            parameter.normal_(std=0.3 if embedding else 0.15, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):  # a norm's
                parameter.add_(1)
    return network.eval()


def all_tensors(network):
    return dict(network.named_parameters()) | dict(network.named_buffers())


# Size and numbers against the models of others


def test_has_as_many_parameters_as_the_published_124m_model():
    with torch.device("meta"):
        network = GPT()
    assert sum(parameter.numel() for parameter in network.parameters()) == 124_439_808


def test_swiglu_width_is_eight_thirds_rounded_up_to_64():
    with torch.device("meta"):
        assert GPT(activation="swiglu").layers[0].mlp.up_proj.out_features == 2048
        assert GPT(activation="swiglu", n_embd=780).layers[0].mlp.up_proj.out_features == 2112
        assert GPT(n_embd=780).layers[0].mlp.up_proj.out_features == 3120


def copy_gpt2(source, network):
    """Copies transformers' GPT-2 weights: its Conv1D holds (in, out), and q, k, v side by side."""
    theirs, ours = source.state_dict(), {}
    ours["embed_tokens.weight"] = theirs["transformer.wte.weight"]
    ours["embed_positions.weight"] = theirs["transformer.wpe.weight"]
    for kind in ("weight", "bias"):
        ours[f"norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for i in range(network.n_layer):
            old, new = f"transformer.h.{i}", f"layers.{i}"
            ours[f"{new}.attention_norm.{kind}"] = theirs[f"{old}.ln_1.{kind}"]
            ours[f"{new}.mlp_norm.{kind}"] = theirs[f"{old}.ln_2.{kind}"]
            q, k, v = theirs[f"{old}.attn.c_attn.{kind}"].chunk(3, dim=-1)
            names = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": theirs[f"{old}.attn.c_proj.{kind}"]}
            for name, value in names.items():
                ours[f"{new}.attention.{name}.{kind}"] = value.t()
            ours[f"{new}.mlp.up_proj.{kind}"] = theirs[f"{old}.mlp.c_fc.{kind}"].t()
            ours[f"{new}.mlp.down_proj.{kind}"] = theirs[f"{old}.mlp.c_proj.{kind}"].t()
    network.load_state_dict(ours)


@pytest.mark.parametrize(("theirs", "ours"), [("gelu_new", "gelu_tanh"), ("gelu", "gelu"), ("relu", "relu")])
def test_logits_equal_those_of_transformers_gpt2(theirs, ours):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=61, n_positions=24, n_embd=32, n_layer=3, n_head=4, activation_function=theirs
    )
    reference = lively(GPT2LMHeadModel(config))
    network = GPT(**{**TINY, "n_layer": 3}, activation=ours).eval()
    copy_gpt2(reference, network)
    with torch.no_grad():
        expected = reference(tokens()).logits
        actual = network.logits(network({"input_ids": tokens()}))
    assert expected.std() > 0.5
    assert (actual - expected).abs().max() < 1e-5


def test_logits_equal_those_of_transformers_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    reference = lively(LlamaForCausalLM(config))
    network = GPT(**{**TINY, "n_layer": 3}, **LLAMA, intermediate_size=96, rope_theta=500.0).eval()
    renamed = {
        "self_attn": "attention",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
    }
    weights = {}
    for name, value in reference.state_dict().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        weights[name.removeprefix("model.")] = value
    network.load_state_dict(weights)
    with torch.no_grad():
        expected = reference(tokens()).logits
        actual = network.logits(network({"input_ids": tokens()}))
    assert expected.std() > 0.5
    assert (actual - expected).abs().max() < 1e-5


def test_post_norm_block_equals_torch_transformer_encoder_layer():
    network = lively(GPT(**TINY, norm_position="post", activation="relu"))
    ours = network.blocks[0]
    reference = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, activation="relu", batch_first=True)
    qkv = (ours.attention.q_proj, ours.attention.k_proj, ours.attention.v_proj)
    with torch.no_grad():
        reference.self_attn.in_proj_weight.copy_(torch.cat([linear.weight for linear in qkv]))
        reference.self_attn.in_proj_bias.copy_(torch.cat([linear.bias for linear in qkv]))
        reference.self_attn.out_proj.load_state_dict(ours.attention.o_proj.state_dict())
        reference.linear1.load_state_dict(ours.mlp.up_proj.state_dict())
        reference.linear2.load_state_dict(ours.mlp.down_proj.state_dict())
        reference.norm1.load_state_dict(ours.attention_norm.state_dict())
        reference.norm2.load_state_dict(ours.mlp_norm.state_dict())
        x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0))
        mask = nn.Transformer.generate_square_subsequent_mask(24)
        expected = reference(x, src_mask=mask, is_causal=True)
        assert (ours(x, None, None, None) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_pre_normalises_after_the_blocks_and_post_before_them(norm_position):
    network = GPT(**TINY, norm_position=norm_position)
    entering = []
    network.blocks[0].register_forward_pre_hook(lambda module, args: entering.append(args[0].std(-1).mean()))
    hidden = network({"input_ids": tokens()})
    torch.testing.assert_close(hidden.std(-1, correction=0), torch.ones(2, 24), atol=0.05, rtol=0)
    assert (entering[0] > 0.5) == (norm_position == "post")
    with torch.device("meta"):
        assert (
            sum(parameter.numel() for parameter in GPT(norm_position=norm_position).parameters())
            == 124_439_808
        )


def test_sinusoids_follow_their_closed_form():
    table = sinusoid_table(20, 8, 10000.0)
    for position, i in itertools.product(range(20), range(4)):
        angle = position / 10000 ** (2 * i / 8)
        assert table[position, i].item() == pytest.approx(math.sin(angle), abs=1e-12)
        assert table[position, i + 4].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_sinusoidal_network_adds_them_to_scaled_embeddings():
    network = lively(GPT(**TINY, position="sinusoidal"))
    seen = []
    network.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    network({"input_ids": tokens()})
    expected = network.embed_tokens(tokens()) * math.sqrt(32) + sinusoid_table(24, 32, 10000.0).float()
    torch.testing.assert_close(seen[0], expected)


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    q, k = torch.randn(2, 16, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    table = sinusoid_table(100, 16, 10000.0).float()
    turned_q, turned_k = (rotate(x.expand(1, 1, 100, 16), table)[0, 0] for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(100))
    scores = turned_q @ turned_k.T
    assert scores.diagonal(-7).std() < 1e-5 < scores[:, 0].std()


# Masks, positions, cache


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("n_kv_head", [None, 2])
def test_packed_documents_give_the_same_hidden_states_as_each_alone(position, n_kv_head):
    network = lively(GPT(**TINY, position=position, n_kv_head=n_kv_head)).double()
    lengths = (9, 1, 14)
    packed = {
        "input_ids": tokens(),
        "document_ids": torch.repeat_interleave(torch.tensor([7, 3, 5]), torch.tensor(lengths)).expand(2, -1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).expand(2, -1),
    }
    with torch.no_grad():
        together = network(packed).split(lengths, dim=1)
        alone = [network({"input_ids": ids}) for ids in tokens().split(lengths, dim=1)]
        leaking = network({"input_ids": tokens()}).split(lengths, dim=1)
    for i in range(3):
        assert (together[i] - alone[i]).abs().max() < 1e-9
    assert (leaking[2] - alone[2]).abs().max() > 0.1


def test_no_token_sees_a_later_one():
    network = lively(GPT(**TINY))
    changed = tokens()
    changed[:, 10] = (changed[:, 10] + 1) % 61
    difference = (network({"input_ids": tokens()}) - network({"input_ids": changed})).abs().amax(dim=(0, 2))
    assert (difference[:10] == 0).all()
    assert (difference[10:] > 1e-3).all()


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("n_kv_head", [None, 2, 1])
def test_cache_gives_the_hidden_states_of_the_whole_sequence(position, n_kv_head):
    network = lively(GPT(**TINY, position=position, n_kv_head=n_kv_head))
    cache = network.new_cache(2, 24)
    with torch.inference_mode():
        expected = network({"input_ids": tokens()})
        pieces = tokens().split((7, 5, 1, 1, 1, 9), dim=1)  # a prefill, single tokens, several tokens at once
        actual = torch.cat([network({"input_ids": ids}, cache) for ids in pieces], dim=1)
    assert cache[0].length == 24
    assert cache[0].keys.shape == (2, n_kv_head or 4, 24, 8)
    assert (actual - expected).abs().max() < 1e-5


def test_cache_takes_the_data_type_of_autocast():
    network = lively(GPT(**TINY, position="rotary"))
    cache = network.new_cache(2, 24)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = network({"input_ids": tokens()})
        pieces = [network({"input_ids": ids}, cache) for ids in tokens().split((20, 1, 3), dim=1)]
    assert cache[0].keys.dtype == torch.bfloat16
    assert (torch.cat(pieces, dim=1) - expected).abs().max() < 0.1


@pytest.mark.parametrize("position", POSITIONS)
def test_dropout_is_active_in_training_and_off_in_evaluation(position):
    torch.manual_seed(0)
    network, batch = GPT(**TINY, position=position, dropout=0.2), {"input_ids": tokens()}
    plain = GPT(**TINY, position=position).eval()
    plain.load_state_dict(network.state_dict())
    assert not torch.equal(network(batch), network(batch))
    assert torch.equal(network.eval()(batch), plain(batch))


@pytest.mark.parametrize("where", ["embedding", "attention", "residual"])
def test_dropout_has_a_rate_for_each_place_and_dropout_is_that_of_the_others(where):
    batch = {"input_ids": tokens()}

    def hidden(**rates):
        network = lively(GPT(**TINY, **rates)).train()
        torch.manual_seed(1)
        return network(batch)

    def places(network):
        [layer, *_] = network.layers
        return {
            "embedding": network.dropout.p,
            "attention": layer.attention.dropout,
            "residual": layer.dropout.p,
        }

    one = {f"{where}_dropout": 0.3}
    assert places(GPT(**TINY, **one)) == dict.fromkeys(("embedding", "attention", "residual"), 0.0) | {
        where: 0.3
    }
    assert places(GPT(**TINY, dropout=0.1, **{f"{where}_dropout": 0.0}))[where] == 0.0
    assert not torch.equal(hidden(**one), hidden())
    # as `dropout` for all, and as the three for themselves: the same draws
    three = dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.2)
    assert torch.equal(hidden(dropout=0.2), hidden(**three))
    assert torch.equal(hidden(dropout=0.2), hidden(dropout=0.9, **three))


# Initialisation


def std(tensor):
    return tensor.double().std().item()


def test_normal_init_is_gpt2s():
    torch.manual_seed(0)
    network = GPT(vocab_size=1000, n_layer=3, n_head=4, n_embd=256, max_sequence_length=256)
    residual = 0.02 / math.sqrt(2 * 3)
    for name, parameter in network.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert (parameter == (1 if name.endswith("weight") else 0)).all()
        else:
            expected = residual if "o_proj" in name or "down_proj" in name else 0.02
            assert std(parameter) == pytest.approx(expected, rel=0.02), name
            assert abs(parameter.mean()) < 5 * expected / math.sqrt(parameter.numel())


def test_xavier_and_he_init_follow_their_formulas():
    torch.manual_seed(0)
    size = {
        "vocab_size": 1000,
        "n_layer": 1,
        "n_head": 4,
        "n_embd": 256,
        "n_kv_head": 2,
        "tie_embeddings": False,
    }
    xavier, he = GPT(**size, init="xavier"), GPT(**size, init="he")
    for network in (xavier, he):
        assert std(network.embed_tokens.weight) == pytest.approx(0.02, rel=0.02)
        assert (network.layers[0].mlp.up_proj.bias == 0).all()
    for name, linear in xavier.named_modules():
        if isinstance(linear, nn.Linear):
            fan_in, fan_out = linear.in_features, linear.out_features
            bound = math.sqrt(6 / (fan_in + fan_out))
            assert 0.99 * bound < linear.weight.abs().max() <= bound, name
            assert std(linear.weight) == pytest.approx(math.sqrt(2 / (fan_in + fan_out)), rel=0.02), name
            other = he.get_submodule(name).weight
            assert std(other) == pytest.approx(math.sqrt(2 / fan_in), rel=0.02), name
            assert other.abs().max() > 3 * math.sqrt(2 / fan_in)  # normal, not uniform


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("init", ["normal", "xavier", "he"])
def test_meta_then_init_weights_equals_direct_construction_bitwise(position, init):
    options = {**TINY, "position": position, "init": init, "norm": "rmsnorm" if init == "he" else "layernorm"}
    torch.manual_seed(3)
    direct = GPT(**options)
    torch.manual_seed(3)
    with torch.device("meta"):
        late = GPT(**options)
    assert all(tensor.is_meta for tensor in all_tensors(late).values())
    late.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in all_tensors(late).values():
            tensor.fill_(math.nan)
    late.init_weights()
    expected, actual = all_tensors(direct), all_tensors(late)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_tables_are_not_saved():
    assert "position_table" in all_tensors(GPT(**TINY, position="rotary"))
    assert not [name for name in GPT(**TINY, position="rotary").state_dict() if "table" in name]


# Every combination trains


COMBINATIONS = itertools.product(
    ("layernorm", "rmsnorm"), ("pre", "post"), POSITIONS, ("gelu", "gelu_tanh", "relu", "swiglu")
)


@pytest.mark.parametrize(("norm", "norm_position", "position", "activation"), list(COMBINATIONS))
def test_every_combination_gives_every_parameter_a_gradient(norm, norm_position, position, activation):
    torch.manual_seed(0)
    choices = {"norm": norm, "norm_position": norm_position, "position": position, "activation": activation}
    network = GPT(**TINY, **choices, n_kv_head=2, tie_embeddings=norm == "rmsnorm", dropout=0.1)
    hidden = network({"input_ids": tokens()})
    assert hidden.shape == (2, 24, 32)
    logits = network.logits(hidden)
    assert logits.shape == (2, 24, 61)
    F.cross_entropy(logits.flatten(0, 1), tokens(seed=1).flatten()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # A key bias shifts all scores of a query alike, unless it is rotated: its true gradient is 0.
        if position == "rotary" or not name.endswith("k_proj.bias"):
            assert parameter.grad.abs().max() > 1e-8, name


def test_tied_head_is_the_embedding_and_an_untied_one_is_not():
    tied, untied = GPT(**TINY), GPT(**TINY, tie_embeddings=False)
    assert tied.output_weight is tied.embed_tokens.weight
    assert untied.output_weight is untied.lm_head.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


# What strategies and callbacks ask


@pytest.mark.parametrize("options", [{}, {**LLAMA, "intermediate_size": 64}, {"tie_embeddings": False}])
def test_flops_per_token_equal_what_torch_counts(options):
    """Exact: plain attention multiplies the whole T x T square, as the formula does.

    The fused kernels would add a recomputation of the scores in backward, which is no model FLOP.
    """
    network = GPT(**TINY, **options)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network.logits(network({"input_ids": tokens()})).sum().backward()
    assert counter.get_total_flops() == network.flops_per_token(24) * 2 * 24


def test_flops_per_token_of_the_124m_model_in_closed_form():
    with torch.device("meta"):
        network = GPT()
    weights = 12 * 12 * 768**2 + 50257 * 768
    assert network.flops_per_token(1024) == 6 * weights + 12 * 12 * 768 * 1024


def test_blocks_are_the_layers_in_order():
    network = GPT(**TINY)
    assert isinstance(network, Network)
    assert list(network.blocks) == [network.layers[0], network.layers[1]]
    assert (network.vocab_size, network.max_sequence_length) == (61, 24)
    assert declaration_of(GPT) is not None


def test_tensor_parallel_plan_names_every_projection_of_the_blocks():
    network = GPT(**TINY, **LLAMA)
    plan = network.tensor_parallel_plan()
    linears = {name for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    inputs = {
        f"layers.{i}.{part}" for i in (0, 1) for part in ("attention", "mlp")
    }  # which projections share
    assert set(plan) == linears - {"lm_head"} | inputs
    rowwise = {name for name, style in plan.items() if type(style).__name__ == "RowwiseParallel"}
    assert rowwise == {f"layers.{i}.{leaf}" for i in (0, 1) for leaf in ("attention.o_proj", "mlp.down_proj")}


def _train_step_on_two_ranks(rank, file, options):
    from torch import distributed
    from torch.distributed.tensor.parallel import parallelize_module

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = distributed.init_device_mesh("cpu", (2,))
    whole, split = (lively(GPT(**options)) for _ in range(2))
    parallelize_module(split, mesh, split.tensor_parallel_plan())
    assert split.layers[0].attention.q_proj.weight.to_local().shape[0] == 16
    for network in (whole, split):
        network.logits(network({"input_ids": tokens()})).logsumexp(-1).sum().backward()
    for (name, expected), actual in zip(whole.named_parameters(), split.parameters(), strict=True):
        gradient = actual.grad.full_tensor() if hasattr(actual.grad, "full_tensor") else actual.grad
        torch.testing.assert_close(gradient, expected.grad, atol=1e-4, rtol=1e-4, msg=name)
    cache = split.new_cache(2, 24)
    with torch.no_grad():
        pieces = [split({"input_ids": ids}, cache) for ids in tokens().split((20, 1, 3), dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole({"input_ids": tokens()}), atol=1e-5, rtol=1e-5)
    distributed.destroy_process_group()


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.ci), LLAMA])
def test_tensor_parallel_plan_gives_the_same_gradients_on_two_ranks(tmp_path, options):
    on_ranks(_train_step_on_two_ranks, 2, tmp_path / "rendezvous", {**TINY, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "backend"),
    [({}, "aot_eager"), ({"position": "sinusoidal", "dropout": 0.1}, "aot_eager"), (LLAMA, "inductor")],
)
def test_compiles_without_graph_breaks(options, backend):
    torch.compiler.reset()
    torch.manual_seed(0)
    network, batch = GPT(**TINY, **options), {"input_ids": tokens()}
    packed = {
        **batch,
        "document_ids": tokens(seed=1).sort().values // 20,
        "position_ids": tokens(vocab_size=24),
    }
    compiled = torch.compile(network, fullgraph=True, backend=backend)
    compiled(batch).sum().backward()
    network.eval()
    for inputs in (batch, packed):
        torch.testing.assert_close(compiled(inputs), network(inputs), atol=1e-5, rtol=1e-5)


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_embd": 30}, "n_embd=30 is not divisible by n_head=4; 32 is"),
        ({"n_kv_head": 3}, "n_kv_head=3 does not divide n_head=4"),
        ({"position": "rotry"}, "position='rotry' is none of .* Did you mean rotary?"),
        ({"activation": "gelu_tan"}, "Did you mean gelu_tanh?"),
        ({"position": "rotary", "n_head": 32}, "an even n_embd / n_head, not 1"),
        ({"position": "sinusoidal", "n_head": 1, "n_embd": 31}, "an even n_embd, not 31"),
        ({"n_layer": 0}, "n_layer=0 must be at least 1"),
        ({"intermediate_size": -1}, "intermediate_size=-1"),
        ({"dropout": 1.0}, "GPT: dropout=1.0 must be"),
        ({"attention_dropout": -0.1}, "GPT: attention_dropout=-0.1 must be at least 0 and below 1"),
        ({"residual_dropout": math.nan}, "residual_dropout=nan"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        GPT(**{**TINY, **options})


def test_too_long_sequences_are_named():
    network = GPT(**TINY)
    with pytest.raises(ConfigError, match="25 tokens is longer than max_sequence_length, 24"):
        network({"input_ids": tokens(length=25)})
    cache = network.new_cache(2, 10)
    network({"input_ids": tokens(length=8)}, cache)
    with pytest.raises(ConfigError, match="11 tokens is longer than the cache's length, 10"):
        network({"input_ids": tokens(length=3)}, cache)
    assert network.new_cache(1, 1000)[0].max_length == 24
    with pytest.raises(ConfigError, match="document_ids cannot be used with a cache"):
        network({"input_ids": tokens(length=1), "document_ids": tokens(length=1)}, cache)


def test_is_chosen_by_short_name_and_its_arguments_are_json():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Network, "network")
    chosen = {"class_path": "GPT", "init_args": {**TINY, **LLAMA}}
    config = parser.parse_object({"network": chosen})
    again = parser.parse_string(parser.dump(config))
    network = parser.instantiate_classes(again).network
    assert isinstance(network, GPT)
    assert network.layers[0].attention.k_proj.out_features == 16
    with pytest.raises(jsonargparse.ArgumentError, match="rotry"):
        parser.parse_object({"network": {"class_path": "GPT", "init_args": {"position": "rotry"}}})
