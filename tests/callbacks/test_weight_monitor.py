"""WeightMonitor against norms taken weight by weight in float64; tests/distributed/test_monitors.py has the strategies."""

import math

import pytest
import torch

from callbacks.weight_monitor import WeightMonitor
from core.errors import ConfigError
from plugins.networks.mixtral import Mixtral
from tests.support.tiny_training import Record, fit, module, tiny_gpt, uneven_batches
from toolkit.network_parts import weight_groups

LEARNING_RATE = 0.5
CLIP = 0.1  # the smallest updates, those of norms, are then well above the rounding of their weights


class Weights(Record):
    """Keeps the weights before each optimizer step too."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self.weights.append([p.detach().clone() for p in pl_module.network.parameters()])


def norm(tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def test_the_norms_are_those_of_the_weights_gradients_and_updates(tmp_path):
    record, trained = Weights(), module(lambda: tiny_gpt(tie_embeddings=False))
    monitor = WeightMonitor(every_n_steps=2, detail=True)
    fit(
        tmp_path,
        trained,
        uneven_batches(8),
        [monitor, record],
        max_steps=4,
        accumulate_grad_batches=2,
        gradient_clip_val=CLIP,
    )
    names = [name for name, _ in trained.network.named_parameters()]
    gradients, weights = (
        dict(zip(names, kept[3], strict=True)) for kept in (record.gradients, record.weights)
    )
    clip = min(1.0, CLIP / (norm(gradients.values()) + 1e-6))
    members = {
        "block.1": [name for name in names if name.startswith("layers.1.")],
        "attention": [name for name in names if ".attention." in name],
        "mlp": [name for name in names if ".mlp." in name],
        "norm": [name for name in names if "_norm." in name],
        "block.0.mlp": [name for name in names if name.startswith("layers.0.mlp.")],
        "embedding": ["embed_tokens.weight", "embed_positions.weight"],
        "head": ["lm_head.weight"],
    }
    found = record.figures[3]
    for group, own in members.items():
        gradient, weight = norm(gradients[name] for name in own), norm(weights[name] for name in own)
        assert found[f"gradient_norm/{group}"] == pytest.approx(gradient, rel=1e-6), group
        assert found[f"weight_norm/{group}"] == pytest.approx(weight, rel=1e-6), group
        # SGD: the update is the clipped gradient times the rate; subtracting float32 weights of 0.02 to 1 rounds by 6e-8
        assert found[f"update_norm/{group}"] == pytest.approx(LEARNING_RATE * clip * gradient, rel=1e-3)
        ratio = found[f"update_norm/{group}"] / found[f"weight_norm/{group}"]
        assert found[f"update_ratio/{group}"] == pytest.approx(ratio, rel=1e-12)
    assert not any("_norm/" in name for name in record.figures[0])  # not the turn of step 1


def test_each_weight_is_of_one_kind_and_routers_and_frozen_weights_are_told_apart():
    sizes = dict(vocab_size=32, n_layer=2, n_head=2, n_kv_head=2, n_embd=8, intermediate_size=8, n_experts=4)
    network = Mixtral(**sizes, experts_per_token=2, max_sequence_length=8, tie_embeddings=True)
    network.layers[0].attention.requires_grad_(False)
    groups = weight_groups(network)
    kinds = [set(groups[kind]) for kind in ("attention", "mlp", "norm", "router")]
    assert sum(map(len, kinds)) == len(set.union(*kinds)) == len({**groups["block.0"], **groups["block.1"]})
    assert groups["router"].keys() == {f"layers.{index}.mlp.router.weight" for index in range(2)}
    assert all(name.startswith("layers.1.") for name in groups["attention"])
    assert groups["embedding"].keys() == {"embed_tokens.weight"}
    assert "head" not in groups  # tied


def test_an_interval_below_one_step_is_refused():
    with pytest.raises(ConfigError, match="every_n_steps >= 1, not 0"):
        WeightMonitor(every_n_steps=0)


def without_norms():
    network = tiny_gpt()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "_norm." in name:
                parameter.zero_()
    return network


def test_a_group_of_zeros_has_no_ratio(tmp_path):
    record = Record()
    callbacks = [WeightMonitor(every_n_steps=1), record]
    fit(tmp_path, module(without_norms), uneven_batches(1), callbacks, max_steps=1)
    assert record.figures[0]["weight_norm/norm"] == 0
    assert "update_ratio/norm" not in record.figures[0]
    assert "update_ratio/mlp" in record.figures[0]
