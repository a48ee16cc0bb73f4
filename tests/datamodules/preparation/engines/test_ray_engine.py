"""RayEngine on a real cluster of two nodes, which take each other for other machines."""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from itertools import accumulate
from pathlib import Path
from uuid import uuid4

import pytest

from conformance.runs import free_port, run
from core.contracts import Transform
from core.errors import ConfigError
from datamodules.preparation.engines.ray_engine import RayEngine, _private
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from datamodules.preparation.transforms.near_duplicates import NearDuplicates
from datamodules.preparation.transforms.repeated_lines import RepeatedLines
from plugins.cli.preflight import check
from plugins.cli.selection import selection
from tests.conftest import HOUSE, run_core
from tests.support.corpus import contents, corpus, prepare
from toolkit.selection import Run

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)

CPUS = 1, 2
MARK = f"leyden-{uuid4().hex}"
"""In the environment of all processes of the cluster."""


@dataclass
class Cluster:
    """Two nodes.

    Attributes:
        address: Of the first.
        hidden: A folder that the second node does not see; None where it cannot be hidden.
        raylets: The process that keeps each node.
    """

    address: str
    hidden: Path | None
    raylets: list[int]


@pytest.fixture(scope="module")
def cluster():
    """Starts `ray start --head` and `ray start --address`; ends all that they started, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: sockets lie there
    hidden = folder / "hidden"
    for name in ("home", "hidden"):
        (folder / name).mkdir()
    # Ray reads the token once in a process: it is that of a cluster which this process may have had before
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _private()["RAY_AUTH_TOKEN"]}
    ray._raylet.Config.initialize("")  # it has read the mode when it was imported
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "MARK": MARK,
                   "HOME": str(folder / "home"), "PYTHONPATH": str(HOUSE)}  # fmt: skip
    address = f"127.0.0.1:{free_port()}"
    hide = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {hidden} && exec "$@"', "sh"]
    can_hide = subprocess.run([*hide, "true"], capture_output=True, check=False).returncode == 0
    head = [
        "--head",
        f"--port={address.split(':')[1]}",
        f"--temp-dir={folder}/a",
        "--include-dashboard=false",
    ]
    raylets = []
    try:
        for cpus, words in zip(CPUS, (head, [f"--address={address}"]), strict=True):
            start = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, f"--num-cpus={cpus}",
                     "--object-store-memory=80000000", "--disable-usage-stats"]  # fmt: skip
            prefix = hide if can_hide and words is not head else []
            done = subprocess.run(
                [*prefix, *start], env=environment, cwd="/", capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stdout + done.stderr
            raylets += [process for process in processes(name=b"raylet/raylet") if process not in raylets]
        yield Cluster(address, hidden if can_hide else None, raylets)
        assert os.listdir(folder / "home") == []
    finally:
        for process in processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def processes(mark=MARK, name=b""):
    """Returns the processes with the mark in their environment and a name in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            message = (
                mark.encode() in (path / "environ").read_bytes() and name in (path / "cmdline").read_bytes()
            )
            if message and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """Cuts sources of a few kB into many tasks."""
    monkeypatch.setattr(source_files, "LEAST", 700)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("source"))


@dataclass
class Diary(Transform):
    """Notes who works when; the first `kills` batches end their process, the others wait until `crew` processes work."""

    folder: Path
    kills: int = 0
    crew: int = 1
    driver: int = field(default_factory=os.getpid)

    def fingerprint(self):
        return {}

    def apply(self, batch, drop):
        if os.getpid() == self.driver:
            return batch
        for number in range(self.kills):
            with suppress(FileExistsError):
                (self.folder / f"killed-{number}").mkdir()
                os.kill(os.getpid(), signal.SIGKILL)
        import ray

        begin = time.time()
        (self.folder / f"at-work-{os.getpid()}").touch()
        while len(list(self.folder.glob("at-work-*"))) < self.crew and time.time() < begin + 60:
            time.sleep(0.02)
        time.sleep(0.2)
        entry = {
            "node": ray.get_runtime_context().get_node_id(),
            "process": os.getpid(),
            "begin": begin,
            "end": time.time(),
            "threads": os.environ["RAYON_NUM_THREADS"],
        }
        path = self.folder / uuid4().hex
        path.write_text(json.dumps(entry))
        path.rename(path.with_suffix(".json"))
        return batch

    def entries(self):
        return [json.loads(path.read_text()) for path in self.folder.glob("*.json")]

    def most_at_once(self):
        changes = [(entry["begin"], 1) for entry in self.entries()]
        changes += [(entry["end"], -1) for entry in self.entries()]
        return max(accumulate(change for _, change in sorted(changes)))


def diary(folder, kills=0, crew=1):
    folder.mkdir()
    return Diary(folder, kills, crew)


# Alone ------------------------------------------------------------------------------------------------------


def command(source, folder, *more):
    words = ["prepare", "--config=data/text", f"--data.source={source}", f"--output={folder}"]
    return [*words, "--data.reader=JSONLinesDocuments", "--data.tokenizer.vocab_size=300", *more]


