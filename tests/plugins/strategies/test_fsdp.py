"""FSDP beyond the table: formats, a scaler, checkpoints that a single process takes, refusals."""

import re
from copy import deepcopy

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.runs import run
from conformance.workshop import write_config
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.cli.configuration.config_files import merge
from plugins.networks.gpt import GPT
from plugins.strategies.fsdp import FSDP
from tests.support.fake_ranks import shards
from tests.support.same_run import (
    CONFIG,
    SAVED,
    STEPS,
    TOLERANCE,
    differences,
    fit,
    one_process,
    same_bits,
    weights_apart,
)
from tests.support.sent import NAMES, sent
from tests.support.shapes import shapes

ADAM = {"model": {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}}}}


def fsdp(more=None, **init_args):
    return {"trainer": {"strategy": {"class_path": "FSDP", "init_args": init_args}} | (more or {})}


@pytest.fixture(scope="module")
def whole():
    done = fit(fsdp() | ADAM, 2)
    assert done.code == 0, done.error_text
    return done


def resumed(source, overlay, ranks, name):
    """Returns the run that goes on from the checkpoint of another one in the middle."""
    path = source.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    done = fit(overlay, ranks, f"--ckpt_path={path}", name=name)
    assert done.code == 0, done.error_text
    return done


@pytest.mark.ci
def test_a_checkpoint_is_that_of_a_single_process(whole):
    one, other = whole.checkpoint(), one_process(ADAM).checkpoint()
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert repr(shapes(one[part])) == repr(shapes(other[part]))


@pytest.mark.ci
def test_it_goes_on_from_a_checkpoint_of_one_process():
    expected = one_process({})
    assert weights_apart(resumed(expected, fsdp(), 2, "one-to-fsdp"), expected) < TOLERANCE


def test_resumed_it_is_bitwise_the_same(whole):
    found = resumed(whole, fsdp() | ADAM, 2, "fsdp-resumed").checkpoint()
    for part in ("state_dict", "optimizer_states"):
        assert same_bits(found[part], whole.checkpoint()[part])


@pytest.mark.ci
def test_hidden_states_are_rounded_and_rotary_positions_are_not():
    network = {"model": {"network": {"init_args": {"position": "rotary"}}}}
    watching = {"callbacks": [{"class_path": "tests.support.counting.BlockInputs"}]}
    done = fit(fsdp(watching, param_format="bf16") | network, 2)
    assert "BLOCK_INPUTS torch.bfloat16 torch.float32" in done.stdout, done.error_text


@pytest.mark.parametrize("sizes", [{}, pytest.param({"replicas": 2}, marks=pytest.mark.ci)], ids=str)
def test_validate_computes_what_the_run_did(whole, sizes):
    path = whole.folder / "checkpoints" / f"step-{STEPS}.ckpt"
    config = write_config("validate", merge(deepcopy(CONFIG), fsdp(**sizes)))
    words = [f"--config={config}", f"--ckpt_path={path}", "--trainer.devices=2"]
    done = run(["validate", *words], whole.folder, ranks=2)
    assert done.code == 0, done.error_text
    expected = whole.record["figures"][str(STEPS)]["val/loss"]
    assert float(re.search(r"val/loss\D+([\d.]+)", done.stdout)[1]) == pytest.approx(expected, rel=1e-6)


