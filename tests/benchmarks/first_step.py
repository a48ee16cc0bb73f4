"""A callback for `start_up`, in a file of its own so that its import costs a run nothing."""

import resource
from typing import Any

from lightning.pytorch import Callback


class FirstStep(Callback):
    """Prints the CPU seconds of the process at the end of its first step."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Prints once."""
        if args[0].global_step == 1:
            used = resource.getrusage(resource.RUSAGE_SELF)
            print("CPU_SECONDS", used.ru_utime + used.ru_stime, flush=True)
