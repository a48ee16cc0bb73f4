"""The network that is checked before a run is the one that is trained, with the weights that its constructor draws."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from callbacks.activation_checkpointing import ActivationCheckpointing
from plugins.cli.runs.network_draft import NetworkDraft
from plugins.networks.gpt import GPT
from tests.support.tiny_training import tiny_gpt, trainer


class Longer(GPT):
    """Constructs more than GPT, and does not say that this leaves its values to `init_weights`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.more = torch.nn.Linear(3, 3)


class Turned(GPT):
    """Has a weight that is not contiguous."""

    deferred_init = True

    def __init__(self, **options):
        super().__init__(**options)
        self.turned = torch.nn.Parameter(torch.zeros(2, 3).t())


class Formatted(GPT):
    """Allocates its weights itself."""

    deferred_init = True

    def to_empty(self, *, device, recurse=True):
        return self._apply(
            lambda t: torch.empty_like(input=t, device=device, memory_format=torch.preserve_format), recurse
        )


class Constructing(SingleDeviceStrategy):
    """Takes part in the construction of modules."""

    def model_sharded_context(self):
        return nullcontext()


def longer():
    return Longer(vocab_size=61, n_layer=1, n_head=2, n_embd=16, max_sequence_length=24)


def seeded(build):
    """Returns what is built from a seed, and the next random number."""
    torch.manual_seed(5)
    return build(), torch.rand(1)


def assert_equal(one, other):
    states = one.state_dict(), other.state_dict()
    assert [*states[0]] == [*states[1]]
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name


@pytest.mark.parametrize("options", [{}, {"position": "rotary", "tie_embeddings": False, "init": "xavier"}])
def test_the_network_that_was_checked_gets_the_weights_of_its_constructor(tmp_path, options):
    draft = NetworkDraft(lambda: tiny_gpt(**options), trainer(tmp_path))
    checked = draft.network
    assert {tensor.device.type for tensor in checked.parameters()} == {"meta"}
    (found, after), (expected, next_number) = seeded(draft), seeded(lambda: tiny_gpt(**options))
    assert found is checked
    assert_equal(found, expected)
    assert torch.equal(after, next_number)
    if options:
        assert torch.equal(found.position_table, expected.position_table)
    assert_equal(seeded(draft)[0], expected)
    assert draft() is not checked


def test_on_ranks_without_weights_it_stays_on_the_meta_device(tmp_path):
    draft = NetworkDraft(tiny_gpt, trainer(tmp_path))
    checked = draft.network
    with torch.device("meta"):
        assert draft() is checked
    assert {tensor.device.type for tensor in checked.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (longer, {}),
        (tiny_gpt, {"callbacks": [ActivationCheckpointing()]}),
        (tiny_gpt, {"plugins": [HalfPrecision("bf16-true")]}),
        (tiny_gpt, {"strategy": Constructing(device=torch.device("cpu"))}),
    ],
    ids=["not-declared-by-its-class", "changed-by-a-callback", "precision-context", "strategy-context"],
)
def test_where_something_else_takes_part_it_is_built_in_its_place(tmp_path, build, options):
    draft = NetworkDraft(build, trainer(tmp_path, **options))
    checked = draft.network
    (found, after), (expected, next_number) = seeded(draft), seeded(build)
    assert found is not checked
    assert_equal(found, expected)
    assert torch.equal(after, next_number)


def test_a_weight_that_is_not_contiguous_keeps_its_strides(tmp_path):
    options = {"vocab_size": 61, "n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 24}
    draft = NetworkDraft(lambda: Turned(**options), trainer(tmp_path))
    checked = draft.network
    assert draft() is checked
    assert checked.turned.device.type == "cpu"
    assert checked.turned.stride() == (1, 3)


def test_a_network_may_allocate_its_weights_itself(tmp_path):
    options = {"vocab_size": 61, "n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 24}
    draft = NetworkDraft(lambda: Formatted(**options), trainer(tmp_path))
    assert {parameter.device.type for parameter in draft().parameters()} == {"cpu"}
