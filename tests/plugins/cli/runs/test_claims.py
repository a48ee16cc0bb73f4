"""A run folder belongs to one run at a time, also to one that is resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from conformance.runs import run
from conformance.workshop import workshop, write_config
from core.errors import ConfigError
from plugins.cli.runs import claims
from plugins.cli.runs.claims import CLAIM, leave, take_claim
from tests.conftest import TINY
from toolkit.holders import Holder, alive, myself, start_of


@pytest.fixture
def sleeper():
    """Another process of this machine, as a holder."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield Holder(None, myself().host, process.pid, start_of(process.pid), myself().space)
    process.kill()
    process.wait()


def test_a_living_process_keeps_its_folder(tmp_path, sleeper):
    claims.write_claim(tmp_path, sleeper)
    with pytest.raises(ConfigError) as error:
        take_claim(tmp_path, None)
    assert f"in use: process {sleeper.process} on {sleeper.host} writes to it" in str(error.value)
    assert claims.read_claim(tmp_path) == sleeper
    leave(tmp_path, keep_job=False)  # not ours to end
    assert claims.read_claim(tmp_path) == sleeper


@pytest.mark.parametrize("reaped", [True, False], ids=["over", "a zombie"])
def test_the_claim_of_a_dead_process_is_taken_over(reaped, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = Holder(None, myself().host, process.pid, start_of(process.pid), myself().space)
    process.stdin.write(b"\n")
    process.stdin.close()
    deadline = time.monotonic() + 240
    while start_of(process.pid) != "-" and time.monotonic() < deadline:
        time.sleep(0.01)
    if reaped:
        process.wait()
    claims.write_claim(tmp_path, holder)
    take_claim(tmp_path, None)
    assert claims.read_claim(tmp_path) == myself()
    leave(tmp_path, keep_job=False)
    assert not (tmp_path / CLAIM).exists()
    process.wait()


def test_a_number_that_another_process_has_now_is_no_life(tmp_path, sleeper):
    claims.write_claim(tmp_path, Holder(None, sleeper.host, sleeper.process, "1", sleeper.space))
    take_claim(tmp_path, None)
    assert claims.read_claim(tmp_path) == myself()


@pytest.mark.parametrize("other", [{"host": "node7"}, {"space": "pid:[1]"}], ids=["machine", "container"])
def test_the_claim_of_another_machine_is_left_to_the_user(other, tmp_path):
    holder = Holder(**{**vars(myself("a")), "process": 7, **other})
    claims.write_claim(tmp_path, holder)
    assert alive(holder) is None
    with pytest.raises(ConfigError) as error:
        take_claim(tmp_path, "b")
    assert f"process 7 on {holder.host}" in str(error.value)
    assert f"delete {tmp_path / CLAIM}" in str(error.value)
    (tmp_path / CLAIM).unlink()
    take_claim(tmp_path, "b")


def test_a_job_that_is_started_again_elsewhere_finds_its_folder_and_its_beginning(tmp_path):
    claims.write_claim(tmp_path, Holder(**{**vars(myself("a")), "host": "node7"}))
    os.utime(tmp_path / CLAIM, ns=(7, 7))
    take_claim(tmp_path, "a")
    assert claims.read_claim(tmp_path) == myself("a")
    assert (tmp_path / CLAIM).stat().st_mtime_ns == 7
    leave(tmp_path, keep_job=True)
    assert claims.read_claim(tmp_path) == Holder("a")
    assert (tmp_path / CLAIM).stat().st_mtime_ns == 7
    take_claim(tmp_path, "b")


@pytest.mark.parametrize("text", ["", "SLURM 7", "{", "[1]", '{"a": 1}', "null", "\0"])
def test_a_claim_that_names_no_process_does_not_keep_a_resumed_run_away(text, tmp_path):
    (tmp_path / CLAIM).write_text(text)
    take_claim(tmp_path, None)
    assert json.loads((tmp_path / CLAIM).read_text())["process"] == os.getpid()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    """In a process without root's rights."""
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o555)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                for path in (tmp_path, *list(tmp_path.parents)[:3]):
                    path.chmod(0o755)
                os.setuid(65534)
            try:
                take_claim(folder, None)
            except ConfigError as error:
                code = 0 if "cannot be made: Permission denied" in str(error) else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    folder.chmod(0o755)


def test_a_second_resume_is_refused_and_leaves_the_firsts_files(tmp_path):
    """The first is in the middle of its run; the second would remove what it is writing."""
    folder = workshop() / "resumed twice"
    config = write_config(
        "resumed twice", TINY | {"trainer": TINY["trainer"] | {"default_root_dir": str(folder)}}
    )
    words = ["fit", f"--config={config}"]
    assert run(words, folder).code == 0
    leftover = folder / "checkpoints" / ".step-00000008.ckpt.tmp"
    leftover.write_bytes(b"being written")
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        found = Holder(None, myself().host, holder.pid, start_of(holder.pid), myself().space)
        claims.write_claim(folder, found)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        second = run([*words, "--ckpt_path=last", "--trainer.max_steps=8"], folder)
        assert second.code == 2
        assert f"process {holder.pid} on {found.host}" in second.stderr
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    third = run([*words, "--ckpt_path=last", "--trainer.max_steps=8"], folder)
    assert third.code == 0, third.error_text
    assert not leftover.exists()
    assert not (folder / CLAIM).exists()
