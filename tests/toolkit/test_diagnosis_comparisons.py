"""What is compared with leyden's own parts: networks, objectives, rows and initial weights, against closed forms."""

import copy
from types import SimpleNamespace

import pytest
import torch

from core.contracts import IGNORED_LABEL, Objective, TokenSum
from plugins.objectives.balanced_routing import BalancedRouting
from plugins.objectives.causal_lm import CausalLM
from tests.support.tiny_training import tiny_gpt, uneven_batches
from toolkit.diagnosis import Case, History, objective_departures
from toolkit.diagnosis.comparisons import initial_figures
from toolkit.diagnosis.foreign import KINDS
from toolkit.diagnosis.network_comparison import NetworkComparison
from toolkit.diagnosis.plain import PlainParts
from toolkit.diagnosis.row_comparison import compare
from toolkit.diagnosis.step_comparison import StepSize


def compared(change=lambda network: None, objective=None, **options):
    """Returns the figures of a network that was changed, beside its copy."""
    torch.manual_seed(0)
    own = tiny_gpt(position="rotary", **options)
    live = copy.deepcopy(own)
    change(live)
    module = SimpleNamespace(network=live, objective=objective or CausalLM(), device=torch.device("cpu"))
    found = NetworkComparison(module, own, CausalLM()).figures(uneven_batches(1, rows=4)[0])
    return {name.removeprefix("doctor/"): value for name, value in found.items()}


def kind(found):
    return KINDS[int(found["part_kind"])]


def test_a_network_is_bitwise_its_own_copy():
    found = compared(dropout=0.3)
    assert found["forward_apart"] == found["forward_apart_evaluating"] == found["backward_apart"] == 0.0
    assert (found["objective_factor"], found["objective_rest"]) == (1.0, 0.0)
    assert {f"usual_{name[4:]}": value for name, value in found.items() if name.startswith("own_")} == {
        name: value for name, value in found.items() if name.startswith("usual_")
    }


def test_the_part_that_differs_is_found():
    def alone(network):
        attention = network.blocks[1].attention
        attention.attend = lambda q, k, v, *_, **__: v

    def silent(network):
        network.blocks[0].mlp.register_forward_hook(lambda module, inputs, x: 0 * x)

    def dropping(network):
        network.embed_tokens.register_forward_hook(lambda module, _, x: 0 * x if module.training else None)

    found = compared(alone)
    assert kind(found) == "attention"
    assert found["own_reach"] < 0.02 < 0.9 < found["usual_reach"]  # each token sees itself alone
    found = compared(silent)
    assert (kind(found), found["part_size"]) == ("mlp", 0.0)
    found = compared(dropping)
    assert kind(found) == "embedding"
    assert found["forward_apart"] > 0.5
    assert found["forward_apart_evaluating"] == 0.0


@pytest.mark.parametrize("gain", [0.0, 0.01, 100.0])
def test_a_backward_pass_that_differs_is_found(gain):
    """A block hands on so many times its gradient: what lies below gets so many times its own, but for the head's share."""

    def change(network):
        def amplify(block, inputs):
            x, *others = inputs
            return (x.detach() + gain * (x - x.detach()), *others)

        network.blocks[1].register_forward_pre_hook(amplify)

    found = compared(change, tie_embeddings=False)
    assert found["forward_apart"] < 1e-6
    if gain:
        assert found["backward_least" if gain < 1 else "backward_most"] == pytest.approx(gain, rel=1e-3)
        assert found["backward_lost"] == 0.0
    else:
        assert found["backward_lost"] > 0.3
    assert found["backward_holes"] == 0.0


class Changed(CausalLM):
    """A loss with a factor, of other labels, or with a term that rewards large logits."""

    def __init__(self, factor=1.0, shift=0, reward=0.0):
        super().__init__()
        self.factor, self.shift, self.reward = factor, shift, reward

    def loss(self, network, batch):
        labels = batch["labels"].roll(-self.shift, 1)
        loss, figures = super().loss(network, {**batch, "labels": labels})
        logits = network.logits(network(batch))
        total = self.factor * loss.total - self.reward * logits.square().sum()
        return TokenSum(total, loss.tokens, loss.weight), figures


def test_an_objective_that_differs_is_known_by_its_gradient():
    found = compared(objective=Changed(factor=3.0))
    assert found["objective_factor"] == pytest.approx(3.0, rel=1e-5)
    assert found["objective_rest"] < 1e-5
    assert compared(objective=CausalLM(l2=0.1))["objective_of_weights"] > 0.9
    found = compared(objective=Changed(reward=0.01))
    assert found["objective_of_weights"] < 0.0
    assert found["objective_slope"] < 0
    assert found["objective_labelled"] >= 1.0
    assert found["objective_rest"] > 0.01


class Own(Objective):
    """Next-token prediction by hand, or of a part that it makes itself or is given; its gradient is 3 times as large, or its labels move."""

    def __init__(self, objective=None, shift=0, inside=None):
        super().__init__()
        self.shift = shift
        if objective is not None:
            self.part = objective
        elif inside:
            self.part = CausalLM(z_loss=inside)

    def loss(self, network, batch):
        if hasattr(self, "part"):
            loss, _ = self.part.loss(network, batch)
            return TokenSum(3 * loss.total, loss.tokens), {}
        logits, labels = network.logits(network(batch)), batch["labels"].roll(-self.shift, 1)
        labels[:, labels.shape[1] - self.shift :] = IGNORED_LABEL
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return TokenSum(total if self.shift else 3 * total, (labels != IGNORED_LABEL).sum()), {}


def configured(part, **arguments):
    path = f"{part.__module__}.{part.__name__}" if part in (Own, Changed) else part.__name__
    return {"class_path": path, "init_args": arguments}


FORMS = {
    "from Objective": (lambda: Own(), configured(Own), True),
    "derived": (lambda: Changed(factor=3.0), configured(Changed, factor=3.0), False),
    "around a part": (lambda: Own(CausalLM(z_loss=0.1)), configured(Own, objective=configured(CausalLM, z_loss=0.1)), False),
    "makes a part": (lambda: Own(inside=0.1), configured(Own, inside=0.1), False),
    "within a part": (
        lambda: BalancedRouting(Own()),
        configured(BalancedRouting, objective=configured(Own)),
        True,
    ),
    "labels move": (lambda: Own(shift=1), configured(Own, shift=1), True),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_own_objective_is_compared(form):
    build, config, is_supposed = FORMS[form]
    torch.manual_seed(0)
    network = tiny_gpt(position="rotary")
    module = SimpleNamespace(network=network, objective=build(), device=torch.device("cpu"))
    case = Case(History(), {"model": {"objective": config}})
    plain = PlainParts(case, SimpleNamespace(callbacks=[], precision_plugin=None), module)
    objective, supposed = plain.objective()
    assert supposed == is_supposed
    if form == "within a part":
        assert type(objective.objective) is CausalLM
        return
    ids = torch.randint(0, network.vocab_size, (4, 13))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    for own in (
        copy.deepcopy(network),
        None,
    ):  # where leyden's network cannot be built, the objectives are compared alone
        figures = NetworkComparison(module, own, objective, supposed).figures(batch)
        history = History()
        history.add(1, figures)
        [finding] = objective_departures.objective(Case(history, case.config))
        if form == "labels move":
            assert finding.cause == "labels_shifted"
        else:
            assert finding.cause == "gradient_scale"
            assert figures["doctor/objective_factor"] == pytest.approx(3.0, rel=1e-5)


def test_rows_are_compared_position_by_position():
    ids = torch.arange(24).view(2, 12)
    documents = torch.tensor([[0] * 6 + [1] * 6] * 2)
    expected = {"input_ids": ids, "labels": ids + 1, "document_ids": documents}
    expected["position_ids"] = torch.arange(12).expand(2, -1) % 6
    same = compare({**expected, "document_ids": documents + 5}, expected)
    assert not any(same.values())
    few = {**expected, "labels": expected["labels"].clone()}
    few["labels"][0, :6] = IGNORED_LABEL
    few["labels"][1, 0] = 0
    found = compare(few, expected)
    assert (found["doctor/rows_labels_missing"], found["doctor/rows_labels_other"]) == (6 / 24, 1 / 24)
    found = compare({**expected, "document_ids": torch.zeros_like(documents)}, expected)
    assert (found["doctor/rows_joined"], found["doctor/rows_parted"]) == (1.0, 0.0)
    found = compare({**expected, "position_ids": torch.arange(12).expand(2, -1)}, expected)
    assert found["doctor/rows_positions"] == 0.5
    found = compare({**expected, "input_ids": ids.flip(0)}, expected)
    assert found == {"doctor/rows_other": 1.0}


def test_initial_weights_are_those_of_the_configuration_or_not():
    torch.manual_seed(0)
    own, live = tiny_gpt(n_embd=64), tiny_gpt(n_embd=64)
    usual = initial_figures(live, own)
    assert usual["doctor/initial_size"] < 1.2
    assert usual["doctor/initial_center"] < 0.2
    assert usual["doctor/initial_form"] < 0.1
    assert usual["doctor/initial_alike"] == 0.0
    with torch.no_grad():
        live.blocks[0].mlp.up_proj.weight.mul_(3)
        live.blocks[1].attention.q_proj.weight.copy_(live.blocks[0].attention.q_proj.weight)
        live.embed_tokens.weight.add_(0.02)
    found = initial_figures(live, own)
    assert found["doctor/initial_size"] == pytest.approx(3.0, rel=0.1)
    assert found["doctor/initial_center"] == pytest.approx(1.0, rel=0.2)
    assert found["doctor/initial_alike"] == 1.0


@torch.no_grad()
def test_what_is_taken_back_of_a_step_is_measured():
    network = torch.nn.Linear(4, 4, bias=False)
    size = StepSize(SimpleNamespace(network=network))
    first = network.weight.clone()
    for kept in (0.02, 1.0):
        size.begin()
        before = network.weight.clone()
        network.weight.mul_(1.1)
        [step] = size.figures().values()
        assert step == pytest.approx(0.1, rel=1e-5)
        if kept < 1:
            network.weight.copy_(before + kept * 0.1 * before)
        found = [*size.taken_back().values()]
        assert found == (pytest.approx([1 - kept, 1.0], rel=1e-4) if kept < 1 else [])
    assert torch.allclose(network.weight, 1.1 * 1.002 * first)
