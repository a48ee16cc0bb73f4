"""What starting costs: seconds of `check` and of `fit` to its first step, and how often each part is made.

    python -m tests.benchmarks.start_up

CPU seconds are user and system time of a process of its own, the data prepared. Those by the clock count what other programs
take, too: compare CPU seconds, and the modules that the run has imported. The counts come from a second run of
each command, in which the functions are wrapped; they are printed by that process as it ends.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).resolve().parents[2]
ONE_STEP = ["--trainer.max_steps=1", "--model.lr_scheduler.warmup_steps=0", "--trainer.limit_val_batches=0"]
COUNTED = {
    "configs composed": ("plugins.cli.configuration.config_files", "merge_layers"),
    "YAML texts parsed": ("plugins.cli.configuration.yaml_texts", "_Loader.__init__"),
    "whole configs dumped to YAML": ("yaml", "dump_all"),
    "whole configs parsed by jsonargparse": ("yaml", "load"),
    "Trainers": ("lightning.pytorch", "Trainer.__init__"),
    "accelerator connectors": (
        "lightning.pytorch.trainer.connectors.accelerator_connector",
        "_AcceleratorConnector.__init__",
    ),
    "networks": ("core.contracts", "Network.__init__"),
    "check_fit": ("core.contracts.modules", "check_fit"),
    "checkpoints read": ("plugins.checkpoints.checkpoint", "read_checkpoint"),
}
"""What is counted: module and name. They are imported, and wrapped, in this order, before what uses them."""


def _count(found: Counter[str], what: str, module: str, name: str) -> None:
    """Wraps a function so that its calls are counted; of those that take YAML, the calls with a whole config."""
    owner: Any = importlib.import_module(module)
    *classes, attribute = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    plain: Callable[..., Any] = getattr(owner, attribute)
    takes_yaml = module == "yaml" or classes == ["_Loader"]

    @functools.wraps(plain)
    def counting(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if module == "yaml" else args[-1]
        first = next(iter(given), None) if attribute == "dump_all" else given
        whole = isinstance(first, str | dict) and "trainer" in first and len(str(first)) > 500
        if not takes_yaml or whole:
            found[what] += 1
        return plain(*args, **kwargs)

    setattr(owner, attribute, counting)


def child(words: list[str]) -> None:
    """Runs a command of `python -m core` with counters, and prints them on stderr as the process ends."""
    found: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    for what, (module, name) in COUNTED.items():
        _count(found, what, module, name)
    atexit.register(lambda: print(f"COUNTS {json.dumps(found)}", file=sys.stderr))
    sys.exit(importlib.import_module("core.__main__").main(words))


def _run(command: list[str], cwd: str) -> tuple[float, str, str]:
    """Returns the CPU seconds of a process, and what it wrote."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(HOUSE), "LEYDEN_TRUST": "tests", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.stdout, done.stderr


def _first_step(command: list[str], cwd: str) -> tuple[float, float, float, float]:
    """Returns user and system seconds of a run to its first step, seconds by the clock, and the modules imported."""
    began = time.time()
    words = _run(command, cwd)[1].split("FIRST_STEP")[1].split()
    return float(words[0]), float(words[1]), float(words[2]) - began, float(words[3])


def main() -> None:
    """Prints the CPU seconds of each command, then the counts."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    check = ["check", "--config=quickstart"]
    fit = ["fit", "--config=quickstart", *ONE_STEP]
    to_step = [*fit, "--trainer.callbacks+=tests.benchmarks.first_step.FirstStep"]
    with tempfile.TemporaryDirectory() as folder:
        _run(["-m", "core", *fit], folder)  # prepares the data, and fills the file cache
        checks = [_run(["-m", "core", *check], folder)[0] for _ in range(rounds)]
        steps = [_first_step(["-m", "core", *to_step], folder) for _ in range(rounds)]
        user, system, clock, modules = map(statistics.median, zip(*steps, strict=True))
        imports = [_run(["-c", "import lightning.pytorch.cli"], folder)[0] for _ in range(rounds)]
        print(f"check: {statistics.median(checks):.2f} CPU seconds")
        print(f"fit to the end of the first step: {user:.2f} user and {system:.2f} system CPU seconds,")
        print(f"    {clock:.2f} s by the clock; {modules:.0f} modules imported")
        print(f"(import lightning.pytorch.cli alone: {statistics.median(imports):.2f})")
        resumed = [*fit, "--trainer.max_steps=2", "--ckpt_path=last"]
        for title, words in (("check", check), ("fit", fit), ("fit --ckpt_path=last", resumed)):
            text = _run(["-m", "tests.benchmarks.start_up", "--child", *words], folder)[2]
            print(f"{title}: {json.loads(text.split('COUNTS ')[1].splitlines()[0])}")


if __name__ == "__main__":
    main()
