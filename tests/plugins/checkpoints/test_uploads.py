"""Checkpoints on object storage: complete or absent, read back to the bit, also after kill -9 in the middle of an upload."""

import os
import signal
import threading
from copy import deepcopy
from pathlib import Path
from time import sleep

import pytest
import torch
import yaml

from conformance.runs import run
from core.__main__ import main
from core.errors import ConfigError
from plugins.checkpoints import finding, remote_copies
from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.checkpoints.initial_weights import InitialWeights
from plugins.checkpoints.sharded_checkpoint import ShardedCheckpoint
from plugins.cli.runs.run_folder import fill_in
from plugins.networks.gpt import GPT
from tests.conftest import TINY
from tests.support.object_storage import answer_with, answering, passed_on, two_ranks
from tests.support.same_run import same_bits
from toolkit import object_storage
from toolkit.checkpoint_places import RemotePlace
from toolkit.storage_owner import OWNER

CONTENT = {
    "state_dict": {"w": torch.arange(10.0), "b": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer_states": [
        {"state": {0: {"exp_avg": torch.arange(10.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    ],
    "global_step": 7,
    "pytorch-lightning_version": "2.6.0",
}
FORMATS = pytest.mark.parametrize("plugin", [AtomicCheckpoint, ShardedCheckpoint])
ONE_BY_DEFAULT = pytest.mark.parametrize(
    "plugin", [AtomicCheckpoint, pytest.param(ShardedCheckpoint, marks=pytest.mark.ci)]
)


@pytest.fixture
def environment(storage, monkeypatch, tmp_path):
    """What processes find: the storage's credentials, and a cache of their own."""
    found = {**storage.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def save(environment, tmp_path):
    """Writes a checkpoint of a step to a URL; returns its URL."""

    def written(plugin, url, step):
        io = plugin()
        io.stage_in(tmp_path / "uploads")
        io.save_checkpoint({**deepcopy(CONTENT), "global_step": step}, f"{url}/step-{step:08d}.ckpt")
        io.teardown()
        assert not (tmp_path / "uploads").exists()
        return f"{url}/step-{step:08d}.ckpt"

    return written


@FORMATS
def test_it_comes_back_and_what_completes_it_is_written_last(plugin, save, storage):
    url = save(plugin, f"s3://corpora/{plugin.__name__}", 7)
    written = [
        line for line in storage.log.read_text().splitlines() if f"PUT /corpora/{plugin.__name__}/" in line
    ]
    assert written[-1].split()[-4].endswith("complete")
    copy = finding.resolve(url, Path())
    assert same_bits(read_checkpoint(copy), CONTENT)
    assert finding.resolve(url.rpartition("/")[0], Path()) == copy
    assert remote_copies.shown(copy) == url
    assert remote_copies.here(Path("/cache/of/another/machine", *copy.parts[-2:])) == copy


@ONE_BY_DEFAULT
def test_what_is_damaged_or_not_complete_is_passed_over(plugin, save, storage, capsys, tmp_path):
    prefix = f"damaged-{plugin.__name__}"
    url = f"s3://corpora/{prefix}"
    for step in (1, 2, 3):
        save(plugin, url, step)
    newest = sorted(key for key in storage.keys(prefix) if "step-00000003" in key and "complete" not in key)
    storage.client.delete_object(
        Bucket="corpora",
        Key=f"{prefix}/{next(k for k in storage.keys(prefix) if '3.ckpt' in k and 'complete' in k)}",
    )
    damaged = next(
        key for key in storage.keys(prefix) if "step-00000002" in key and key.endswith((".ckpt", "e.pt"))
    )
    storage.put(f"{prefix}/step-00000003.ckpt.partial", b"")  # as an upload that was interrupted leaves it
    content = bytearray(storage.read(f"{prefix}/{damaged}"))
    content[len(content) // 2] ^= 1
    storage.put(f"{prefix}/{damaged}", bytes(content))
    assert read_checkpoint(finding.resolve(url, Path()))["global_step"] == 1
    message = capsys.readouterr().err
    assert "step-00000002.ckpt is skipped: " in message
    assert "is damaged (SHA-256)" in message
    assert "step-00000003" not in message
    with pytest.raises(ConfigError, match=r"no complete checkpoint step-00000003.ckpt there") as error:
        finding.resolve(f"{url}/step-00000003.ckpt", Path())
    assert len(str(error.value).splitlines()) <= 3
    # The next run deletes what was not completed.
    RemotePlace(url).check(True, tmp_path, "")
    assert newest
    assert not [key for key in storage.keys(prefix) if "step-00000003" in key]
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        RemotePlace(url).check(False, tmp_path, "")


def test_what_somebody_copied_there_is_left_alone(environment, storage, tmp_path):
    """Such as a run's local checkpoints, by `aws s3 sync`: no run may take them for its unfinished uploads."""
    url = "s3://corpora/by-hand"
    storage.put("by-hand/step-00000001.ckpt", b"all that there is")
    RemotePlace(url).check(True, tmp_path, "")
    with pytest.raises(ConfigError, match=r"checkpoints of another run \(step-00000001.ckpt\)"):
        RemotePlace(url).check(False, tmp_path, "")
    with pytest.raises(ConfigError, match="copied there without complete"):
        finding.resolve(f"{url}/step-00000001.ckpt", Path())
    assert storage.keys("by-hand") == [OWNER, "step-00000001.ckpt"]


def test_a_wrong_name_beside_a_run_connects_to_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_copies, "ObjectFolder", None)
    (tmp_path / "run").mkdir()
    written = {"trainer": {"callbacks": [{"init_args": {"dirpath": "s3://nowhere/run"}}]}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    with pytest.raises(ConfigError, match="rum"):
        finding.resolve(str(tmp_path / "rum"), Path())


def test_a_run_folder_in_a_url_is_the_same_by_its_absolute_path(tmp_path, monkeypatch):
    """Otherwise a run that is resumed by it would look for its checkpoints, and write them, elsewhere."""
    monkeypatch.chdir(tmp_path)
    run_folder, url = tmp_path / "runs" / "first", "s3://bucket/${run_folder}/checkpoints"
    run_folder.mkdir(parents=True)
    written = {"trainer": {"callbacks": [{"init_args": {"dirpath": url}}]}}
    (run_folder / "config.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    for folder in (Path("runs/first"), run_folder):
        assert fill_in(url, folder) == "s3://bucket/runs/first/checkpoints"
        assert list(finding._recorded_places(folder)) == ["s3://bucket/runs/first/checkpoints"]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0.parts"])
def test_a_damaged_file_of_a_rank_is_found_when_it_is_read(name, save, storage):
    url = save(ShardedCheckpoint, "s3://corpora/tensors", 1)
    key = f"tensors/step-00000001.ckpt/{name}"
    storage.put(key, b"x" * len(storage.read(key)))
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        read_checkpoint(finding.resolve(url, Path()))


def test_the_steps_of_a_discarded_history(save, storage, tmp_path):
    """They are used where there is no other, and replaced by the same step of the new history, which pruning spares."""
    url = "s3://corpora/history"
    for step in (1, 2):
        save(AtomicCheckpoint, url, step)
    place = RemotePlace(url)
    place.check(True, tmp_path, "")
    assert place.set_aside(1) == {"step-00000002.ckpt": "step-00000002.abandoned.ckpt"}
    assert place.present(["step-00000001.ckpt", "step-00000002.abandoned.ckpt"]) != []
    assert finding.resolve(url, Path()).name == "step-00000001.ckpt"
    io = AtomicCheckpoint()
    save(AtomicCheckpoint, url, 2)
    place.saved("step-00000002.ckpt")
    assert place.present(["step-00000002.ckpt", "step-00000002.abandoned.ckpt"]) == []
    io.remove_checkpoint(f"{url}/step-00000002.abandoned.ckpt")
    io.remove_checkpoint(f"{url}/step-00000001.ckpt")
    io.teardown()
    assert storage.keys("history") == [OWNER, "step-00000002.ckpt", "step-00000002.ckpt.complete"]


@pytest.mark.ci
def test_a_run_that_ended_before_it_could_mark_a_discarded_history_does_not_take_it(
    save, storage, monkeypatch, tmp_path
):
    """SIGTERM in an outage: the step that was saved meanwhile, on this machine alone, is the newest of the new history."""
    monkeypatch.setattr(object_storage, "LOOK_S", 0.05)
    url, folder = "s3://corpora/unmarked", tmp_path / "run"
    for step in (1, 4):
        save(AtomicCheckpoint, url, step)
    saver = {"class_path": "PeriodicCheckpoint", "init_args": {"dirpath": url}}
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [saver]}}))
    place = RemotePlace(url)
    owner = place.check(True, folder, "")
    with (
        answering(lambda handler, body: answer_with(handler, 503)) as endpoint,
        monkeypatch.context() as down,
    ):
        down.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(ConfigError, match="cannot be read"):
            place.set_aside(2, lambda: True)
    assert finding.newest(folder).name == "step-00000001.ckpt"
    io, staged = AtomicCheckpoint(), folder / "uploads" / "step-00000002.ckpt"
    io.save_checkpoint({**deepcopy(CONTENT), "global_step": 2}, staged)
    io.teardown()
    assert finding.newest(folder) == staged
    resumed = RemotePlace(url)
    resumed.check(True, folder, owner)
    assert resumed.set_aside(2) == {"step-00000004.ckpt": "step-00000004.abandoned.ckpt"}
    assert "step-00000004.ckpt.abandoned" in storage.keys("unmarked")
    assert [path.name for path in folder.glob(".*")] == [OWNER]
    assert finding.newest(folder).name == "step-00000001.ckpt"


def test_ctrl_c_ends_the_wait_of_a_run_that_goes_back_in_an_outage(environment, monkeypatch):
    monkeypatch.setattr(object_storage, "LOOK_S", 0.05)
    pressed = []

    def answer(handler, body):
        if not pressed:
            pressed.append(signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
        answer_with(handler, 503)

    with answering(answer) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(KeyboardInterrupt):
            RemotePlace("s3://corpora/back").set_aside(1)
    assert pressed


@ONE_BY_DEFAULT
def test_what_cannot_be_uploaded_stays_here(plugin, storage, environment, monkeypatch, tmp_path):
    """Once the run is to end, an outage of the storage is not waited out: no step is lost, also none saved afterwards."""
    monkeypatch.setattr(object_storage, "LOOK_S", 0.05)
    down, staged, url = [], tmp_path / "uploads", f"s3://corpora/outage-{plugin.__name__}"

    def answer(handler, body):
        if down:
            answer_with(handler, 503)
        else:
            passed_on(handler, body, storage.url)

    with answering(answer) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        io = plugin()
        io.stage_in(staged)
        io.save_checkpoint(CONTENT, f"{url}/step-00000007.ckpt")
        io.wait()
        down.append(True)
        io.save_checkpoint(CONTENT, f"{url}/step-00000008.ckpt")
        io.end_soon()
        with pytest.raises(ConfigError, match=r"cannot be (read|written)") as error:
            io.wait()
        assert f"complete in {staged}: step-00000008.ckpt." in str(error.value)
        io.save_checkpoint(CONTENT, f"{url}/step-00000009.ckpt")
        with pytest.raises(ConfigError) as error:
            io.wait()
        io.teardown()
    lines = str(error.value).splitlines()
    assert len(lines) <= 6
    assert lines[-3:] == [
        f"Not uploaded, and complete in {staged}: step-00000008.ckpt, step-00000009.ckpt.",
        f"To go on from there: --ckpt_path {staged}/step-00000009.ckpt",
        f"To upload by hand: aws s3 sync {staged} {url}",
    ]
    monkeypatch.setenv("AWS_ENDPOINT_URL", storage.url)
    assert same_bits(read_checkpoint(finding.resolve(f"{staged}/step-00000008.ckpt", Path())), CONTENT)
    storage.upload(staged, f"outage-{plugin.__name__}")  # by hand
    copy = finding.resolve(url, Path())
    assert copy.name == "step-00000009.ckpt"
    assert same_bits(read_checkpoint(copy), CONTENT)
    io = plugin()
    io.stage_in(staged)  # by a run that resumes from it
    assert (staged / "step-00000009.ckpt").exists()
    io.save_checkpoint(CONTENT, f"{url}/step-00000010.ckpt")
    io.teardown()
    assert not staged.exists()


def test_a_slow_upload_of_a_run_that_is_to_end_is_not_cut_off(storage, environment, monkeypatch, tmp_path):
    monkeypatch.setattr(object_storage, "LOOK_S", 0.02)
    ended, looks = [], []

    def answer(handler, body):
        looks.append(handler.path.endswith("/complete"))
        if handler.command == "PUT" and handler.path.endswith(".ckpt") and not ended:
            ended.append(io.end_soon())
            while sum(looks) < 3:
                sleep(0.01)
        passed_on(handler, body, storage.url)

    with answering(answer) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        io = AtomicCheckpoint()
        io.stage_in(tmp_path / "uploads")
        io.save_checkpoint(CONTENT, "s3://corpora/slow/step-00000007.ckpt")
        io.wait()
        io.teardown()
    assert storage.keys("slow") == ["step-00000007.ckpt", "step-00000007.ckpt.complete"]


def test_the_other_error_of_a_run_is_not_hidden(environment, tmp_path, capsys):
    io = AtomicCheckpoint()
    io.stage_in(tmp_path / "uploads")
    io.save_checkpoint(CONTENT, "s3://nowhere/run/step-00000007.ckpt")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        io.teardown()
    assert "NoSuchBucket" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_no_upload_either(tmp_path):
    """As any error on one rank alone, it would leave the others waiting; and the next run in the process begins anew."""
    io = AtomicCheckpoint()
    io.stage_in(tmp_path / "uploads")
    folder = object_storage.ObjectFolder("s3://bucket/run")
    io._background.submit(io._staging.attempt, folder, (tmp_path / "gone").stat)
    with pytest.raises(ConfigError, match=r"s3://bucket/run: .*No such file") as error:
        io.wait()
    assert len(str(error.value).splitlines()) <= 3
    io._background.submit(io._staging.require_uploaded)
    io.end_soon()
    with pytest.raises(ConfigError):
        io._background.close()
    assert not io._background.patience.ending.is_set()


def test_copies_that_nobody_uses_make_room(save, monkeypatch, tmp_path):
    urls = [save(AtomicCheckpoint, "s3://corpora/room", step) for step in (1, 2)]
    first = finding.resolve(urls[0], Path())
    second = finding.resolve(urls[1], Path())
    assert first.exists()  # this process uses both
    remote_copies._held.pop(first.parent).close()
    remote_copies._held.pop(second.parent).close()
    finding.resolve(urls[1], Path())
    assert (first.exists(), second.exists()) == (False, True)


# -- runs ------------------------------------------------------------------------------------------


def written_config(folder, tiny, dirpath=None, **trainer):
    """Writes the tiny run, whose checkpoints are at `dirpath` or in its folder."""
    tiny = deepcopy(tiny)
    tiny["trainer"] |= {"default_root_dir": str(folder), **trainer}
    if dirpath:
        tiny["trainer"]["callbacks"][0]["init_args"]["dirpath"] = dirpath
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tiny), encoding="utf-8")
    return f"--config={path}"


@pytest.mark.ci
def test_a_run_that_is_killed_in_the_middle_of_an_upload(storage, environment, tmp_path):
    """kill -9 as step 4 is about to become complete: the run resumes from step 2, and no bit differs at the end."""
    here = run(["fit", written_config(tmp_path / "here", TINY)], tmp_path / "here").succeeded("the local run")
    options = written_config(tmp_path / "there", TINY, "s3://corpora/killed")
    killed = []

    def answer(handler, body):
        if handler.command == "PUT" and handler.path.endswith("step-00000004.ckpt.complete") and not killed:
            killed.append(int((tmp_path / "pid.0").read_text()))
            os.kill(killed[0], signal.SIGKILL)
            handler.close_connection = True
        else:
            passed_on(handler, body, storage.url)

    progress = f"{{class_path: tests.support.killing.Progress, init_args: {{folder: {tmp_path}}}}}"
    with answering(answer) as url:
        slow = [{**environment, "AWS_ENDPOINT_URL": url}]
        done = run(
            ["fit", options, f"--trainer.callbacks+={progress}"], tmp_path / "there", environments=slow
        )
    assert done.code == -9
    assert storage.keys("killed") == [
        OWNER,
        "step-00000002.ckpt",
        "step-00000002.ckpt.complete",
        "step-00000004.ckpt",
        "step-00000004.ckpt.partial",
    ]
    done = run(["fit", options, "--ckpt_path=last"], tmp_path / "there", environments=[environment])
    assert (
        "From checkpoint: s3://corpora/killed/step-00000002.ckpt" in done.succeeded("the resumed run").stdout
    )
    names = ("step-00000004.ckpt", "step-00000006.ckpt")
    assert storage.keys("killed") == [OWNER, *(word for name in names for word in (name, f"{name}.complete"))]
    assert not (tmp_path / "there" / "uploads").exists()
    for name in names:
        (tmp_path / name).write_bytes(storage.read(f"killed/{name}"))
        one, other = (read_checkpoint(folder / name) for folder in (tmp_path, here.folder / "checkpoints"))
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
            assert same_bits(one[part], other[part])
    # The stored dirpath is outside of the run folder, but where the user's URL leads.
    options = ["validate", "--ckpt_path=s3://corpora/killed"]
    done = run(options, tmp_path / "elsewhere", environments=[environment]).succeeded("validate")
    assert "From checkpoint: s3://corpora/killed/step-00000006.ckpt" in done.stdout


@pytest.mark.ci
@FORMATS
def test_texts_of_a_checkpoint_in_a_url_are_those_of_the_file(plugin, environment, tmp_path, capsys):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"hello world number {number}. " * 20)
    config = deepcopy(TINY)
    config["model"]["network"]["init_args"]["vocab_size"] = 512
    stages = {"reader": "TextDocuments", "writer": "TokenShards", "packing": "Concatenate"}
    tokenizer = {"class_path": "BPETokenizer", "init_args": {"vocab_size": 300}}
    paths = {"source": str(tmp_path / "*.txt"), "cache_dir": str(tmp_path / "tokens")}
    arguments = {**stages, **paths, "tokenizer": tokenizer, "sequence_length": 16, "batch_size": 2}
    config["data"] = {"class_path": "PretrainDataModule", "init_args": arguments}
    options = written_config(tmp_path / "here", config)
    here = run(["fit", options], tmp_path / "here").succeeded("the run").folder / "checkpoints"
    io = plugin()
    io.stage_in(tmp_path / "uploads")
    url = f"s3://corpora/texts-{plugin.__name__}"
    io.save_checkpoint(read_checkpoint(here / "step-00000006.ckpt"), f"{url}/step-00000006.ckpt")
    io.teardown()
    capsys.readouterr()
    found = []
    for path in (str(here / "step-00000006.ckpt"), url, f"{url}/step-00000006.ckpt"):
        assert main(["generate", "--ckpt_path", path, "--prompt=hello", "--max_new_tokens=12"]) == 0
        shown = capsys.readouterr()
        found.append(shown.out)
        assert f"# {url}/step-00000006.ckpt, seed" in shown.err or not path.startswith("s3:")
    assert found[0] == found[1] == found[2]
    assert found[0].startswith("hello")


@pytest.mark.ci
def test_two_ranks_upload_their_own_parts_and_one_process_reads_them(storage, environment, tmp_path, capsys):
    sharded = {"strategy": "FSDP", "devices": 2, "plugins": ["ShardedCheckpoint"]}
    trained = {}
    for name, dirpath in (("here", None), ("there", "s3://corpora/ranks/checkpoints")):
        options = written_config(tmp_path / name, TINY, dirpath, **sharded)
        places = [environment | ranks for ranks in two_ranks()]
        run(["fit", options], tmp_path / name, ranks=2, environments=places).succeeded(name)
        trained[name] = name
    files = {
        "step-00000006.ckpt/__0_0.distcp",
        "step-00000006.ckpt/__1_0.distcp",
        "step-00000006.ckpt/__1.parts",
        "step-00000006.ckpt/complete",
    }
    assert files <= {*storage.keys("ranks/checkpoints")}
    assert main(["consolidate", "s3://corpora/ranks", str(tmp_path / "there.ckpt")]) == 0
    assert "step-00000006.ckpt" in capsys.readouterr().out
    one = read_checkpoint(tmp_path / "there.ckpt")
    other = read_checkpoint(tmp_path / "here" / "checkpoints" / "step-00000006.ckpt")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert same_bits(one[part], other[part])
    network = GPT(**TINY["model"]["network"]["init_args"])
    InitialWeights("s3://corpora/ranks").change_network(network)
    assert same_bits(
        {f"network.{name}": value for name, value in network.state_dict().items()}, one["state_dict"]
    )
    assert "tensors from s3://corpora/ranks/checkpoints/step-00000006.ckpt" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "plugin", "refused"),
    [
        pytest.param("DDP", "AtomicCheckpoint", "4.ckpt", marks=pytest.mark.slow),
        ("FSDP", "ShardedCheckpoint", "4.ckpt/__1_0.distcp"),
    ],
)
def test_all_ranks_end_with_what_one_could_not_upload(
    strategy, plugin, refused, storage, environment, tmp_path
):
    """Of step 4: it is found at the save of step 6, which is complete on this machine too."""

    def answer(handler, body):
        if handler.command == "PUT" and handler.path.partition("?")[0].endswith(refused):
            answer_with(handler, 403)
        else:
            passed_on(handler, body, storage.url)

    more = {"strategy": strategy, "devices": 2, "plugins": [plugin]}
    options = written_config(tmp_path / "run", TINY, f"s3://corpora/refused-{plugin}", **more)
    with answering(answer) as url:
        places = [{**environment, **ranks, "AWS_ENDPOINT_URL": url} for ranks in two_ranks()]
        done = run(["fit", options], tmp_path / "run", ranks=2, environments=places)
    kept = f"complete in {tmp_path}/run/uploads: step-00000004.ckpt, step-00000006.ckpt."
    assert (done.codes, done.error_text.count(kept)) == ((2, 2), 2)
    there = storage.keys(f"refused-{plugin}")
    assert {name[:13] for name in there if name.endswith("complete")} == {"step-00000002"}
    for step in (4, 6):
        found = read_checkpoint(tmp_path / "run" / "uploads" / f"step-{step:08d}.ckpt")
        assert found["global_step"] == step


