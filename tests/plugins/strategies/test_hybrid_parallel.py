"""HybridParallel beyond the table: what is refused before a process starts, and checkpoints."""

from copy import deepcopy

import pytest
from torch.distributed.pipelining import PipelineStage

from conformance.runs import run
from conformance.workshop import workshop, write_config
from core.__main__ import main
from plugins.cli.configuration.config_files import merge
from tests.support.same_run import (
    CONFIG,
    FOUR_BLOCKS,
    SAVED,
    TOLERANCE,
    fit,
    one_process,
    same_bits,
    weights_apart,
)

ROWS = {
    "data": {"class_path": "tests.support.toy.ToyData", "init_args": {"sequence_length": 64, "batch_size": 8}}
}


def scheduled(name, **init_args):
    """Returns 20 steps of 8 rows of 64 tokens, whose shape follows a schedule."""
    trainer = {
        "max_steps": 20,
        "accumulate_grad_batches": 1,
        "callbacks": [{"class_path": name, "init_args": init_args}],
    }
    return {**ROWS, "trainer": trainer, "model": {"network": {"init_args": {"max_sequence_length": 64}}}}


TOY = {
    "data": {"class_path": "tests.support.toy.ToyData", "init_args": {"sequence_length": 14, "batch_size": 4}}
}


def recomputed(**init_args):
    """Returns four blocks whose activations are computed again, but for what is kept."""
    return with_callback("ActivationCheckpointing", **init_args)


def with_callback(name, **init_args):
    callback = {"class_path": name, "init_args": init_args}
    return merge(deepcopy(FOUR_BLOCKS), {"trainer": {"callbacks": [callback]}})


REFUSED = [
    (4, {"tensor": 2, "data_shard": 1}, {}, "tensor 2 is 2 ranks, this run has 4"),
    (2, {"data_replicate": 0}, {}, "data_replicate is 0; sizes are 1 or more"),
    (2, {"expert": 2}, {}, "expert is 2, and GPT has no experts: set it to 1"),
    (2, {"tensor": 2, "sequence": 3}, {}, "sequence is 3; it is 1, or 2 as tensor"),
    (3, {"tensor": 3}, {}, "tensor is 3, which does not divide the 4 attention heads of GPT"),
    (8, {"pipeline": 8}, {}, "pipeline is 8, which makes 8 stages of 1F1B for 2 blocks"),
    (4, {"pipeline": 4, "schedule": "ZBVZeroBubble"}, {}, "makes 8 stages of ZBVZeroBubble for 2 blocks"),
    (2, {"pipeline": 2, "microbatches": 1}, {}, "microbatches is 1; 1F1B takes at least one for each of 2"),
    (2, {"pipeline": 2, "microbatches": 3}, TOY, "microbatches is 3, which does not divide data.batch_size 4"),
    (2, {"context": 2}, TOY, "context is 2; ring takes a multiple of 4 tokens, and data.sequence_length is 14"),
    (2, {"context": 2}, {"model": {"network": {"init_args": {"dropout": 0.1}}}}, "context is 2, which takes attention without"),
    (2, {"context": 2}, {"model": {"network": {"init_args": {"attention_dropout": 0.1}}}}, "set model.network.attention_dropout to 0"),
    (2, {"context": 2}, scheduled("SequenceLengthSchedule", start=6, multiple=2, duration=10),
     "rows are split into 4 parts, and SequenceLengthSchedule makes some of 6 tokens"),
    (2, {"tensor": 2, "sequence": 2}, scheduled("SequenceLengthSchedule", start=9, duration=10),
     "rows are split into 2 parts, and SequenceLengthSchedule makes some of 9 tokens"),
    (2, {"pipeline": 2}, scheduled("BatchSizeRamp", start=0.125, tokens_until_full=4000),
     "microbatches is 2, which does not divide the batches of 1 rows that BatchSizeRamp makes"),
    # with both ranks reading, the batch would grow past 5 rows at once
    (2, {"pipeline": 2}, scheduled("BatchSizeRamp", start=0.5, tokens_until_full=1024, growth="linear"),
     "microbatches is 2, which does not divide the batches of 5 rows that BatchSizeRamp makes"),
    (8, {"context": 8, "context_method": "ulysses"}, {}, "does not divide the 4 attention heads of GPT: take"),
    (2, {"tensor": 2, "sequence": 2, "context": 1}, {"data": TOY["data"] | {"init_args": {"sequence_length": 15}}},
     "sequence is 2, which does not divide the 15 tokens"),
    (2, {"pipeline": 2}, {"trainer": {"callbacks": ["MemoryMonitor"]}}, "which MemoryMonitor does not distinguish"),
    (2, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}, recomputed(keep=["matmul"]), "set its keep to null, or schedule to Interleaved1F1B"),
    (2, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}, recomputed(memory_budget=0.5), "set its memory_budget to null"),
    (2, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}, with_callback("Compile"), "both at once: set schedule to 1F1B"),
    (2, {"pipeline": 2, "param_format": "bf16"}, {}, "a pipeline without sharded data gathers no weights: set --trainer.precision"),
    (2, {"tensor": 2, "async_tensor": True}, {}, "add Compile with backend inductor"),
    (2, {"pipeline": 2}, {"trainer": {"callbacks": ["GradientNoiseScale"], "accumulate_grad_batches": 1}},
     "microbatches is 2, and GradientNoiseScale compares halves of a batch"),
]  # fmt: skip


