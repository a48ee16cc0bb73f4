"""Initial weights under a mesh of ranks: those of one process, of which each rank draws its shards and no more."""

import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from callbacks.padding_row import PaddingRow
from core.contracts import ChangesNetwork
from core.errors import ConfigError
from core.language_module import LanguageModule
from core.technique import technique
from plugins.adapters.bottleneck_adapter import BottleneckAdapter
from plugins.adapters.ia3 import IA3
from plugins.adapters.lora import LoRA
from plugins.adapters.p_tuning import PTuning
from plugins.adapters.prefix_tuning import PrefixTuning
from plugins.adapters.prompt_tuning import PromptTuning
from plugins.checkpoints.initial_weights import InitialWeights
from plugins.networks.gpt import GPT
from plugins.networks.olmoe import OLMoE
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.multi_token_prediction import MultiTokenPrediction
from plugins.objectives.ppo import PPO
from plugins.objectives.reward_model import RewardModel
from plugins.strategies.fsdp import FSDP
from plugins.strategies.hybrid_parallel import HybridParallel
from plugins.strategies.initial_shards import PREFIX, stand_in
from plugins.strategies.tensors import local_shard, named_tensors, part
from tests.conformance.broken.networks import Convolving
from tests.support.fake_ranks import shards
from tests.support.largest_tensor import LargestTensor
from tests.support.same_run import same_bits
from toolkit.initial_values import initial_values
from toolkit.new_weights import begin
from toolkit.positions import explain_position_mixing

DENSE = dict(vocab_size=520, n_layer=4, n_head=4, n_embd=64, max_sequence_length=32, position="rotary")
SPARSE = dict(vocab_size=520, n_layer=2, n_head=4, n_embd=32, intermediate_size=48, n_experts=8, experts_per_token=2, max_sequence_length=32)  # fmt: skip
HOUSE = Path(__file__).resolve().parents[3]


class Counting(GPT):
    """Counts the numbers that it draws."""

    deferred_init = True
    drawn = 0

    def initial_value(self, name, tensor):
        start = super().initial_value(name, tensor)
        if not callable(start):
            return start

        def fill(part, generator):
            Counting.drawn += part.numel()
            start(part, generator)

        return fill


def seeded(build, seed=0):
    """Returns the tensors of a network that is built from a seed in one process."""
    seed_everything(seed, verbose=False)
    return {name: tensor.detach() for name, tensor in named_tensors(build()).items()}


def other(module, expected):
    """Returns the names of the network's tensors on this rank that are not its part of those of one process."""
    own = named_tensors(module.network)
    return [n for n, t in own.items() if not torch.equal(local_shard(t), part(expected[n], t))]


