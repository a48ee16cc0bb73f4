"""torchrun starts a job again when a worker or an agent is killed: it goes on as if nothing had happened."""

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from conformance.runs import free_port, run
from core.errors import ConfigError
from plugins.checkpoints import checkpoint
from plugins.cli.runs import restarts
from tests.support.documents import write_documents
from tests.support.launched_ranks import CONFIG, HOUSE, assert_same_run, results

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3"]
OPTIONS = ["--trainer.devices=auto", "--trainer.strategy=ddp", "--trainer.max_steps=10",
           "--callbacks.PeriodicCheckpoint.every_n_steps=1"]  # fmt: skip
FIT = ["-m", "core", "fit", "--config=config.yaml", "--trainer.default_root_dir=run", *OPTIONS]


class Kill(Callback):
    """Kills ranks at moments: each `start/rank/batch`; with LEYDEN_TEST_VICTIM set, this rank and its agent."""

    def __init__(self, moments: list[str]) -> None:
        self.moments = moments

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        start = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if f"{start}/{trainer.global_rank}/{trainer.fit_loop.epoch_loop.total_batch_idx}" in self.moments:
            if "LEYDEN_TEST_VICTIM" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def kill(*moments):
    return [f"--trainer.callbacks+={__name__}.Kill", f"--trainer.callbacks.moments=[{','.join(moments)}]"]


def write(folder):
    """Writes the configuration of the job into a folder, and next to it what all of them train on."""
    documents = folder.parent / "documents"
    folder.mkdir(exist_ok=True)
    if not documents.exists():
        write_documents(documents)
    config = copy.deepcopy(CONFIG)
    config["model"]["network"]["init_args"]["vocab_size"] = 320
    stages = {
        "reader": "TextDocuments",
        "tokenizer": {"class_path": "BPETokenizer", "init_args": {"vocab_size": 320}},
        "writer": "TokenShards",
        "packing": "Concatenate",
    }
    data = {"source": str(documents), "cache_dir": str(folder.parent / "cache")}
    config["data"] = {
        "class_path": "PretrainDataModule",
        "init_args": {**stages, **data, "batch_size": 2, "sequence_length": 16},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


@pytest.fixture
def launch(tmp_path):
    """Starts torchrun in a folder of its own; ends all of its processes with the test."""
    started = []

    def start(name, *words, **environment):
        folder = tmp_path / name
        write(folder)
        log = open(folder / f"log.{len(started)}", "w+", encoding="utf-8")  # noqa: SIM115
        process = subprocess.Popen(
            [*TORCHRUN, *words], cwd=folder, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOUSE)} | environment,
        )  # fmt: skip
        started.append(process)
        return process, Path(log.name)

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def whole(tmp_path):
    """The job on two ranks of which none is killed."""
    folder = tmp_path / "whole"
    write(folder)
    places = [f"--config={folder / 'config.yaml'}", f"--trainer.default_root_dir={folder / 'run'}"]
    done = run(["fit", *places, *OPTIONS], folder, ranks=2)
    assert done.code == 0, done.error_text
    return results(folder)


def finished(process, log, folder):
    code = process.wait(timeout=240)
    assert code == 0, log.read_text(encoding="utf-8")[-4000:]
    return results(folder)


def wait_for(port):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens at {port}")


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(["0/1/9"], marks=pytest.mark.ci),
        pytest.param(["0/1/9", "1/0/15"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
def test_killed_workers_change_no_bit(moments, whole, launch, tmp_path):
    two = ["--standalone", "--nproc_per_node=2", *FIT]
    killed, log = launch("killed", *two, *kill(*moments))
    found = finished(killed, log, tmp_path / "killed")
    assert log.read_text(encoding="utf-8").count("From checkpoint: run/checkpoints/") == len(moments)
    assert found[0] == whole[0]
    for name, weight in whole[1]["state_dict"].items():
        assert torch.equal(found[1]["state_dict"][name], weight)
    assert not (tmp_path / "killed" / "run-2").exists()
    assert not (tmp_path / "killed" / "run" / ".claimed").exists()


@pytest.mark.slow  # torchrun waits for others to join
@pytest.mark.timeout(600)
def test_a_killed_agent_leaves_a_run_on_the_others_with_the_same_global_batch(whole, launch, tmp_path):
    port = free_port()
    agent = ["--nnodes=1:2", "--nproc_per_node=1", "--rdzv_id=job7", "--rdzv_backend=c10d"]
    agent += [f"--rdzv_endpoint=localhost:{port}", "--rdzv-conf=keep_alive_interval=1,last_call_timeout=25"]
    first, log = launch("killed", *agent, *FIT)
    wait_for(port)  # the agent that comes first keeps the store of both
    launch("killed", *agent, *FIT, *kill("0/0/7", "0/1/7"), LEYDEN_TEST_VICTIM="1")
    found = finished(first, log, tmp_path / "killed")
    assert_same_run(found, whole)
    said = yaml.safe_load(found[1][checkpoint.RECORD]["config"])
    assert (said["trainer"]["accumulate_grad_batches"], said["data"]["init_args"]["batch_size"]) == (4, 2)
    assert found[1][checkpoint.RECORD]["ranks"] == 1


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ((2, 2, 4), (1, 4), (4, 4)),
        ((4, 1, 6), (3, 8), (1, 8)),
        ((2, 3, 5), (3, 5), (2, 5)),
        ((1, 1, 8), (2, 8), (1, 4)),  # there was no accumulation to share: smaller micro-batches
    ],
)
def test_the_global_batch_is_kept(before, now, expected):
    (ranks, accumulated, rows), (processes, most) = before, now
    stored = {
        "trainer": {"accumulate_grad_batches": accumulated},
        "data": {"init_args": {"batch_size": rows}},
    }
    found = restarts._shared(ranks, processes, stored, most)
    assert found == expected
    assert processes * found[0] * found[1] == ranks * accumulated * rows


def test_a_global_batch_that_cannot_be_shared_is_named():
    stored = {"trainer": {}, "data": {"init_args": {"batch_size": 4}}}
    with pytest.raises(ConfigError, match="2 processes and a global batch of 8 rows, which 3 cannot share"):
        restarts._shared(2, 3, stored, 4)
