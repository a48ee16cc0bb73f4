"""A URL belongs to one run: who is kept out, and who goes on."""

import json
import os
from dataclasses import asdict, replace

import pytest
import yaml

from conformance.runs import run
from core.errors import ConfigError
from tests.conftest import TINY
from tests.support.object_storage import answering, two_ranks
from toolkit import storage_owner
from toolkit.holders import Holder, myself, start_of
from toolkit.object_storage import ObjectFolder
from toolkit.storage_owner import OWNER, take

PARENT = Holder(None, myself().host, os.getppid(), start_of(os.getppid()), myself().space)
GONE = Holder(None, myself().host, os.getppid(), "1", myself().space)
ELSEWHERE = Holder(None, "node7", 7, "1", "")
STEP = ["step-00000002.ckpt"]


@pytest.fixture
def mark(storage, monkeypatch, tmp_path):
    """Writes the mark of a run to a folder that is this test's own; returns that folder."""
    for name, value in storage.environment.items():
        monkeypatch.setenv(name, value)
    folder = ObjectFolder(f"s3://corpora/{tmp_path.name}")

    def write(holder, name="first"):
        boot = storage_owner._boot()
        found = {"run": name, "folder": "/runs/first", "boot": boot, "holder": asdict(holder)}
        folder.put(OWNER, json.dumps(found).encode())
        return folder

    return write


def test_the_first_run_and_its_restart_in_that_folder(mark, tmp_path):
    folder = mark(GONE)
    folder.remove([OWNER])
    own = take(folder, "", tmp_path, [])
    assert (tmp_path / OWNER).read_text() == own == json.loads(folder.read(OWNER))["run"]
    mark(ELSEWHERE, own)  # restarted on another machine, before its first checkpoint
    assert take(folder, "", tmp_path, []) == own
    assert json.loads(folder.read(OWNER))["holder"] == asdict(myself())


@pytest.mark.parametrize(
    ("holder", "resumes", "there", "refused"),
    [
        (PARENT, "", [], "to another run"),
        (PARENT, "first", STEP, "this run writes already"),
        (GONE, "", [], None),
        (GONE, "", STEP, "to another run"),
        (GONE, "first", STEP, None),
        (ELSEWHERE, "", [], "to another run"),
        (ELSEWHERE, "another", STEP, "to another run"),
        (ELSEWHERE, "first", STEP, None),
    ],
)
def test_who_may_write_beside_the_mark_of_a_run(holder, resumes, there, refused, mark, tmp_path):
    """Of a process that runs, that has ended, and of one on another machine, of which nobody here can know."""
    folder = mark(holder)
    if refused is None:
        assert take(folder, resumes, tmp_path, there) == ((tmp_path / OWNER).read_text())
        assert json.loads(folder.read(OWNER))["holder"] == asdict(myself())
        return
    with pytest.raises(ConfigError, match=refused) as error:
        take(folder, resumes, tmp_path, there)
    message = str(error.value)
    assert len(message.splitlines()) <= 4
    assert f"process {holder.process} on {holder.host}, run folder /runs/first" in message
    assert (f"delete {folder.url}/.owner" in message) == (holder != PARENT)
    assert json.loads(folder.read(OWNER))["run"] == "first"
    assert not (tmp_path / OWNER).exists()


def test_a_mark_that_cannot_be_read_keeps_others_out(mark, tmp_path):
    folder = mark(GONE)
    folder.put(OWNER, b"[")
    with pytest.raises(ConfigError, match="cannot be read"):
        take(folder, "", tmp_path, [])


def test_what_strangers_write_into_marks_and_run_folders(mark, tmp_path):
    folder = mark(replace(ELSEWHERE, host="\033[2J" + "\n" * 20))
    os.mkfifo(tmp_path / OWNER)  # to read it would take for ever
    with pytest.raises(ConfigError, match="to another run") as error:
        take(folder, "", tmp_path, [])
    assert len(str(error.value).splitlines()) <= 4
    assert "\033" not in str(error.value)


def test_of_two_that_start_together_one_is_refused(mark, tmp_path, monkeypatch):
    """Between the look and the request of this run another was faster."""
    folder = mark(PARENT)
    looks = [None, ObjectFolder.look_up(folder, OWNER)]
    monkeypatch.setattr(folder, "look_up", lambda name: looks.pop(0))
    with pytest.raises(ConfigError, match="to another run"):
        take(folder, "", tmp_path, [])
    assert not looks
    before = folder.level()[0][OWNER]
    mark(ELSEWHERE)
    assert not folder.put_if(OWNER, b"", before)


def test_a_service_without_conditional_writes(mark, monkeypatch, tmp_path):
    marks = []

    def answer(handler, body):
        refused = handler.headers.get("If-None-Match") is not None
        marks.append((handler.command, refused))
        content = b"<Error><Code>NotImplemented</Code></Error>" if refused else b""
        handler.send_response(400 if refused else 200)
        handler.send_header("ETag", '"1"')
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    mark(GONE)
    with answering(answer) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert ObjectFolder("s3://corpora/plain").put_if(OWNER, b"", None)
    assert marks == [("PUT", True), ("PUT", False)]


@pytest.mark.ci
def test_both_ranks_of_a_second_run_end_before_the_first_step(mark, storage, tmp_path):
    folder = mark(ELSEWHERE)
    values = {**TINY, "trainer": {**TINY["trainer"], "strategy": "DDP", "devices": 2}}
    values["trainer"]["callbacks"] = [
        {"class_path": "PeriodicCheckpoint", "init_args": {"dirpath": folder.url}}
    ]
    values["trainer"]["default_root_dir"] = str(tmp_path / "run")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    # the process that ranks are forked from may be older than this test's credentials
    places = [storage.environment | ranks for ranks in two_ranks()]
    done = run(["fit", f"--config={tmp_path}/run.yaml"], tmp_path / "run", ranks=2, environments=places)
    assert done.codes == (2, 2)
    assert done.error_text.count("which belongs to another run (process 7 on node7") == 2
    assert storage.keys(tmp_path.name) == [OWNER]
    assert [path.name for path in (tmp_path / "run").iterdir()] == []