def hybrid(**init_args):
    return {"trainer": {"strategy": {"class_path": "HybridParallel", "init_args": init_args}}}


@pytest.mark.parametrize(("ranks", "sizes", "more", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_fit_is_refused_before_a_process_starts(ranks, sizes, more, message):
    values = merge(merge(deepcopy(CONFIG), hybrid(**sizes)), deepcopy(more))
    merge(values, {"trainer": {"devices": ranks}})
    done = run(["check", f"--config={write_config('refused', values)}"], workshop())
    assert done.code == 2
    assert message in done.error_text, done.error_text


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ({"context": 2}, scheduled("SequenceLengthSchedule", duration=10)),
        ({"pipeline": 2}, scheduled("SequenceLengthSchedule", duration=10, growth="doubling")),
        ({"pipeline": 2}, scheduled("BatchSizeRamp", start=0.25, tokens_until_full=4000, growth="doubling")),
        ({"pipeline": 2, "schedule": "InterleavedZeroBubble"}, recomputed()),
    ],
    ids=str,
)
def test_what_can_be_cut_up_is_let_through(sizes, schedule):
    values = merge(merge(deepcopy(CONFIG), hybrid(**sizes)), deepcopy(schedule))
    merge(values, {"trainer": {"devices": 2}})
    done = run(["check", f"--config={write_config('let-through', values)}"], workshop())
    assert done.code == 0, done.error_text


@pytest.mark.parametrize("size", [pytest.param("pipeline", marks=pytest.mark.ci), "context"])
def test_predict_says_before_it_starts_that_it_takes_no_stages_and_no_parts_of_sequences(size):
    values = merge(merge(deepcopy(CONFIG), hybrid(**{size: 2})), {"trainer": {"devices": 2}})
    config = write_config("predict", values)
    for command, code in {"predict": 2, "validate": 0}.items():
        done = run([command, f"--config={config}"], workshop() / f"{command} with {size}", ranks=2)
        assert done.code == code, done.error_text
        assert (f"{size} is 2, and predict takes pipeline 1 and context 1" in done.error_text) is bool(code)


