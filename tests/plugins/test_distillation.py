"""Distillation against trl's generalised Jensen-Shannon loss; its teacher is read, frozen and left out of checkpoints."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from core.errors import ConfigError
from plugins.checkpoints.initial_weights import tokenizer_of
from plugins.cli.runs.run_record import _check_tokenizer
from plugins.cli.selection import describe
from plugins.commands.export import export
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.objectives.balanced_routing import BalancedRouting
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.distillation import DIVERGENCES, Distillation, load_teacher, open_teacher
from tests.support.largest_tensor import LargestTensor
from tests.support.stored_networks import FAMILIES, lively_network, store
from tests.support.tiny_training import fit, module, uneven_batches
from tests.support.trl_losses import STORED, Given, batch, ours
from toolkit.initial_values import draw_part, named
from toolkit.safetensors_files import LazyTensor
from toolkit.selection import Run

ARGUMENTS = FAMILIES["Llama"][1] | {"vocab_size": 61}


@pytest.fixture
def teacher(tmp_path):
    return str(store(lively_network(Llama, ARGUMENTS), ARGUMENTS, tmp_path / "teacher.ckpt"))


class Taught(Given):
    """The teacher of the stored losses."""

    def __call__(self, batch):
        return batch["taught"]


@pytest.mark.parametrize("chunk_tokens", [5, 1000])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_value_and_gradient_are_those_of_trl(divergence, chunk_tokens, teacher):
    """Which does not multiply by the square of the temperature."""
    objective = Distillation(teacher, divergence, temperature=1.5, chunk_tokens=chunk_tokens)
    objective.teacher = lambda network, device: Taught()
    loss, figures, gradient = ours(objective)
    value, of_words = json.loads(STORED.read_text())["losses"][divergence]
    assert loss.mean.item() == pytest.approx(1.5**2 * value, rel=1e-12)
    assert figures["divergence"].mean.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(
        gradient.sum(1), 1.5**2 * torch.tensor(of_words, dtype=torch.float64), rtol=1e-9, atol=1e-14
    )


def test_labels_are_mixed_in(teacher):
    objective = Distillation(teacher, temperature=2.0, label_weight=0.25)
    objective.teacher = lambda network, device: Taught()
    loss, figures, _ = ours(objective)
    given = batch()
    plain = F.cross_entropy(given["logits"].flatten(0, 1), given["labels"].flatten())
    assert figures["cross_entropy"].mean.item() == pytest.approx(plain.item(), rel=1e-12)
    expected = 0.25 * plain + 0.75 * 4 * figures["divergence"].mean
    assert loss.mean.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_network_that_is_its_teacher_has_nothing_to_learn(teacher):
    network = lively_network(Llama, ARGUMENTS)
    given = uneven_batches(1)[0]
    for divergence in DIVERGENCES:
        loss, _ = Distillation(teacher, divergence).loss(network, given)
        assert abs(loss.mean.item()) < 1e-6  # log-softmax in float32
    loss, figures = Distillation(teacher).eval().loss(network, given)
    assert (loss.total.item(), figures) == (
        pytest.approx(CausalLM().loss(network, given)[0].total.item(), rel=1e-6),
        {},
    )


def test_the_teacher_is_neither_trained_nor_saved_and_draws_no_random_numbers(teacher, tmp_path):
    objective = Distillation(teacher)
    trained = module(lambda: GPT(61, 1, 2, 16, 24), objective=objective)
    before = lively_network(Llama, ARGUMENTS).state_dict()
    fit(tmp_path, trained, uneven_batches(3), max_epochs=1)
    assert not objective.state_dict()
    assert not list(objective.parameters())
    after = objective.teacher(trained.network, torch.device("cpu"))
    assert not after.training
    assert not any(weight.requires_grad for weight in after.parameters())
    assert all(torch.equal(value, before[name]) for name, value in after.state_dict().items())
    state = torch.get_rng_state()
    Distillation(teacher).loss(trained.network, uneven_batches(1)[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_hugging_face_folder_is_a_teacher(teacher, tmp_path):
    folder = tmp_path / "hf"
    assert export(["--ckpt_path", teacher, "--output", str(folder)]) == 0
    given = uneven_batches(1)[0]
    network = GPT(61, 1, 2, 16, 24)
    one, other = (Distillation(path).loss(network, given)[0].total for path in (teacher, str(folder)))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert_read_by_parts(*open_teacher(folder), load_teacher(folder))


def assert_read_by_parts(network, starts, whole):
    for name, tensor in named(whole):
        start, first = starts[name], len(tensor) // 2
        if isinstance(start, LazyTensor):
            start = replace(start, read=pytest.fail)  # of all of it
        part = torch.empty_like(tensor[first:])
        draw_part(part, start, 0, name, tensor.shape, (first, *[0] * (tensor.ndim - 1)))
        assert torch.equal(part, tensor[first:])
    assert all(tensor.is_meta for _, tensor in named(network))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_strategy_gets_it_on_the_meta_device_with_what_it_is_read_from(sharded, tmp_path):
    arguments = ARGUMENTS | {"tie_embeddings": True}
    # of a run on tokens: without a tokenizer
    path = store(lively_network(Llama, arguments), arguments, tmp_path / "some.ckpt", sharded, data=False)
    objective = Distillation(str(path))
    network, starts = objective.frozen_network(GPT(61, 1, 2, 16, 24))
    assert objective.teacher(None, None) is network
    assert not network.training
    assert not any(weight.requires_grad for weight in network.parameters())
    for name, tensor in named(load_teacher(path)):
        found = torch.empty_like(tensor)
        draw_part(found, starts[name], 0, name)
        assert torch.equal(found, tensor), name
    with pytest.raises(ConfigError, match="has 61 token ids, the network 62"):
        objective.frozen_network(GPT(62, 1, 2, 16, 24))


class Drawing(Llama):
    """Does not say how it begins."""

    deferred_init = False


def test_a_network_that_does_not_say_how_it_begins_is_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("LEYDEN_TRUST", Drawing.__module__)
    path = store(lively_network(Drawing, ARGUMENTS), ARGUMENTS, tmp_path / "drawing.ckpt")
    network, starts = open_teacher(path)
    whole = dict(named(load_teacher(path)))
    assert starts.keys() == whole.keys() == dict(named(network)).keys()
    assert all(torch.equal(starts[name], value) for name, value in whole.items())


def test_another_vocabulary_and_a_path_that_is_not_there_are_explained(teacher, tmp_path):
    with pytest.raises(
        ConfigError, match=r"has 61 token ids, the network 62.*\n.*--model.network.vocab_size=61"
    ):
        Distillation(teacher).loss(GPT(62, 1, 2, 16, 24), uneven_batches(1)[0])
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        Distillation(nowhere).loss(GPT(61, 1, 2, 16, 24), uneven_batches(1)[0])
    own = describe("model.objective", Distillation, "x.Distillation", {"teacher": nowhere})
    assert list(Distillation.preflight(Run((own,)), own)) == [
        f"teacher is {nowhere}: there is no such file or folder"
    ]
    assert not list(Distillation.preflight(Run((own,), offline=True), own))


def test_a_teacher_with_another_tokenizer_is_refused(teacher, tmp_path):
    objective = Distillation(teacher)
    own = tokenizer_of(objective.path)
    objective.check_tokenizer(own)
    grown = Tokenizer.from_str(own)
    grown.add_tokens(["one more"])
    objective.check_tokenizer(grown.to_str())  # ids that both know mean the same
    swapped = json.loads(own)
    vocabulary = swapped["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    with pytest.raises(
        ConfigError, match=r"another tokenizer than the data: .* 2 mean another token.*\n.*data.tokenizer"
    ):
        objective.check_tokenizer(json.dumps(swapped))
    folder = tmp_path / "damaged"
    assert export(["--ckpt_path", teacher, "--output", str(folder)]) == 0
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="damaged has a damaged tokenizer"):
        Distillation(str(folder)).check_tokenizer(own)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_run_that_trains_has_its_objective_compare_the_tokenizers(stage, teacher):
    class Data:
        tokenizer_json = "{}"

    run = SimpleNamespace(datamodule=Data(), state=SimpleNamespace(fn=stage))
    trained = module(objective=BalancedRouting(Distillation(teacher)))
    if stage == "fit":
        with pytest.raises(ConfigError, match="Distillation"):
            _check_tokenizer(run, trained)
    else:
        _check_tokenizer(run, trained)  # validation has no use for the teacher


def test_no_tensor_holds_all_logits(tmp_path):
    large = ARGUMENTS | {"vocab_size": 1000}
    path = str(store(lively_network(Llama, large), large, tmp_path / "large.ckpt"))
    tokens = torch.randint(1000, (16, 65), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    network, objective = GPT(1000, 1, 2, 8, 64), Distillation(path, chunk_tokens=32)
    objective.teacher(network, torch.device("cpu"))
    with LargestTensor() as largest:
        objective.loss(network, given)[0].mean.backward()
    assert (
        largest.bytes < 4 * 1000 * 16 * 64 / 8
    )  # all logits over 8; the largest are the teacher's hidden states


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"divergence": "backward"}, "one of forward, reverse"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"label_weight": 1.5}, "label_weight from 0 to 1"),
        ({"chunk_tokens": 0}, "chunk_tokens from 1"),
    ],
)
def test_values_out_of_range_are_refused(arguments, said, teacher):
    with pytest.raises(ConfigError, match=said):
        Distillation(teacher, **arguments)