@pytest.mark.parametrize(
    ("build", "strategy", "world"),
    [
        (partial(GPT, **DENSE), FSDP, 4),
        (partial(GPT, **DENSE), partial(HybridParallel, tensor=2, pipeline=2, data_shard=2), 8),
        (partial(GPT, **DENSE), partial(FSDP, replicas=2), 4),
        (partial(OLMoE, **SPARSE), partial(HybridParallel, expert=2, tensor=2, data_shard=2), 8),
    ],
    ids=["sharded", "tensor and pipeline", "replicas", "experts"],
)
def test_each_rank_has_its_part_of_what_one_process_begins_with(build, strategy, world):
    expected, names = seeded(build), set()
    for rank in (0, world // 2 - 1, world - 1):
        with shards(build, strategy(), rank, world) as module:
            meshes = [p.device_mesh for p in module.network.parameters() if isinstance(p, DTensor)]
            assert {int(mesh.mesh[mesh.get_coordinate()]) for mesh in meshes} == {rank}
            assert other(module, expected) == []
            names |= set(named_tensors(module.network))
    assert names == expected.keys()


SPLIT = partial(HybridParallel, tensor=2, data_shard=2)
ADDED = {
    "DoRA": (lambda: (CausalLM(), LoRA(rank=2, use_dora=True)), FSDP),
    "reward": (lambda: (RewardModel(), BottleneckAdapter(size=2), PaddingRow(133)), SPLIT),
    "prompts": (lambda: (CausalLM(), PaddingRow(133), PromptTuning(count=5)), FSDP),
    "encoder": (lambda: (CausalLM(), PTuning(5, "lstm", 6), PaddingRow(133)), FSDP),
    "predictions": (lambda: (MultiTokenPrediction(CausalLM(), depth=2), PrefixTuning(count=3)), FSDP),
    "reference": (lambda: (PPO(kl=0.1), IA3(input_layers=[])), SPLIT),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.ci] * (n not in ("DoRA", "prompts"))) for n in ADDED]
)
def test_what_adapters_and_objectives_add_begins_as_in_one_process(name):
    build, (added, strategy) = partial(GPT, **DENSE), ADDED[name]
    seed_everything(0, verbose=False)
    network, (objective, *callbacks) = build(), added()
    for part_of_run in (objective, *callbacks):
        if isinstance(part_of_run, ChangesNetwork):
            part_of_run.change_network(network)
    expected = named_tensors(torch.nn.ModuleDict({"network": network, "objective": objective}))
    objective, *callbacks = added()
    with (
        LargestTensor() as largest,
        shards(build, strategy(), 1, 4, objective=objective, callbacks=callbacks) as module,
    ):
        own = named_tensors(module)
        assert own.keys() == expected.keys()
        own.pop("objective.kl_coefficient", None)  # has a value: rank 0, which does not exist, sends it
        assert [n for n, t in own.items() if not torch.equal(local_shard(t), part(expected[n], t))] == []
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    wide = 1 + (
        name in ("prompts", "encoder")
    )  # a strip of the embedding, here all of it, is summed in float64
    assert largest.bytes <= wide * max(tensor.nbytes for tensor in expected.values())
    assert trained == {f"network.{n}" for n, p in network.named_parameters() if p.requires_grad} | {
        f"objective.{n}" for n, p in objective.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("first", [PaddingRow, LoRA])
def test_what_is_stored_begins_with_the_same_changes(first, tmp_path):
    build, path = partial(GPT, **DENSE), tmp_path / "base.safetensors"
    seed_everything(5, verbose=False)
    save_file(build().state_dict(), path)
    made = {
        PaddingRow: lambda: PaddingRow(0),
        LoRA: lambda: LoRA(rank=2),
        PromptTuning: lambda: PromptTuning(4),
    }
    kinds = [first, *(kind for kind in made if kind is not first)]
    seed_everything(0, verbose=False)
    network, expected, found = build(), *([made[kind]() for kind in kinds] for _ in range(2))
    InitialWeights(str(path)).change_network(network)
    for callback in expected:
        callback.change_network(network)
    with shards(build, FSDP(), 0, 4, weights=str(path), callbacks=found) as module:
        assert other(module, named_tensors(network)) == []
        assert not local_shard(module.network.embed_tokens.weight)[0].any()
    adapter = kinds.index(LoRA)
    assert torch.equal(found[adapter].base["samples"], expected[adapter].base["samples"])


def test_other_weights_are_drawn_from_another_seed():
    build = partial(GPT, **DENSE)

    def added():
        network, objective = build(), RewardModel()
        for changing in (objective, LoRA(rank=2), PaddingRow(131), PromptTuning(4)):
            changing.change_network(network)
        return torch.nn.ModuleDict({"network": network, "objective": objective})

    callbacks = [LoRA(rank=2), PaddingRow(131), PromptTuning(4)]
    with shards(build, FSDP(), 1, 4, objective=RewardModel(), callbacks=callbacks) as module:
        begin(module.trainer, 7)
        expected = seeded(added, 7)
        own = named_tensors(module)
        assert own.keys() == expected.keys()
        assert [n for n, t in own.items() if not torch.equal(local_shard(t), part(expected[n], t))] == []


def test_a_network_with_other_weights_keeps_the_head_that_the_optimizer_steps():
    """A head of its own for the second network would be used, and never trained."""
    seed_everything(0, verbose=False)
    build, trainer = partial(GPT, **DENSE), Trainer(accelerator="cpu", logger=False)
    module = LanguageModule(build, RewardModel(), torch.optim.SGD)
    trainer.strategy.connect(module)
    module.trainer = trainer
    module.configure_model()
    before = dict(module.named_parameters())
    begin(trainer, 7)
    assert all(tensor is before[name] for name, tensor in module.named_parameters())
    expected, objective = seeded(build, 7), RewardModel()
    seed_everything(7, verbose=False)
    objective.change_network(build())
    assert same_bits(dict(module.objective.state_dict()), dict(objective.state_dict()))
    assert other(module, expected) == []


def test_one_rank_of_1024_draws_little_more_than_its_part_and_holds_no_more_than_one_parameter():
    build = partial(Counting, vocab_size=4096, n_layer=4, n_head=8, n_embd=1024, max_sequence_length=64)
    Counting.drawn = 0
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in build().parameters()]
    added = {"objective": RewardModel(), "callbacks": [LoRA(rank=4)]}
    with LargestTensor() as largest, shards(build, FSDP(), 511, 1024, **added) as module:
        own = sum(local_shard(p).numel() for p in module.network.parameters())
    assert own < sum(sizes) / 500
    # of 1 to 4 rows a rank draws tiles of 32
    assert Counting.drawn < sum(sizes) / 30
    assert largest.bytes <= 4 * max(sizes)