@pytest.mark.ci
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_an_outage_ends_the_run_and_loses_nothing(number, code, storage, environment, tmp_path):
    """While step 50 is uploaded: on SIGTERM the run saves the step after which it ends, too."""
    sent, name = [], f"signal-{code}"

    def answer(handler, body):
        if sent or "step-00000050" in handler.path:
            if not sent:
                sent.append(os.kill(int((tmp_path / "pid.0").read_text()), number))
            answer_with(handler, 503)
        else:
            passed_on(handler, body, storage.url)

    options = written_config(tmp_path / "run", TINY, f"s3://corpora/{name}", max_steps=100_000)
    progress = f"{{class_path: tests.support.killing.Progress, init_args: {{folder: {tmp_path}}}}}"
    with answering(answer) as url:
        places = [{**environment, "AWS_ENDPOINT_URL": url}]
        more = ["--callbacks.PeriodicCheckpoint.every_n_steps=50", f"--trainer.callbacks+={progress}"]
        done = run(["fit", options, *more], tmp_path / "run", environments=places)
    staged = tmp_path / "run" / "uploads"
    assert done.code == code, done.stderr
    assert f"Not uploaded, and complete in {staged}: step-00000050.ckpt" in done.stderr
    assert read_checkpoint(staged / "step-00000050.ckpt")["global_step"] == 50
    assert len(list(staged.glob("*.ckpt"))) == (1 if number == signal.SIGINT else 2)
