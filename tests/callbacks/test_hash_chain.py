"""HashChain: a resumed run against one that was not stopped, two ranks, and what an inspected step leaves."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from conformance.runs import run
from tests.conftest import TINY
from tests.support.cli_runs import checkpoint, core  # noqa: F401
from toolkit.hash_chains import FOLDER, read_chain

FILE = Path("runs/tiny", FOLDER, "rank0.jsonl")
ON = "--trainer.callbacks+=HashChain"


def test_a_resumed_run_has_the_file_of_one_that_was_not_stopped(core):  # noqa: F811
    assert core("fit", "--config", "tiny.yaml", ON, "--callbacks.PeriodicCheckpoint.keep=-1").code == 0
    whole = FILE.read_text()
    assert [json.loads(line).get("step") for line in whole.splitlines()] == [None, 0, 1, 2, 3, 4, 5, 6]
    FILE.write_text(whole.replace('"step": 5', '"step": 5, "stale": 1'))
    assert core("fit", "--ckpt_path", checkpoint(4)).code == 0
    assert FILE.read_text() == whole


def test_the_rhythm_of_writing_does_not_show(core):  # noqa: F811
    for every in (1, 4):
        assert core("fit", "--config", "tiny.yaml", ON, f"--trainer.log_every_n_steps={every}").code == 0
    assert FILE.read_text() == Path("runs/tiny-2", FOLDER, "rank0.jsonl").read_text()


def test_an_inspected_step_leaves_its_tensors_and_ends_the_run(core):  # noqa: F811
    words = ("--trainer.callbacks.inspect_step=3", "--trainer.accumulate_grad_batches=2")
    assert core("fit", "--config", "tiny.yaml", ON, *words).code == 0
    chain = read_chain(FILE)
    assert max(chain.steps) == 3
    parts = {
        name: load_file(FILE.with_suffix(f".{name}.safetensors"))
        for name in ("before", "after", "batch", "gradients")
    }
    names = [name for name in parts["before"] if name in parts["gradients"]]
    assert names
    assert all(not torch.equal(parts["before"][name], parts["after"][name]) for name in names)
    assert {name.partition(".")[0] for name in parts["batch"]} == {"0", "1"}  # of both micro-batches
    one, two = chain.steps[2]["detail"], chain.steps[3]["detail"]
    assert one["after"] == two["before"]
    assert one["batches"] == two["batches"] == 2
    assert one["outputs"][0][0] == "embed_tokens"
    assert len(one["outputs"]) == len(two["outputs"])


def test_each_rank_has_a_file_and_replicas_agree_on_weights(tmp_path):
    values = json.loads(json.dumps(TINY))
    values["trainer"] |= {"devices": 2, "strategy": "DDP"}
    values["trainer"]["callbacks"].append({"class_path": "HashChain"})
    (tmp_path / "two.yaml").write_text(json.dumps(values))
    folder = tmp_path / "run"
    words = ["fit", "--config", str(tmp_path / "two.yaml"), f"--trainer.default_root_dir={folder}"]
    run(words, folder, ranks=2).succeeded("fit on two ranks")
    one, two = (read_chain(folder / FOLDER / f"rank{rank}.jsonl") for rank in range(2))
    assert one.steps.keys() == two.steps.keys() == set(range(7))
    assert all(one.weights(step) == two.weights(step) for step in one.steps)
    assert len({one.steps[step]["weights"] for step in one.steps}) == 7
    assert one.environment["ranks"] == 2