SCALER = {
    "class_path": "lightning.pytorch.plugins.MixedPrecision",
    "init_args": {"precision": "16-mixed", "device": "cpu"},
}
TWO_BYTES = {
    "bf16": ("FSDP", {}, {"precision": "bf16-mixed"}),
    "bf16, tokens sharded": ("HybridParallel", {"tensor": 2, "sequence": 2}, {"precision": "bf16-mixed"}),
    "fp16": (
        "FSDP",
        {"param_format": "fp16", "reduce_format": "fp32"},
        {"plugins": ["AtomicCheckpoint", SCALER]},
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("format", TWO_BYTES)
def test_blocks_in_two_bytes_round_as_they_should(format):
    name, arguments, precision = TWO_BYTES[format]
    strategy = {"class_path": name, "init_args": arguments}
    noting = {"callbacks": ["tests.support.sent.SentInAStep"]}
    done = fit({"trainer": {"strategy": strategy} | precision | noting}, 2)
    apart = differences(done, one_process({}))
    limit = 2**-9 if format == "fp16" else 2**-6  # some units in the last place, of 2^-12 and 2^-9
    assert limit / 100 < apart["gradient norm"] < limit, apart
    wide = {key for key in sent(done.stdout) if not key.endswith("float16")}
    # fp16's gradients as they were asked for; sums over a vocabulary that is split
    assert wide == {"FSDP": set(), "HybridParallel": {"all_reduce float32"}}[name] | (
        {"reduce_scatter float32"} if format == "fp16" else set()
    )


SCALED = {"FSDP": {}, "HybridParallel": {"tensor": 2}}


@pytest.mark.ci
@pytest.mark.parametrize("strategy", SCALED)
@pytest.mark.parametrize(
    "optimizer",
    [
        "AdamW",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("SGD", "torch.optim.AdamW")),
    ],  # AdamW is torch's, fused
)
def test_a_scaler_skips_a_step_on_all_ranks_or_on_none(strategy, optimizer):
    """The scale begins so high that the first gradients overflow: it is halved until they do not."""
    sizes = {"class_path": strategy, "init_args": SCALED[strategy]}
    fused = {"fused": True} if "." in optimizer else {}  # as our own AdamW is
    adam = {"class_path": optimizer, "init_args": {"lr": 0.01} | fused}
    first = {"class_path": "FP16Mixed", "init_args": {"init_scale": 2.0**40}}
    trainer = {"strategy": sizes, "plugins": ["AtomicCheckpoint", first]}
    done = fit({"trainer": trainer, "model": {"optimizer": adam}}, 2)
    assert done.code == 0, done.error_text
    state = done.checkpoint()["FP16Mixed"]
    assert state["scale"] == 2.0 ** (40 - STEPS)
    before = done.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    assert same_bits(read_checkpoint(before)["state_dict"], done.checkpoint()["state_dict"])


@pytest.mark.ci
@pytest.mark.parametrize("strategy", SCALED)
def test_under_a_scaler_the_default_optimizer_trains_as_in_one_process(strategy):
    sizes = {"class_path": strategy, "init_args": SCALED[strategy]}
    plugins = {"plugins": ["AtomicCheckpoint", "FP16Mixed"]}
    optimizer = {"model": {"optimizer": {"class_path": "AdamW"}}}
    done = fit({"trainer": {"strategy": sizes} | plugins} | optimizer, 2)
    apart = differences(done, one_process({"trainer": plugins} | optimizer))
    assert apart["loss"] < 2**-9, apart  # fp16 rounds to 2^-11, sums over ranks in another order


def test_replicas_that_do_not_divide_the_ranks_are_refused():
    done = fit(fsdp(replicas=3), 2)
    assert done.code == 2
    assert "replicas is 3, which does not divide 2 ranks; [1, 2] do" in done.error_text


@pytest.mark.parametrize("name", ["param_format", "reduce_format"])
def test_gradients_in_fp16_that_nothing_scales_are_refused(name):
    done = fit(fsdp(**{name: "fp16"}), 2)
    assert done.code == 2
    assert f"{name} is fp16, in which small gradients become zero" in done.error_text


def test_what_a_network_saves_beside_its_weights_is_refused():
    sizes = {"vocab_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16}
    network = {"class_path": "tests.support.remembering.RememberingGPT", "init_args": sizes}
    done = fit(merge(fsdp(), {"model": {"network": network}}), 2, name="remembering")
    assert done.code == 2
    assert "FSDP saves parameters and buffers, and network.calls saves more" in done.error_text


@pytest.mark.parametrize(
    ("offload", "device", "backend"),
    [(True, "cuda:0", "cpu:gloo,cuda:nccl"), (False, "cuda:0", "nccl"), (True, "cpu", "gloo")],
)
def test_what_is_offloaded_can_be_summed_too(offload, device, backend, monkeypatch):
    monkeypatch.setattr(FSDP, "root_device", torch.device(device))
    assert FSDP(offload=offload).process_group_backend == backend


class _NoRoom(TorchDispatchMode):
    """Memory runs out as the second part of a network is gathered."""

    gathers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.gathers += NAMES.get(func.overloadpacket.__name__) == "all_gather"
        if self.gathers == 2:
            raise torch.OutOfMemoryError("as if")
        return func(*args, **(kwargs or {}))


def test_what_was_gathered_is_freed_where_memory_runs_out_for_the_rest():
    strategy = FSDP()
    with shards(lambda: GPT(vocab_size=64, n_layer=2, n_head=2, n_embd=16), strategy, 0, 2) as module:
        with pytest.raises(torch.OutOfMemoryError), _NoRoom(), strategy.gathered(module.network):
            pass
        assert all(isinstance(weight, DTensor) for weight in module.parameters())
