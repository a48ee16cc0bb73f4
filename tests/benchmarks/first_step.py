"""A callback for `start_up`, in a file of its own so that its import costs a run nothing."""

import resource
import sys
import time
from typing import Any

from lightning.pytorch import Callback


class FirstStep(Callback):
    """Prints the user and system seconds of the process, the time and the modules at the end of its first step."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Prints once."""
        if args[0].global_step == 1:
            used = resource.getrusage(resource.RUSAGE_SELF)
            print("FIRST_STEP", used.ru_utime, used.ru_stime, time.time(), len(sys.modules), flush=True)
