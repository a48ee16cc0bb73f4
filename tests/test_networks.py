"""The sizes of published networks: parameters and FLOPs of configs/networks, on the meta device."""

from pkgutil import resolve_name

import pytest
import torch
import yaml

from core import catalog
from tests.conftest import HOUSE
from tests.support.sparse_models import published
from toolkit.routing import RoutesTokens

FOLDER = HOUSE / "configs" / "networks"

PARAMETERS = {  # as published with the weights; tied heads are counted once
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # published with the biases of routers, which are buffers here
    "bert-base": 109_514_298,
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1558m": 1_557_611_200,
    "gpt3-175b": (50257 + 2048 + 2 + 96 * 13) * 12288 + 96 * 12 * 12288**2,  # its table 2.1 says 175.0B
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mamba2-130m": 128_989_632,
    "mixtral-8x7b": 46_702_792_704,
    "olmo2-1b": 1_484_916_736,
    "olmo-hybrid-7b": 7_430_870_688,  # of OlmoHybridConfig's defaults, which are the checkpoint's
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
    "t5-small": 60_506_624,
}

ACTIVE = {  # as published, in billions: parameters that a token passes
    "mixtral-8x7b": 12.9,
    "olmoe-1b-7b": 1.3,
    "qwen3-30b-a3b": 3.3,
}

TRAINING = {  # floating-point operations and tokens of the published training, without those of attention's scores
    "gpt3-175b": (3.14e23, 300e9, "arXiv:2005.14165, table D.1"),
    "llama3-405b": (3.8e25, 15.6e12, "arXiv:2407.21783, section 3.2"),
}


def arguments_of(name):
    network = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))["model"]["network"]
    return catalog.find(network["class_path"], "networks").load(), network["init_args"]


def built(name):
    network_class, arguments = arguments_of(name)
    with torch.device("meta"):
        return network_class(**arguments)


def idle(network):
    """Returns how many weights of experts a token does not pass."""
    if not isinstance(network, RoutesTokens):
        return 0
    router, stacks = network.routers[0], network.expert_stacks
    weights = sum(weight.numel() for stack in stacks for weight in stack.parameters())
    return weights - weights * router.experts_per_token // len(router.weight)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_passes_as_many_weights_as_published(name):
    assert (PARAMETERS[name] - idle(built(name))) / 1e9 == pytest.approx(ACTIVE[name], abs=0.06)


def test_a_token_of_deepseek_passes_37_billion_weights_that_multiply():
    network = built("deepseek-v3")
    active = PARAMETERS["deepseek-v3"] - idle(network) - network.embed_tokens.weight.numel()
    assert round(active / 1e9) == 37


def test_each_network_has_its_numbers_here():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_that_were_published(name):
    network = built(name)
    assert sum(parameter.numel() for parameter in network.parameters()) == PARAMETERS[name]


RECURRENT = {"mamba2-130m", "olmo-hybrid-7b"}
"""Of these tests/plugins/networks/test_hybrid.py counts operations."""


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in RECURRENT])
def test_flops_are_six_for_each_weight_that_multiplies_and_twelve_for_each_score(name):
    network = built(name)
    vectors = sum(p.numel() for p in network.parameters() if p.ndim == 1)
    tables = sum(m.weight.numel() for m in network.modules() if isinstance(m, torch.nn.Embedding))
    head = network.vocab_size * network.n_embd * (network.lm_head is None)
    weights = PARAMETERS[name] - vectors - tables + head - idle(network)
    attentions = network.n_layer + 2 * getattr(network, "n_decoder_layer", 0)
    heads = network.head_dim + getattr(network, "value_dim", network.head_dim)
    scores = 6 * attentions * network.n_head * heads * 1024
    assert network.flops_per_token(1024) == 6 * weights + scores


@pytest.mark.parametrize("name", TRAINING)
def test_flops_of_the_training_are_those_that_were_published(name):
    flops, tokens, _ = TRAINING[name]
    network = built(name)
    scores = 12.0 * network.n_layer * network.n_head * network.head_dim
    assert (network.flops_per_token(1) - scores) * tokens == pytest.approx(flops, rel=0.01)


LARGE = [pytest.param("deepseek-v3", marks=pytest.mark.ci)]  # 45,000 tensors


@pytest.mark.parametrize("name", [*(name for name in PARAMETERS if name != "deepseek-v3"), *LARGE])
def test_transformers_builds_the_same_parameters_from_our_config(name):
    import transformers

    network_class, arguments = arguments_of(name)
    network = built(name)
    values = network_class.hugging_face.config(network_class, arguments)
    assert network_class.hugging_face.init_args(values).items() >= arguments.items()
    [architecture] = values.pop("architectures")
    config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
    with torch.device("meta"):
        reference = resolve_name(f"transformers.{architecture}")(config)
    files = published(reference.state_dict(), mixtral=network_class.hugging_face.model_type == "mixtral")
    theirs = {key: tensor.shape for key, tensor in files.items()}
    ours = {key: tensor.shape for key, tensor in network.state_dict().items()}
    tied = set(network.hugging_face.copies) if network.lm_head is None else set()
    plan = network_class.hugging_face.tensors(ours)
    assert {stored.theirs for stored in plan} == set(theirs) - tied
    for stored in plan:
        rows = sum(ours[key][0] for key in stored.ours)
        shape = (rows, *ours[stored.ours[0]][1:]) if stored.index is None else ours[stored.ours[0]][1:]
        assert theirs[stored.theirs] == (shape[::-1] if stored.transposed else shape)