def test_nothing_is_drawn_that_a_checkpoint_has():
    build = partial(Counting, **DENSE)
    expected = seeded(build)
    Counting.drawn = 0
    with shards(build, FSDP(), 0, 2, resumed=True) as module:
        assert Counting.drawn == 0
        table = module.network.position_table  # which no checkpoint has
        assert torch.equal(table, expected["position_table"])


class Looking(Callback):
    """Changes what it has looked at."""

    def change_network(self, network):
        """Leaves it as it is."""


def test_where_something_looks_at_weights_rank_0_has_them_all_and_a_line_says_so(capsys):
    build = partial(GPT, **DENSE)
    with shards(build, FSDP(), 0, 1, callbacks=[Looking()]) as module:
        weight = module.network.layers[0].attention.q_proj.weight
        assert torch.equal(local_shard(weight), seeded(build)["layers.0.attention.q_proj.weight"])
    line = "FSDP: rank 0 initialises the whole network in its memory: Looking looks at its weights, or does not say how what it adds begins."
    assert line in capsys.readouterr().err


@technique(paper="none", offers=("keeps_weights",))
class Adding(Callback):
    """Says that it adds no parameter, and adds one."""

    def change_network(self, network):
        network.more = torch.nn.Parameter(torch.empty(3))


def test_a_parameter_that_nobody_initialises_is_refused():
    with (
        pytest.raises(ConfigError, match=r"It is not known how network\.more begins"),
        shards(partial(GPT, **DENSE), FSDP(), 0, 1, callbacks=[Adding()]),
    ):
        pass


class Mixing(Convolving):
    deferred_init = True


@pytest.mark.parametrize("kind", [GPT, Mixing])
def test_whether_tokens_mix_is_found_without_the_weights(kind):
    with torch.device("meta"):
        network = kind(**DENSE)
    starts = {PREFIX + name: start for name, start in initial_values(network).items()}
    reason = explain_position_mixing(stand_in(network, starts))
    assert (reason is None) == (kind is GPT), reason
    assert all(parameter.is_meta for parameter in network.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 511, 1023])
def test_a_rank_of_the_recipe_of_175b_needs_the_memory_of_its_part(rank):
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugins.strategies.test_initial_shards", str(rank)],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    own, grown = map(int, done.stdout.split()[-2:])
    assert 5e9 < own < 8.1e9
    assert grown < 8 * 2**30
    assert grown < own + 2**29


def main(rank):
    """Prints the bytes of a rank's weights, and by how much the memory of the process grew at most."""
    import yaml

    from callbacks.activation_checkpointing import ActivationCheckpointing

    config = yaml.safe_load((HOUSE / "configs" / "recipes" / "gpt3_175b_3d.yaml").read_text(encoding="utf-8"))
    build = partial(GPT, **config["model"]["network"]["init_args"])
    strategy = HybridParallel(**config["trainer"]["strategy"]["init_args"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = {"callbacks": [ActivationCheckpointing()], "precision": config["trainer"]["precision"]}
    with shards(build, strategy, rank, 1024, **options) as module:
        own = sum(local_shard(p).nbytes for p in module.network.parameters())
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(own, (after - before) * 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]))
