"""A run that ended before its time goes on as if it had not: by max_steps, at an epoch's end or within one."""

import os
import signal

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from core.__main__ import main
from plugins.checkpoints import checkpoint, finding
from tests.conftest import TINY


@pytest.fixture
def fit(tmp_path, monkeypatch, capfd):
    """Trains in this process in a folder of its own; epochs have 16 batches."""
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(yaml.safe_dump(TINY))
    config["model"]["network"]["init_args"]["dropout"] = 0.1  # draws numbers by epoch and batch
    config["model"]["lr_scheduler"] = None
    config["trainer"]["max_steps"] = -1
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))

    def run(name, *words, code=0):
        found = main(["fit", "--config=tiny.yaml", f"--trainer.default_root_dir={name}", *words])
        assert found == code, capfd.readouterr().err
        return checkpoint.read_checkpoint(finding.newest(tmp_path / name))

    return run


def same(one, other):
    """Whether weights, optimizer and epochs are bitwise the same."""
    for name, weight in one["state_dict"].items():
        assert torch.equal(weight, other["state_dict"][name]), name
    states = [content["optimizer_states"][0]["state"] for content in (one, other)]
    assert all(
        torch.equal(states[0][key][name], states[1][key][name])
        for key in states[0]
        for name in states[0][key]
    )
    assert one["global_step"] == other["global_step"]
    for part in ("epoch_progress", "epoch_loop.state_dict"):  # the latter counts the loggers' steps
        assert one["loops"]["fit_loop"][part] == other["loops"]["fit_loop"][part], part


USUAL = ["--trainer.accumulate_grad_batches=2", "--trainer.limit_val_batches=1"]
VALIDATION = {  # in steps of the epoch, or of the run
    "epoch": [],
    "3": ["--trainer.val_check_interval=3"],
    "run 5": ["--trainer.val_check_interval=5", "--trainer.check_val_every_n_epoch=null"],
    "never": ["--trainer.limit_val_batches=0"],
}


LIMITS = [
    ["max_steps=3", "max_steps=11"],
    ["max_steps=8", "max_steps=11"],  # the end of the first epoch
    ["max_steps=3 max_epochs=2", "max_steps=-1 max_epochs=2"],
    ["max_steps=10 max_epochs=2", "max_steps=15 max_epochs=2"],
    ["max_epochs=1", "max_epochs=2"],
    ["max_epochs=1", "max_steps=9", "max_steps=16 max_epochs=-1", "max_steps=19", "max_epochs=3"],
]


BY_DEFAULT = LIMITS[1:3]
"""With a validation after each epoch: one limit of steps alone, and one of epochs too."""


def limited():
    """Yields limits and when there is a validation; in CI, each with one after each epoch."""
    for validation in VALIDATION:
        for limits in LIMITS:
            often = pytest.mark.ci if validation == "epoch" else pytest.mark.slow
            marks = [] if validation == "epoch" and limits in BY_DEFAULT else [often]
            yield pytest.param(limits, validation, id=f"{' then '.join(limits)}-{validation}", marks=marks)


@pytest.mark.parametrize(("limits", "validation"), limited())
def test_a_run_that_was_limited_goes_on_as_if_it_had_not_been(limits, validation, fit):
    steps = [[f"--trainer.{word}" for word in limit.split()] for limit in limits]
    whole = fit("whole", *USUAL, *VALIDATION[validation], *steps[-1])
    parts = fit("parts", *USUAL, *VALIDATION[validation], *steps[0])
    for step in steps[1:]:
        parts = fit("parts", *USUAL, *VALIDATION[validation], *step, "--ckpt_path=last")
    same(parts, whole)


@pytest.mark.gpu
def test_on_a_gpu_it_goes_on_bitwise_where_kernels_are_deterministic(fit, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # Lightning sets it
    usual = ["--trainer.accelerator=gpu", "--trainer.precision=bf16-mixed", "--trainer.deterministic=true"]
    try:
        whole = fit("whole", *usual, "--trainer.max_steps=11")
        fit("parts", *usual, "--trainer.max_steps=5")
        same(fit("parts", *usual, "--trainer.max_steps=11", "--ckpt_path=last"), whole)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_the_backward_of_attention_is_then_the_same_twice(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16).requires_grad_().unbind()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        first, *others = (torch.autograd.grad(y.sum(), (q, k, v), retain_graph=True) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.ci
@pytest.mark.parametrize("validation", ["epoch", "run 5"])
def test_every_checkpoint_of_a_run_leads_to_the_same_end(validation, fit, tmp_path):
    usual = [*USUAL, *VALIDATION[validation], "--callbacks.PeriodicCheckpoint.every_n_steps=1"]
    usual += ["--callbacks.PeriodicCheckpoint.keep=-1", "--trainer.max_steps=19"]
    whole = fit("whole", *usual)
    saved = sorted((tmp_path / "whole").glob("checkpoints/*.ckpt"))
    assert len(saved) == 19
    for path in (saved[step - 1] for step in (1, 7, 8, 9, 15, 16, 17)):  # about the ends of epochs, 8 and 16
        copy = tmp_path / "alone" / path.name
        copy.parent.mkdir(exist_ok=True)
        path.rename(copy)
        same(fit(f"from-{path.stem}", *usual, f"--ckpt_path={copy}"), whole)


class Signal(Callback):
    """Sends this process a signal when it begins a batch."""

    def __init__(self, number: int, batch: int) -> None:
        self.number, self.batch = number, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            os.kill(os.getpid(), self.number)


def signalled(number, batch):
    option = f"--trainer.callbacks+={__name__}.Signal"
    return [option, f"--trainer.callbacks.number={int(number)}", f"--trainer.callbacks.batch={batch}"]


@pytest.mark.parametrize(
    "batch", [0, 15, *(pytest.param(n, marks=pytest.mark.ci) for n in (4, 13, 14, 16, 20))]
)
def test_sigterm_ends_a_run_after_the_step_that_it_is_in(batch, fit):
    whole = fit("whole", *USUAL, "--trainer.max_steps=11")
    stopped = fit("parts", *USUAL, "--trainer.max_steps=11", *signalled(signal.SIGTERM, batch), code=143)
    assert stopped["global_step"] == batch // 2 + 1
    same(fit("parts", *USUAL, "--trainer.max_steps=11", "--ckpt_path=last"), whole)


def test_slurms_notice_saves_the_run_and_puts_the_job_back_into_the_queue(fit, monkeypatch, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.txt\n')
    (tools / "scontrol").chmod(0o755)
    job = {"JOB_ID": "71", "JOB_NAME": "train", "NTASKS": "1", "STEP_NUM_TASKS": "1", "NODELIST": "127.0.0.1",
           "NNODES": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}  # fmt: skip
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    stopped = fit("parts", *USUAL, "--trainer.max_steps=11", *signalled(signal.SIGUSR1, 5), code=143)
    assert stopped["global_step"] == 3
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 71\n"
