"""What each reader promises: the bytes of a prepared folder depend on neither workers nor kills."""

import os
import random
import signal
import time
from multiprocessing import get_context

from datamodules.preparation.engines.local_engine import LocalEngine
from tests.support.corpus import contents, prepare


def ends_in_the_same_bytes(source, folder, kills=5, **options):
    """Prepares with one process and with 3, and with kills at random moments; returns the folder of the first."""
    begin = time.monotonic()
    undisturbed = contents(prepare(source, folder / "one", **options))
    whole = time.monotonic() - begin
    assert contents(prepare(source, folder / "three", engine=LocalEngine(3), **options)) == undisturbed
    chance = random.Random(0)
    for _ in range(kills):
        child = get_context("fork").Process(target=prepare, args=(source, folder / "killed"), kwargs=options)
        child.start()
        child.join(chance.uniform(0.1, 0.8) * whole)
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
        child.join(60)
    assert contents(prepare(source, folder / "killed", **options)) == undisturbed
    return folder / "one"