@pytest.mark.slow  # ray starts and ends for a minute
def test_without_a_cluster_it_starts_one_and_leaves_nothing_behind(source, tmp_path):
    words, mark = command(source, tmp_path / "ray", "--data.engine=RayEngine"), uuid4().hex
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as home:  # a short name: sockets lie there
        alone = run_core(*words, HOME=home, TMPDIR=home, MARK=mark)
        assert alone.returncode == 0, alone.stderr
        assert not [path for path in Path(home).rglob("*") if "ray" in path.name]
    assert all(line.startswith(("Preparing", "tasks")) for line in alone.stderr.splitlines()), alone.stderr
    assert [line.split()[0] for line in alone.stdout.splitlines()] == ["120", "Tokens", "Report:", "Train"]
    end = time.monotonic() + 120
    while processes(mark) and time.monotonic() < end:
        time.sleep(0.1)
    assert processes(mark) == []
    assert run(command(source, tmp_path / "local"), tmp_path).code == 0
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_what_cannot_be_meant_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="workers is 0"):
        RayEngine(workers=0)
    with pytest.raises(ConfigError, match="address is 'head'; it is HOST:PORT"):
        RayEngine("head")
    with pytest.raises(
        ConfigError, match=r"no cluster can be joined at 127.0.0.1.*refused.*\n.*ray start --head"
    ):
        list(RayEngine(f"127.0.0.1:{free_port()}").run(len, [{"number": 0}]))


# On two nodes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_and_killed_workers_change_no_byte(source, tmp_path, cluster):
    crew = sum(CPUS) - 1  # as many as RayEngine takes
    stage, handler = diary(tmp_path / "diary", kills=2, crew=crew), signal.getsignal(signal.SIGTERM)
    folder = prepare(source, tmp_path / "ray", transforms=[stage], engine=RayEngine(cluster.address))
    calm = prepare(source, tmp_path / "here", transforms=[diary(tmp_path / "calm")])
    assert contents(folder) == contents(calm)
    assert len(list(stage.folder.glob("killed-*"))) == 2
    assert len({entry["node"] for entry in stage.entries()}) == 2
    assert stage.most_at_once() == crew
    assert {entry["threads"] for entry in stage.entries()} == {"1"}
    assert signal.getsignal(signal.SIGTERM) is handler
    assert processes()
    # It would go on in this process, and ask for figures of use.
    assert "data-usage-metrics-poller" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow  # ray starts and ends for half a minute
def test_transforms_that_need_all_documents_change_no_byte(source, tmp_path, cluster):
    transforms = [ExactDuplicates(), NearDuplicates(0.3, ngram=1, rows=1), RepeatedLines(min_characters=0)]
    folder = prepare(source, tmp_path / "ray", transforms=transforms, engine=RayEngine(cluster.address))
    assert contents(folder) == contents(prepare(source, tmp_path / "here", transforms=transforms))
    [_, near, _] = json.loads((folder / "manifest.json").read_text())["transforms"]
    assert near["dropped"]["near duplicate"] > 10


@pytest.mark.slow
def test_a_folder_that_a_machine_does_not_see_is_named(source, cluster, monkeypatch):
    if cluster.hidden is None:
        pytest.skip("no file system can be mounted here")
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with pytest.raises(
        ConfigError, match=rf"does not see {cluster.hidden}/out/parts.*\n.*file system that they share"
    ):
        prepare(source, cluster.hidden / "out", engine=RayEngine())


@pytest.mark.slow
def test_a_package_that_a_machine_lacks_is_named(source, tmp_path, cluster, monkeypatch):
    if cluster.hidden is None:
        pytest.skip("no file system can be mounted here")
    stage = "from datamodules.preparation.transforms.normalise import Normalise\nclass Acme(Normalise): ...\n"
    (cluster.hidden / "acme_of_this_machine.py").write_text(stage)
    monkeypatch.syspath_prepend(str(cluster.hidden))
    stages = [importlib.import_module("acme_of_this_machine").Acme()]
    with pytest.raises(ConfigError, match=r"No module named 'acme_of_this_machine'.*\n.*the same packages"):
        prepare(source, tmp_path / "out", transforms=stages, engine=RayEngine(cluster.address))


@pytest.mark.slow
def test_a_connection_of_somebody_elses_is_used_and_kept(tmp_path, cluster):
    import ray

    ray.init(cluster.address, log_to_driver=False)
    try:
        assert list(RayEngine().run(dict, [{"number": 3}])) == [{"number": 3}]
        assert ray.is_initialized()
        assert ray.get(ray.put(1)) == 1
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_machine_that_dies_changes_no_byte(source, tmp_path, cluster):
    """The last test on the cluster, of which one node is left."""
    stage = diary(tmp_path / "diary")
    killer = threading.Thread(target=end_a_node, args=(stage, cluster.raylets[1]))
    killer.start()
    folder = prepare(source, tmp_path / "ray", transforms=[stage], engine=RayEngine(cluster.address))
    killer.join()
    assert len({entry["node"] for entry in stage.entries()}) == 2
    calm = prepare(source, tmp_path / "here", transforms=[diary(tmp_path / "calm")])
    assert contents(folder) == contents(calm)


def end_a_node(stage, raylet):
    """Ends the process of a node by SIGKILL as soon as both nodes have been at work."""
    end = time.monotonic() + 120
    while len({entry["node"] for entry in stage.entries()}) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(raylet, signal.SIGKILL)


def test_without_ray_a_run_says_how_to_install_it(monkeypatch):
    there = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: (absent if name == "ray" else there)(name))
    chosen = {"class_path": "datamodules.preparation.engines.ray_engine.RayEngine"}
    with pytest.raises(ConfigError, match=r"RayEngine: ray is not installed: pip install 'leyden\[ray\]'"):
        check(Run(selection({"data": {"init_args": {"engine": chosen}}})))


def absent(name):
    raise PackageNotFoundError(name)
