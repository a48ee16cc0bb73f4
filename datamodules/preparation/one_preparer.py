"""Lets one of several processes, on one machine or many, prepare what all of them need."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from toolkit.file_claims import locked

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_SECONDS = 0.2


@contextmanager
def one_preparer(finished: Path, label: str) -> Iterator[None]:
    """Waits while another process is in this block, until that one ends or what it prepares is finished.

    The claim is a lock of the kernel on a file beside the folder. Machines that share the file system share it. Where they do not
    share one, or it has no locks, each machine prepares for itself. The lock of a process that dies is released, by a
    server of files when it has lost its machine: nothing waits for a time that is guessed.

    Args:
        finished: A file that is written last, in the folder that is prepared. The block has to look for it again.
        label: What is prepared, for the message.
    """
    path = finished.parent.with_name(f".{finished.parent.name}.lock")
    with ExitStack() as stack:
        told = False
        while not finished.exists():
            try:
                if stack.enter_context(locked(path, fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT)):
                    stack.callback(_remove, path)
                    break
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
            stack.close()
            if not told:
                text = f"Waiting for another process, which prepares {label} in {finished.parent}"
                print(text, file=sys.stderr, flush=True)
            told = True
            time.sleep(_SECONDS)
        yield


def _remove(path: Path) -> None:
    """Removes the file while it is locked. Who had opened it looks for what is finished; else both would prepare the same."""
    with suppress(OSError):
        path.unlink()
