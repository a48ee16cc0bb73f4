"""Jobs some of whose ranks are killed."""

from copy import deepcopy

from conformance.runs import run
from conformance.workshop import workshop, write_config
from plugins.cli.configuration.config_files import merge
from tests.support.same_run import CONFIG

EVERY = 2


FSDP, DDP = {"class_path": "FSDP"}, {"class_path": "DDP"}


TENSOR = {"class_path": "HybridParallel", "init_args": {"tensor": 2}}


ASYNCHRONOUS, WAITED_FOR = "ShardedCheckpoint", "AtomicCheckpoint"


def fit(name, ranks, strategy, plugin, steps, *more):
    """Starts the job, or starts it again."""
    folder = workshop() / name
    folder.mkdir(exist_ok=True)
    callbacks = [
        {"class_path": "conformance.recorder.Recorder", "init_args": {"folder": str(folder)}},
        {"class_path": "tests.support.killing.Progress", "init_args": {"folder": str(folder)}},
        {"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": EVERY}},
        *more,
    ]
    trainer = {
        "devices": ranks, "strategy": strategy, "plugins": [{"class_path": plugin}], "callbacks": callbacks, "max_steps": steps,
        "default_root_dir": str(folder), "val_check_interval": 12, "limit_val_batches": 1,
    }  # fmt: skip
    model = {
        "network": {"init_args": {"n_layer": 2, "dropout": 0.1}},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}},
    }
    values = merge(deepcopy(CONFIG), {"trainer": trainer, "model": model})
    return run(["fit", f"--config={write_config(name, values)}"], folder, ranks=ranks)
