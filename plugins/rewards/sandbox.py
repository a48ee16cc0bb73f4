"""Python code of a network, run with limits in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from core.errors import ConfigError
from toolkit.ranks import launched_rank

log = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("sandbox_child.py")
_NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
_OPENED_FILES = 64
_PROBES = {
    "the network": "import socket\nassert not socket.if_nameindex()[1:]",
    "files of yours": "try:\n    open({outside!r})\nexcept PermissionError:\n    pass\nelse:\n    raise ValueError",
    "other processes": "import os\nassert os.getpid() == 1",
}
"""What code might reach -> a test that passes where it cannot."""


class Sandbox:
    """Runs code that nobody has read, and then its tests, with limits.

    Each run is a process with Python's standard library alone, no environment variables, a temporary folder, limits on
    CPU time, time, memory and the size of files; its output is thrown away, and it is killed with all its children. Where
    the kernel allows it, namespaces keep network and other processes from it, and Landlock all files but Python's own
    and those of its folder.

    Args:
        cpu_seconds: CPU time of a run.
        seconds: Time of a run.
        memory_mib: Address space of each of its processes.
        file_mib: Largest file that it may write.
    """

    def __init__(self, cpu_seconds: int, seconds: float, memory_mib: int, file_mib: int = 16) -> None:
        self.seconds = seconds
        self.limits = {
            "RLIMIT_CPU": cpu_seconds,
            "RLIMIT_AS": memory_mib << 20,
            "RLIMIT_FSIZE": file_mib << 20,
            "RLIMIT_NOFILE": _OPENED_FILES,
            "RLIMIT_CORE": 0,
        }

    @cached_property
    def _prefix(self) -> list[str]:
        """What the command begins with: namespaces, where they are allowed."""
        if shutil.which(_NAMESPACES[0]) is None:
            return []
        done = subprocess.run([*_NAMESPACES, "true"], capture_output=True, check=False)
        return [] if done.returncode else _NAMESPACES

    @cached_property
    def _readable(self) -> list[str]:
        """Folders that Python itself reads."""
        paths = sysconfig.get_paths()
        libraries = {paths["stdlib"], paths["platstdlib"], sysconfig.get_config_var("LIBDIR") or "/usr/lib"}
        found = {*libraries, "/usr/lib", "/usr/share/zoneinfo", "/lib", "/lib64"}
        return sorted(path for path in found if os.path.isdir(path))

    def check(self, required: bool) -> None:
        """Tries it, and says what it cannot keep from the code.

        Args:
            required: Whether that is an error.

        Raises:
            ConfigError: If nothing can be run, or `required` and something is in reach.
        """
        with TemporaryDirectory() as outside:
            file = Path(outside, "file")
            file.touch()
            tests = {what: probe.format(outside=str(file)) for what, probe in _PROBES.items()}
            if not self.run("value = 1", ["assert value == 1"]):
                raise ConfigError(
                    "The sandbox cannot run Python code here, not even `value = 1`: the memory may be too small.\n"
                    f"Limits: {self.limits}, {self.seconds:g} s."
                )
            open_to_it = [what for what, test in tests.items() if not self.run("", [test])]
        if not open_to_it:
            return
        said = f"The sandbox cannot keep {', '.join(open_to_it)} from the code of answers on this machine"
        if required:
            raise ConfigError(
                f"{said}.\nIt needs Linux with Landlock (5.13), and `unshare` with user namespaces, which many containers forbid.\n"
                "Run on such a machine, or in a container without secrets and network with `isolated: false`."
            )
        if launched_rank() in (None, 0):
            log.warning("%s: run in a container that holds no secrets.", said)

    def run(self, code: str, tests: Sequence[str]) -> int:
        """Returns how many of the tests pass after the code; 0 where the code fails or a limit is reached."""
        with TemporaryDirectory(prefix="leyden-answer-", ignore_cleanup_errors=True) as folder:
            work = {"code": code, "tests": tests, "limits": self.limits, "readable": self._readable}
            Path(folder, "work.json").write_text(json.dumps(work), encoding="utf-8")
            secret = secrets.token_hex(16)
            self._finish(folder, secret)
            with suppress(OSError), open(Path(folder, "result"), "rb") as file:
                found, _, passed = file.read(100).decode("ascii", "replace").partition(" ")
                return int(passed) if found == secret and passed.isdecimal() else 0
        return 0

    def _finish(self, folder: str, secret: str) -> None:
        """Runs the program on a folder until it ends or its time is over."""
        python = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_CHILD), folder]
        process = subprocess.Popen(
            [*self._prefix, *python],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(secret.encode(), timeout=self.seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
