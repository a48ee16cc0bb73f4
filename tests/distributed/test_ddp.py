"""Two real gloo ranks give the loss curve, gradient norms and weights of one process."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest

from conformance.runs import run
from tests.support.killing import Moment, killer
from tests.support.launched_ranks import HOUSE, assert_same_run, forked, results, write

LAUNCHES = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone",
                 "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=ddp"],
    "lightning": [sys.executable, "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=ddp"],
    "FSDP": [sys.executable, "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=FSDP"],
    "pipeline": [sys.executable, "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=HybridParallel",
                 "--trainer.strategy.pipeline=2"],
}  # fmt: skip
"""How users start two ranks; with strategies of ours too, which here import what they need by themselves."""

HOW_OFTEN = {name: pytest.mark.ci if name == "FSDP" else pytest.mark.slow for name in LAUNCHES}
"""CI has Lightning's launcher with a strategy of ours. torchrun starts the job of test_elastic.py, whose forked run
without a launcher it repeats bit by bit; that two ranks of DDP are one process is below, started as Slurm does."""


def launched(command, folder):
    """Trains as users start it."""
    words = write(folder)
    with open(folder / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, *words], cwd=folder, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOUSE)},
        )  # fmt: skip
        try:
            code = process.wait(timeout=300)
        finally:  # all ranks, whatever happened
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (folder / "log").read_text(encoding="utf-8")[-3000:]
    return results(folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    done = forked(1, folder)
    assert done.code == 0, done.error_text
    return results(folder)


@pytest.mark.parametrize("launch", [pytest.param(name, marks=HOW_OFTEN[name]) for name in LAUNCHES])
def test_two_ranks_with_uneven_labels_are_one_process(one, launch, tmp_path):
    assert_same_run(launched(LAUNCHES[launch], tmp_path), one)


@pytest.mark.ci
def test_two_ranks_leave_one_run_folder(tmp_path):
    for _ in range(2):
        done = forked(2, tmp_path, "--trainer.max_steps=1", "--trainer.limit_val_batches=0")
        assert done.code == 0, done.error_text
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["run", "run-2"]


@pytest.mark.ci
def test_slurms_tasks_are_the_ranks(one, tmp_path):
    """With what srun sets for each task."""
    job = {"SLURM_JOB_ID": 12345, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2,
           "SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": 1, "SLURM_NODEID": 0}  # fmt: skip
    places = [
        {name: str(value) for name, value in {**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}.items()}
        for rank in (0, 1)
    ]
    done = forked(2, tmp_path, environments=places)
    assert done.codes == (0, 0), done.error_text
    assert_same_run(results(tmp_path), one)


@pytest.mark.ci
def test_sigterm_to_one_rank_ends_both_after_the_same_step(tmp_path):
    noting = [
        f"--trainer.callbacks+={{class_path: {name}, init_args: {{folder: {tmp_path}}}}}"
        for name in ("tests.support.uneven.LastStep", "tests.support.killing.Progress")
    ]
    endless = [
        "--trainer.max_steps=1000000",
        "--trainer.log_every_n_steps=7",
        "--trainer.limit_val_batches=0",
    ]
    with killer(tmp_path, Moment(rank=1, batches=9, delay_s=0.05, signal=signal.SIGTERM)) as ended:
        done = forked(2, tmp_path, *endless, *noting)
    assert ended, done.error_text
    assert done.codes == (143, 143), done.error_text
    one, two = (int((tmp_path / f"last_step.{rank}").read_text(encoding="utf-8")) for rank in (0, 1))
    assert one == two
    assert one % 7 == 0


@pytest.mark.ci
def test_ranks_that_predict_nothing_say_so(tmp_path):
    words = [
        *write(tmp_path),
        "--data=tests.support.toy.ToyData",
        "--trainer.devices=2",
        "--trainer.strategy=ddp",
    ]
    done = run(["predict", *words, "--trainer.limit_predict_batches=0"], tmp_path, ranks=2)
    assert done.codes == (2, 2)
    assert "Nothing was predicted" in done.stderr
    assert not list((tmp_path / "run").glob("predictions*"))
    done = run(["predict", *words], tmp_path, ranks=2)
    assert done.codes == (0, 0), done.error_text
    assert len(list(tmp_path.glob("run*/predictions.rank?.safetensors"))) == 2


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.ci),
        "FSDP",
        pytest.param("HybridParallel tensor=2", id="tensor", marks=pytest.mark.ci),
        pytest.param("HybridParallel pipeline=2", id="pipeline", marks=pytest.mark.ci),
    ],
)
def test_the_module_that_is_not_finite_is_named_also_where_weights_are_spread(strategy, tmp_path):
    name, *sizes = strategy.split()
    poison = [
        "--trainer.callbacks+=tests.support.poisoned_ranks.PoisonedSteps",
        "--trainer.callbacks.start=3",
    ]
    chosen = [f"--trainer.strategy={name}", *(f"--trainer.strategy.{size}" for size in sizes)]
    words = ["fit", *write(tmp_path), "--trainer.devices=2", *chosen, *poison]
    done = run([*words, "--trainer.callbacks+=NonFiniteGuard"], tmp_path, ranks=2)
    assert done.code == 2, done.error_text
    assert "NonFiniteGuard: in step 3 the loss is" in done.error_text
    assert re.search(r"First found: the gradient that \S+ .*passes on going backward", done.error_text), (
        done.error_text
    )