@pytest.mark.ci
def test_a_schedule_is_no_concern_of_validate():
    schedule = scheduled("SequenceLengthSchedule", start=6, multiple=2, duration=10)
    values = merge(merge(deepcopy(CONFIG), hybrid(context=2)), {"trainer": {"devices": 2}})
    config = write_config("validated", merge(values, deepcopy(schedule)))
    assert "rows are split into 4 parts" in run(["fit", f"--config={config}"], workshop(), ranks=2).error_text
    done = run(["validate", f"--config={config}"], workshop() / "validated", ranks=2)
    assert done.code == 0, done.error_text


def test_a_schedule_that_cannot_be_built_is_told_by_its_own_check():
    values = merge(merge(deepcopy(CONFIG), hybrid(context=2)), {"trainer": {"devices": 2}})
    merge(values, scheduled("SequenceLengthSchedule", start=128, duration=10))
    done = run(["check", f"--config={write_config('too-long', values)}"], workshop())
    assert done.code == 2
    assert "it begins with rows of 128 tokens" in done.error_text
    assert "fault of the technique" not in done.error_text


def test_an_unknown_schedule_is_told_with_the_known_ones():
    values = merge(deepcopy(CONFIG), hybrid(schedule="1F2B"))
    done = run(["check", f"--config={write_config('unknown', values)}"], workshop())
    assert done.code == 2
    assert "1F2B" in done.error_text
    assert "1F1B" in done.error_text


PIPELINE = hybrid(pipeline=2, schedule="Interleaved1F1B") | FOUR_BLOCKS
ALONE = {"trainer": {"strategy": "auto"}} | FOUR_BLOCKS  # what is not written is taken from the checkpoint


def resumed(source, overlay, ranks, name):
    """Returns the run that goes on from the checkpoint of another one in the middle."""
    path = source.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    done = fit(overlay, ranks, f"--ckpt_path={path}", name=name)
    assert done.code == 0, done.error_text
    return done


@pytest.mark.ci
def test_one_process_goes_on_from_a_pipeline_and_the_other_way_round():
    expected, staged = one_process(FOUR_BLOCKS), fit(PIPELINE, 2)
    assert weights_apart(resumed(staged, ALONE, 1, "pipeline-to-one"), expected) < TOLERANCE
    assert weights_apart(resumed(expected, PIPELINE, 2, "one-to-pipeline"), expected) < TOLERANCE
    states = staged.checkpoint()["optimizer_states"][0], expected.checkpoint()["optimizer_states"][0]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert list(states[0]["state"]) == list(states[1]["state"])


ADAM = {"model": {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}}}}


@pytest.mark.ci
@pytest.mark.parametrize(
    "sizes",
    [{"pipeline": 2}, {"tensor": 2, "sequence": 2}, pytest.param({"context": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_resumed_it_is_bitwise_the_same(sizes):
    whole = fit(hybrid(**sizes) | ADAM, 2)
    assert whole.code == 0, whole.error_text
    found = resumed(whole, hybrid(**sizes) | ADAM, 2, f"resumed-{'-'.join(sizes)}").checkpoint()
    for part in ("state_dict", "optimizer_states"):
        assert same_bits(found[part], whole.checkpoint()[part])


@pytest.mark.parametrize(("schedule", "code"), [("ZBVZeroBubble", 2), ("InterleavedZeroBubble", 0)])
def test_a_v_shape_is_refused_where_torch_greets_a_ranks_own_stages(schedule, code, monkeypatch, capsys):
    monkeypatch.setattr(PipelineStage, "_get_init_p2p_neighbors_ops", None, raising=False)
    monkeypatch.delattr(PipelineStage, "_warmup_forward_vote", raising=False)
    values = merge(merge(deepcopy(CONFIG), hybrid(pipeline=2, schedule=schedule)), FOUR_BLOCKS)
    merge(values, {"trainer": {"devices": 2}})
    assert main(["check", f"--config={write_config('v-shape', values)}"]) == code
    assert ("which gloo cannot send: take InterleavedZeroBubble" in capsys.readouterr().err) == (code == 2)
