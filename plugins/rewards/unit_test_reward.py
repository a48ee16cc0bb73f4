"""Rewards code that passes the record's tests."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from core.errors import ConfigError
from core.technique import technique
from plugins.rewards.sandbox import Sandbox
from toolkit.rewards import Reward, Sample, field

_BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_MOST_CHARACTERS = 200_000
"""Limit of an answer; a longer one fails."""


@technique(
    paper="CodeRL, arXiv:2207.01780, section 3.2: rewards of unit tests; tests as in MBPP, arXiv:2108.07732"
)
class UnitTestReward(Reward):
    """Gives the share of the record's tests that an answer's Python code passes, or 1 for all of them and else 0.

    The code is the last fenced block of the answer, or all of it. The field has the tests: Python code as a text, or a
    list of such texts, as in MBPP's `test_list`; each runs behind the code, and fails if it raises anything.

    **The code runs on this machine.** Each answer runs in a process of its own, with the standard library alone, no
    environment variables, a temporary folder, the limits below and no output; it is killed with its children. Where the
    kernel has Landlock and user namespaces, it reaches no network, no process and no file but Python's own: what of these
    it can reach is refused, or with `isolated: false` logged. The number of its processes and files is not limited, and code
    that sets out to deceive its tests, in the same process, can. Read what is rewarded.

    Args:
        field: The record's field with the tests.
        partial: Whether the value is the share of the tests that pass.
        cpu_seconds: CPU time of an answer with all its tests.
        seconds: Time of an answer with all its tests, for code that sleeps; so long that load does not decide.
        memory_mib: Memory of each process, MiB.
        isolated: Whether to refuse machines on which the code can reach the network, processes or files.
        workers: Answers that run at once; None: as many as there are cores for this process.

    Raises:
        ConfigError: If a number is out of range, the sandbox does not work or is not `isolated`, or a record has no
            tests.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward:
                  class_path: UnitTestReward
                  init_args: {field: tests}
    """

    def __init__(
        self,
        field: str = "tests",
        partial: bool = False,
        cpu_seconds: int = 5,
        seconds: float = 60.0,
        memory_mib: int = 512,
        isolated: bool = True,
        workers: int | None = None,
    ) -> None:
        limits = {
            "cpu_seconds": cpu_seconds,
            "seconds": seconds,
            "memory_mib": memory_mib,
            "workers": workers,
        }
        for name, value in limits.items():
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"UnitTestReward.{name} is {value}; it is above 0.")
        self.field, self.partial = field, partial
        self._isolated, self._workers = isolated, workers or _cores()
        self._limits = cpu_seconds, seconds, memory_mib

    @cached_property
    def _sandbox(self) -> Sandbox:
        """The sandbox, tried once: on first use, so that a check of a configuration runs no code."""
        sandbox = Sandbox(*self._limits)
        sandbox.check(self._isolated)
        return sandbox

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns the value of each sample, 0 to 1."""
        if not samples:
            return []
        tests = [self._tests(sample) for sample in samples]
        run = self._sandbox.run
        with ThreadPoolExecutor(self._workers) as pool:
            passed = list(pool.map(run, [code_of(sample.answer) for sample in samples], tests))
        shares = (count / len(some) for count, some in zip(passed, tests, strict=True))
        return [share if self.partial else float(share == 1) for share in shares]

    def _tests(self, sample: Sample) -> list[str]:
        tests = field(sample, self.field, "UnitTestReward.field")
        tests = tests if isinstance(tests, list) else [tests]
        if not all(isinstance(test, str) and test.strip() for test in tests):
            raise ConfigError(
                f"UnitTestReward.field: {self.field!r} of a record is {tests!r:.60}; it has to be Python code, or a list.\n"
                f"  prompt: {sample.prompt[:60]!a}"
            )
        return tests


def _cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def code_of(answer: str) -> str:
    """Returns the code of an answer: its last fenced block, or all of it; code that fails where it is too long."""
    if len(answer) > _MOST_CHARACTERS:
        return "raise ValueError"
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer
