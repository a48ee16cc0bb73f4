"""Compile: the run without it up to rounding, graphs counted, breaks reported with file and line."""

import copy
import inspect
import json
import os
import shutil

import pytest
import torch
from lightning.pytorch import Callback

from callbacks.activation_checkpointing import ActivationCheckpointing
from callbacks.activation_offload import ActivationOffload
from callbacks.compile import FILE, Compile
from core.errors import ConfigError
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.mixtral import Mixtral
from plugins.objectives.balanced_routing import BalancedRouting
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.multi_token_prediction import MultiTokenPrediction
from plugins.optimizers.ademamix import AdEMAMix
from plugins.optimizers.lion import Lion
from plugins.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from tests.support.cli_runs import RUN, checkpoint, core, finished, state, trained  # noqa: F401
from tests.support.tiny_training import VOCAB, Record, fit, module, tiny_gpt, uneven_batches

ROUNDING = 1e-5
"""Of float32 (6e-8) over sums of a hundred terms in other orders, which a few steps of a large rate let grow."""


@pytest.fixture(autouse=True)
def new_compiler():
    torch.compiler.reset()  # what another test compiled of the same code counts


def fitted(folder, callbacks, batches, network=tiny_gpt, ckpt_path=None, parts=None, **options):
    """Returns the module, the losses, and what the run folder says of the compiler."""
    record, made = Record(), module(network, **(parts or {}))
    fit(folder, made, batches, [*callbacks, record], ckpt_path=ckpt_path, max_epochs=1, **options)
    said = json.loads((folder / FILE).read_text()) if (folder / FILE).exists() else None
    return made, [figures["train/loss"] for figures in record.figures], said


def assert_close(one, other):
    assert list(one) == list(other)  # names too
    for name, weight in other.items():
        torch.testing.assert_close(one[name], weight, rtol=ROUNDING, atol=ROUNDING, msg=name)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("scope", "device", "stepped"),
    [
        pytest.param("blocks", "cpu", False, marks=pytest.mark.slow),
        pytest.param("whole", "cpu", True, marks=pytest.mark.slow),
        pytest.param("blocks", "gpu", True, marks=pytest.mark.gpu),
        pytest.param("whole", "gpu", True, marks=pytest.mark.gpu),
    ],
)
def test_compiled_weights_and_losses_are_those_without(scope, device, stepped, tmp_path):
    """With inductor's kernels. They are kept in the given folder: another run has the same bits and compiles nothing."""
    batches, options = uneven_batches(4), {"accelerator": device}
    if stepped:  # the epsilon keeps gradients that are zero in theory from moving anything
        options["parts"] = {"optimizer": lambda groups: AdEMAMix(groups, lr=0.01, eps=1e-3)}
    compiler = {"scope": scope, "cache": str(tmp_path / "cache"), "optimizer": stepped}
    plain, losses, said = fitted(tmp_path / "plain", [], batches, **options)
    assert said is None
    cache = tmp_path / "cache"
    made, found, said = fitted(tmp_path / "compiled", [Compile(**compiler)], batches, **options)
    assert found == pytest.approx(losses, rel=ROUNDING)
    assert_close(made.state_dict(), plain.state_dict())
    assert len(said["graphs"]) == {"blocks": 2, "whole": 1}[scope] + stepped
    assert said["breaks"] == []
    kernels = set(cache.rglob("*.so")) | set(cache.rglob("*.cubin"))
    assert kernels
    torch.compiler.reset()
    again, same, _ = fitted(tmp_path / "again", [Compile(**compiler)], batches, **options)
    assert same == found
    assert all(torch.equal(made.state_dict()[name], w) for name, w in again.state_dict().items())
    assert set(cache.rglob("*.so")) | set(cache.rglob("*.cubin")) == kernels


IN_CHUNKS = {"label_smoothing": 0.1, "z_loss": 1e-3, "chunk_tokens": 7}


@pytest.mark.parametrize(
    "around", [lambda inner: inner, MultiTokenPrediction], ids=["alone", "within another"]
)
def test_a_loss_in_chunks_is_compiled_and_so_is_one_within_another_objective(around, tmp_path):
    """Of 24 positions in chunks of 6."""
    sizes = dict(vocab_size=VOCAB, n_layer=2, n_head=2, n_kv_head=2, n_embd=16, intermediate_size=24)

    def run(name, callbacks):
        parts = {"objective": around(CausalLM(**IN_CHUNKS))}
        network = lambda: Llama(**sizes, max_sequence_length=24)  # noqa: E731
        return fitted(tmp_path / name, callbacks, uneven_batches(3), network, parts=parts)

    plain, losses, _ = run("plain", [])
    made, found, said = run("compiled", [Compile(backend="aot_eager")])
    assert found == pytest.approx(losses, rel=ROUNDING)
    assert_close(made.state_dict(), plain.state_dict())
    assert (len(said["graphs"]), said["breaks"]) == (2, [])
    assert said["graphs"][1]["inputs"] == ["[6, 64]", "[6]"]  # products with a padded weight


