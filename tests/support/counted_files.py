"""Counts the files that each rank of a run opens, lists and asks the state of."""

import os
import sys
from collections import Counter

from conformance.runs import free_port
from tests.support.found_on_ranks import found_on_ranks

OPERATIONS = {"open": "open", "os.listdir": "list", "os.scandir": "list"}


class CountedFiles:
    """Counts operations on paths that hold a text, from its creation to the end of the process."""

    def __init__(self, within):
        self.within, self.counts, self.names = within, Counter(), Counter()
        sys.addaudithook(self._audit)
        for name in ("stat", "lstat"):
            setattr(os, name, self._counting(getattr(os, name)))

    def _audit(self, event, arguments):
        if (kind := OPERATIONS.get(event)) and arguments:
            self._note(kind, arguments[0])

    def _counting(self, usual):
        def counted(path, *words, **options):
            self._note("stat", path)
            return usual(path, *words, **options)

        return counted

    def _note(self, kind, path):
        if isinstance(path, str | bytes | os.PathLike) and self.within in (name := os.fsdecode(path)):
            self.counts[kind] += 1
            self.names[f"{kind} {os.path.basename(name)}"] += 1


def counted_run(words, ranks, folder, within=".ckpt"):
    """Runs a command on connected ranks; returns, for each, its exit code and the operations by kind and by file."""
    folder.mkdir()
    return found_on_ranks(_run, ranks, folder, ranks, free_port(), [str(word) for word in words], within)


def _run(rank, ranks, port, words, within):
    from core.__main__ import main

    both = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    own = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (both | own).items()})
    os.environ["TORCHELASTIC_RUN_ID"] = "counted"
    counted = CountedFiles(within)
    code = main(words)
    return {"code": code, "counts": counted.counts, "names": counted.names}
