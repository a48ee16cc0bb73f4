"""What several test files share: the command line in a subprocess, a tiny run, packages made on the spot."""

import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from conformance import runs
from conformance.workshop import workshop
from core import catalog
from tests.support.technique_cost import Cost, Measured

gc.disable()  # until all is collected: nothing of that is garbage

# One thread here and in every subprocess, set before torch is imported: sums over other numbers of threads
# differ in their last bits, and two processes of two threads each crawl on two cores.
os.environ["OMP_NUM_THREADS"] = "1"

# Where Trackio writes, whose default is a folder of the user; tests that read it name their own.
os.environ["TRACKIO_DIR"] = str(workshop() / "trackio")

# Hundreds of processes would compile the same modules, and each worker rewrite the asserts of all tests: 4 CPU seconds.
# What is compiled lies in __pycache__, as everywhere else.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ["LEYDEN_TRUST"] = (
    # for the forked processes; `trusted` below adds each file's own classes
    "tests,conformance,pytorch_optimizer,schedulefree,deepspeed"
)

# The same examples in every run: what fails here fails for everybody. `--hypothesis-profile default` looks further.
# No limit of time either: that of an example, or of drawing it, depends on what else the machine does.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# A checkpoint waits for the disk ten times, and there are thousands of them: in memory it does not wait.
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 * 2**30:
    os.environ.setdefault("TMPDIR", "/dev/shm")
    tempfile.tempdir = None

# What our strategies import, above all DeepSpeed, a second in each rank; and what logs and draws.
runs.PRELOADED += ["torch._inductor.compile_fx", "torch.distributed.pipelining"]
runs.PRELOADED += ["torch.utils.tensorboard", "matplotlib.backends.backend_agg", "matplotlib.figure"]
if not os.path.exists(
    "/dev/nvidiactl"
):  # it asks CUDA for devices, which a forked process could not do again
    runs.PRELOADED += ["deepspeed"]
# What tiny runs name themselves: a tenth of their time.
runs.PRELOADED += [
    "torch.distributed.algorithms.join",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "plugins.networks.gpt",
    "plugins.objectives.causal_lm",
]
runs.PRELOADED += ["datamodules.packing.concatenate", "datamodules.preparation.token_preparation"]
runs.PRELOADED.insert(runs.PRELOADED.index("conformance.warmed"), "tests.support.warmed_quickstart")

HOUSE = Path(__file__).resolve().parent.parent


LONG = (HOUSE / "tests", HOUSE / "tests" / "distributed", HOUSE / "tests" / "plugins" / "strategies")
"""Folders whose files take minutes: they begin first, so that none is left over at the end."""


class ByFile(LoadScopeScheduling):
    """Keeps a file's tests in one process, which share what is dear; those of the catalogue by technique.

    pytest-xdist's own groups (`xdist_group`) are without effect from pytest 9.2 on, and it does not say so.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        group = Path(file).stem
        if group == "test_catalogue":
            group += name.partition("[")[2].partition("-")[0]
        if group in ("test_catalogueRayEngine", "test_ray_engine"):
            return "ray"  # two clusters on one machine get in each other's way
        return file if group == Path(file).stem else group


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many processes as cores: with one more the same tests take a tenth more CPU time, and no less by the clock."""
    return os.cpu_count() or 1


def pytest_configure(config: pytest.Config) -> None:
    """Has the costs of techniques measured, and printed by the process that hears of all tests."""
    config.pluginmanager.register(Measured())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Cost())


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """Takes the scheduler above, unless another way of distribution is asked for."""
    return ByFile(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_finish() -> None:
    """Keeps what was imported and collected, millions of objects, out of every later search for cycles."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first."""
    items.sort(key=lambda item: item.path.parent not in LONG)


TINY: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 6,
        "log_every_n_steps": 2,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "logger": False,
        "callbacks": [{"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": 2}}],
        "plugins": [{"class_path": "AtomicCheckpoint"}],
    },
    "model": {
        "network": {
            "class_path": "GPT",
            "init_args": {
                "vocab_size": 64,
                "n_layer": 1,
                "n_head": 2,
                "n_embd": 16,
                "max_sequence_length": 16,
            },
        },
        "objective": "CausalLM",
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}},
        "lr_scheduler": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": 2}},
    },
    "data": {"class_path": "tests.support.toy.ToyData"},
}
"""A run of 6 optimizer steps with 16 batches an epoch: about 5 s in a subprocess, of which 4 are imports."""


@pytest.fixture
def tiny() -> dict[str, Any]:
    """A fresh copy of the tiny run's configuration."""
    return deepcopy(TINY)


@pytest.fixture
def write_yaml(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Writes a mapping, or text as it is, as a YAML file below the test's folder."""

    def write(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def run_core(*arguments: Any, cwd: Path = HOUSE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m core ARGUMENTS` in a subprocess with one thread, from any folder."""
    return subprocess.run(
        [sys.executable, "-m", "core", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def begun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, with a cache of its own, as users do in a new process; it is not to fail."""
    path = os.pathsep.join(filter(None, (str(HOUSE), os.environ.get("PYTHONPATH"))))
    done = run_core(*words, cwd=folder, PYTHONPATH=path, XDG_CACHE_HOME=str(folder / "cache"))
    assert done.returncode == 0, done.stderr[-3000:]
    return done


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Packages:
    """Makes distributions in a folder on sys.path, as pip would have installed them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self, name: str, entries: dict[str, dict[str, str]], source: str = "", version: str = "1.2"
    ) -> None:
        """Adds a module `name` and its metadata; `entries` maps group -> {entry name: value}."""
        (self.folder / f"{name}.py").write_text(source, encoding="utf-8")
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = (
            "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in lines.items())])
            for group, lines in entries.items()
        )
        (info / "entry_points.txt").write_text("\n".join(groups) + "\n")
        catalog.entries.cache_clear()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """A place for made-up packages that this test alone sees; their modules are forgotten afterwards."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Packages(folder)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
    catalog.entries.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def trusted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets configs name classes of the tests: what is refused without, tests/plugins/cli/configuration/test_trust.py says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEYDEN_TRUST", f"{os.environ['LEYDEN_TRUST']},{request.module.__name__}")
        yield


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """`main` quietens Lightning's loggers; what another test captures of them must not depend on that."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def path_as_it_was() -> Iterator[None]:
    """`main` adds the folder in which it runs, each test's own: every import would look through hundreds of them."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A bucket on a local S3 server."""
    from tests.support.object_storage import Storage

    storage = Storage(tmp_path_factory.mktemp("storage"))
    yield storage
    storage.close()