@pytest.mark.gpu
def test_the_loss_of_an_odd_vocabulary_is_compiled_with_the_pass_to_float32(tmp_path):
    """Unchunked, as in chunks: what goes in is the product in bf16, with the columns that pad the vocabulary."""
    options = dict(accelerator="gpu", precision="bf16-mixed")
    _, _, said = fitted(tmp_path, [Compile()], uneven_batches(2, rows=1, length=6), **options)
    assert (len(said["graphs"]), said["breaks"]) == (2, [])
    assert said["graphs"][1]["inputs"] == ["[6, 64]", "[6]"]


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.ci), True])
def test_blocks_share_a_graph_for_each_length(dynamic, tmp_path, capfd):
    """And so does the loss. Of training alone: validation has a length of its own."""
    batches = [batch for length in (6, 8, 10, 6, 8, 10) for batch in uneven_batches(1, length=length)]
    _, _, said = fitted(tmp_path, [Compile(backend="eager", dynamic=dynamic)], batches)
    assert len(said["graphs"]) == (2 if dynamic else 6)
    assert capfd.readouterr().err.count(f"Compile: 2 graphs, no breaks; {tmp_path / FILE}") == 1


OTHERS = [
    ("32-true", 2, [ActivationCheckpointing(keep=["matmul"])]),
    pytest.param(
        "bf16-mixed",
        3,
        [ActivationCheckpointing(every_n_blocks=2), ActivationOffload(0)],
        marks=pytest.mark.ci,
    ),
]


@pytest.mark.parametrize(
    ("precision", "graphs", "others"), OTHERS, ids=["recomputed in part", "every second"]
)
def test_compiles_what_others_have_made_of_the_blocks(precision, graphs, others, tmp_path):
    options = dict(precision=precision, accumulate_grad_batches=2, gradient_clip_val=0.5)
    plain, losses, _ = fitted(tmp_path / "plain", others, uneven_batches(4), **options)
    first, *rest = others
    callbacks = [first, Compile(backend="aot_eager"), *rest]
    made, found, said = fitted(tmp_path / "compiled", callbacks, uneven_batches(4), **options)
    assert said["breaks"] == []
    assert len(said["graphs"]) == graphs
    assert found == pytest.approx(losses, rel=ROUNDING)
    assert_close(made.state_dict(), plain.state_dict())


@pytest.mark.ci
def test_each_goes_on_from_the_others_checkpoint(trained, tmp_path):  # noqa: F811
    """The tiny run, and two more steps of it: as it was trained, and compiled before or behind the checkpoint."""
    compiled = ["--trainer.callbacks+=Compile", "--trainer.callbacks.backend=aot_eager"]
    end = int(max((tmp_path / RUN).rglob("*.ckpt")).stem.removeprefix("step-"))
    steps = ["--config=tiny", f"--trainer.max_steps={end + 2}"]

    def go_on(name, checkpoint, *words):
        torch.compiler.reset()
        done = trained(
            "fit", *steps, f"--ckpt_path={checkpoint}", f"--trainer.default_root_dir={name}", *words
        )
        assert done.code == 0, done.err
        return state(max((tmp_path / name).rglob(f"*{end + 2}.ckpt")))["state_dict"]

    saved = checkpoint(end)
    expected = go_on("plain", saved)
    assert_close(go_on("behind", saved, *compiled), expected)
    first = [
        "fit",
        "--config=tiny",
        f"--trainer.max_steps={end}",
        "--trainer.default_root_dir=first",
        *compiled,
    ]
    assert trained(*first).code == 0
    assert_close(go_on("before", max((tmp_path / "first").rglob(f"*{end}.ckpt"))), expected)


@pytest.mark.ci
def test_experts_are_balanced_by_routers_that_are_left_out(tmp_path):
    """An objective that adds hooks to the routers in each step finds them, and blocks are compiled all the same."""
    sizes = dict(vocab_size=61, n_layer=1, n_head=2, n_kv_head=2, n_embd=16, max_sequence_length=24)
    experts = dict(intermediate_size=16, n_experts=4, experts_per_token=2)

    def run(name, callbacks):
        torch.manual_seed(0)
        made, record = (
            module(lambda: Mixtral(**sizes, **experts), objective=BalancedRouting(CausalLM())),
            Record(),
        )
        fit(tmp_path / name, made, uneven_batches(3), [*callbacks, record], max_epochs=1)
        return made.state_dict(), [figures["train/load_balancing"] for figures in record.figures]

    weights, balance = run("plain", [])
    found, same = run("compiled", [Compile(backend="aot_eager")])
    assert same == pytest.approx(balance, rel=ROUNDING)
    assert_close(found, weights)
    said = json.loads((tmp_path / "compiled" / FILE).read_text())
    assert said["graphs"]
    assert "self.router(" in said["breaks"][0]["code"]


class GraphsByStep(Callback):
    """Counts the graphs that there are after each step."""

    def __init__(self, file):
        self.file, self.counts = file, []

    def on_train_batch_end(self, *_):
        self.counts.append(len(json.loads(self.file.read_text())["graphs"]))


@pytest.mark.ci
def test_experts_multiplied_one_by_one_make_no_graph_for_each_split(tmp_path, capfd):
    """In bf16 on a CPU torch has no grouped product: the numbers of tokens are known on the host, and differ in each step."""
    sizes = dict(vocab_size=61, n_layer=1, n_head=2, n_kv_head=2, n_embd=16, max_sequence_length=24)
    made = module(lambda: Mixtral(**sizes, intermediate_size=16, n_experts=4, experts_per_token=2))
    batches = [batch for seed in range(6) for batch in uneven_batches(1, seed=seed)]
    callbacks = [Compile(backend="eager"), steps := GraphsByStep(tmp_path / FILE)]
    fit(tmp_path, made, batches, callbacks, max_epochs=1, precision="bf16-mixed")
    assert len(steps.counts) == 6
    assert steps.counts[-1] == steps.counts[0]
    [why] = [one for one in json.loads((tmp_path / FILE).read_text())["breaks"] if "numbers" in one["reason"]]
    assert "apart(" in why["code"]
    assert "(the experts' numbers of tokens differ in each step)" in capfd.readouterr().err


class Breaking(GPT):
    """Reads a value in its first block, which the compiler cannot."""

    def __init__(self, **options):
        super().__init__(**options)
        block = self.layers[0]
        block.attention.register_forward_pre_hook(read)


def read(module, inputs):
    float(inputs[0].sum())  # broken off here


def breaking():
    return Breaking(vocab_size=61, n_layer=2, n_head=2, n_embd=16, max_sequence_length=24)


def test_a_break_is_reported_with_file_and_line(tmp_path, capfd):
    _, _, said = fitted(tmp_path, [Compile(backend="eager")], uneven_batches(2), breaking)
    lines, first = inspect.getsourcelines(read)
    line = first + next(i for i, text in enumerate(lines) if "broken off here" in text)
    [found] = [one for one in said["breaks"] if one["file"] == __file__]
    assert (found["line"], "sum()" in found["code"]) == (line, True)
    assert found["reason"]
    assert len(said["graphs"]) > 1
    assert f"broken off at {__file__}:{line} (" in capfd.readouterr().err


class Listen(Callback):
    """Listens to a module of a block in one step, as a monitor does."""

    def __init__(self, step):
        self.step, self.heard = step, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        inner = pl_module.network.blocks[0].mlp
        if batch_idx == self.step:
            self.handle = inner.register_forward_hook(self.count)

    def count(self, *args):
        self.heard += 1

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step + 1:
            self.handle.remove()


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.ci), 2])
def test_a_step_that_is_listened_to_runs_without(step, tmp_path, capfd):
    listen = Listen(step)
    _, _, said = fitted(tmp_path, [Compile(backend="eager"), listen], uneven_batches(4))
    assert listen.heard == 1
    assert len(said["graphs"]) == 2
    assert ("not compiled while hooks listen to modules: 1 of 2 blocks" in capfd.readouterr().err) == (
        step == 0
    )


def test_a_copy_computes_with_its_own_weights():
    torch.manual_seed(0)
    network, batch = tiny_gpt(), {"input_ids": torch.arange(12).view(2, 6)}
    Compile(backend="eager").change_network(network)
    before = network(batch)
    copied = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert torch.equal(copied(batch), before)
    assert list(copied.state_dict()) == list(tiny_gpt().state_dict())


@pytest.mark.ci
@pytest.mark.parametrize("scope", ["blocks", pytest.param("whole", marks=pytest.mark.ci)])
def test_a_second_fit_begins_anew(scope, tmp_path, capfd):
    """After one that an error ended: with another module, and with that module again."""
    from torch._dynamo import config

    before, compile_ = (config.recompile_limit, config.optimize_ddp), Compile(scope, backend="eager")
    with pytest.raises(ZeroDivisionError):
        fitted(tmp_path / "ended", [compile_, Fail()], uneven_batches(2))
    assert (config.recompile_limit, config.optimize_ddp) == before
    made, batches = module(tiny_gpt), uneven_batches(2)
    for lengths in (1, 2):
        folder = tmp_path / str(lengths)
        fit(folder, made, batches, [compile_], max_epochs=1)
        assert (
            len(json.loads((folder / FILE).read_text())["graphs"])
            == lengths * {"blocks": 2, "whole": 1}[scope]
        )
        assert "not compiled" not in capfd.readouterr().err
        assert (config.recompile_limit, config.optimize_ddp) == before
        assert "compute_loss" not in vars(made)
        batches += uneven_batches(2, length=14)


class Fail(Callback):
    def on_train_batch_start(self, *args):
        raise ZeroDivisionError


# The optimizer --------------------------------------------------------------------------------------------

SCHEDULED = [
    pytest.param(AdEMAMix, {"alpha_beta3_steps": 20}, id="AdEMAMix"),
    pytest.param(Lion, {}, id="Lion"),
    pytest.param(ScheduleFreeAdamW, {"warmup_steps": 10}, id="ScheduleFreeAdamW"),
]


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "options"), SCHEDULED)
def test_one_graph_steps_all_weights_at_every_rate(kind, options, tmp_path):
    """Thirty steps; of blocks there is one graph, and one of the loss. ScheduleFree's and AdEMAMix's settings change by themselves, too."""

    def stepped(name, **changes):
        rates = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))  # noqa: E731
        made = module(
            lambda: tiny_gpt(
                bias=False
            ),  # keys' biases have gradients of rounding alone, whose sign is chance
            optimizer=lambda groups: kind(groups, lr=0.01, **options),
            lr_scheduler=rates,
        )
        runner = fit(
            tmp_path / name, made, uneven_batches(30), [Compile(backend="eager", **changes)], max_epochs=1
        )
        said = json.loads((tmp_path / name / FILE).read_text())
        assert said["breaks"] == []
        return made.state_dict(), runner.optimizers[0].param_groups[0], len(said["graphs"])

    weights, group, graphs = stepped("library")
    found, same, more = stepped("compiled", optimizer=True)
    assert_close(found, weights)
    assert {**same, "params": 0} == {**group, "params": 0}
    assert (graphs, more) == (2, 3)


# Mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--trainer.callbacks.scope=block"], "Did you mean blocks?"),
        (["--trainer.callbacks.scope=whole", "--trainer.callbacks+=ActivationOffload"], "take scope=blocks"),
        (
            ["--trainer.callbacks.optimizer=true"],
            "AdamW steps with one kernel of torch's already: set optimizer to false",
        ),
        (["--trainer.callbacks+=StochasticDepth"], "each number of rows would be compiled"),
        (["--trainer.callbacks.cache=s3://bucket/cache"], "not to URLs"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(words, hint, core):  # noqa: F811
    done = core("check", "--config=tiny", "--trainer.callbacks+=Compile", *words)
    assert done.code == 2
    assert hint in done.err
    assert len(done.err.splitlines()) <= 10


def test_a_machine_without_a_compiler_is_told_what_to_install(core, monkeypatch):  # noqa: F811
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = core("check", "--config=tiny", "--trainer.callbacks+=Compile")
    assert done.code == 2
    assert "there is no compiler (no-such-compiler): apt install g++, or set CXX" in done.err
    assert (
        core(
            "check", "--config=tiny", "--trainer.callbacks+=Compile", "--trainer.callbacks.backend=eager"
        ).code
        == 0
    )


def test_kernels_for_gpus_go_to_the_cache_too(tmp_path, monkeypatch):
    """torch sets their folder at the first one that a process compiles, for all that follow."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "of another run")
    seen = []

    class Sees(Callback):
        def on_train_start(self, *_):
            seen.append((os.environ.get("TRITON_CACHE_DIR"), os.environ["TORCHINDUCTOR_CACHE_DIR"]))

    cache = tmp_path / "cache"
    fitted(tmp_path, [Compile(backend="eager", cache=str(cache)), Sees()], uneven_batches(1))
    assert seen == [(None, str(cache))]
    assert os.environ["TRITON_CACHE_DIR"] == "of another run"


def test_a_cache_that_everybody_may_write_to_is_refused(core, tmp_path):  # noqa: F811
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    done = core(
        "check", "--config=tiny", "--trainer.callbacks+=Compile", f"--trainer.callbacks.cache={cache}"
    )
    assert done.code == 2
    assert f"cache {cache} is open to everybody" in done.err
    with pytest.raises(ConfigError, match="is open to everybody, and what is in it is run"):
        fitted(tmp_path, [Compile(backend="eager", cache=str(cache))], uneven_batches(1))


def test_a_network_without_blocks_is_compiled_as_a_whole(tmp_path):
    class Bare(GPT):
        blocks = ()

    with pytest.raises(ConfigError, match="Bare has no blocks: take scope=whole"):
        Compile().change_network(Bare(vocab_size=8, n_layer=1, n_head=1, n_embd=8, max_sequence_length=8))
