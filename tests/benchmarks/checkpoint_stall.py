"""How long a checkpoint holds training up: written in the background, waited for, and as a single file.

    python -m tests.benchmarks.checkpoint_stall --ranks 2

One run, in blocks of steps; each block begins with a checkpoint, of the next way in turn or none. Wall-clock time,
as nothing else tells waiting; the medians of all blocks of a way are printed. `stall` is the time until training goes on,
`added` how much longer the whole block takes than one without a checkpoint: what is written in the background
takes its share of the cores, and of the disk.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

WAYS = (
    "no checkpoint",
    "ShardedCheckpoint, asynchronous",
    "ShardedCheckpoint, waited for",
    "AtomicCheckpoint",
)


class Turns(Callback):
    """Saves in another way at the start of each block, and prints the medians at the end.

    Args:
        folder: Where checkpoints go.
        block: Steps in a block.
    """

    def __init__(self, folder: str, block: int) -> None:
        self.folder, self.block = Path(folder), block
        self.stalls: dict[str, list[float]] = {way: [] for way in WAYS}
        self.blocks: dict[str, list[float]] = {way: [] for way in WAYS}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the ways of saving."""
        from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
        from plugins.checkpoints.sharded_checkpoint import ShardedCheckpoint

        self.ways = dict(
            zip(WAYS[1:], (ShardedCheckpoint(), ShardedCheckpoint(False), AtomicCheckpoint()), strict=True)
        )
        for io in list(self.ways.values())[:2]:
            if trainer.world_size > 1:
                io.connect()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins a block."""
        number, step = divmod(trainer.global_step, self.block)
        if step:
            return
        way = WAYS[number % len(WAYS)]
        trainer.strategy.barrier()
        self.begin = time.perf_counter()
        if way in self.ways:
            trainer.strategy.checkpoint_io = self.ways[way]
            trainer.save_checkpoint(self.folder / "one.ckpt")
        self.stalls[way].append(time.perf_counter() - self.begin)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Ends a block; what is written in the background is waited for only then, and counted in."""
        number, step = divmod(trainer.global_step, self.block)
        if step:
            return
        way = WAYS[(number - 1) % len(WAYS)]
        if hasattr(io := self.ways.get(way), "wait"):
            io.wait()
        trainer.strategy.barrier()
        self.blocks[way].append(time.perf_counter() - self.begin)
        if trainer.is_global_zero and way in self.ways:
            self.ways[way].remove_checkpoint(self.folder / "one.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table; the first block of each way, which allocates, is left out."""
        if not trainer.is_global_zero:
            return
        alone = statistics.median(self.blocks[WAYS[0]][1:])
        print("| way | stall ms | added ms | of a block |\n| --- | --- | --- | --- |")
        for way in WAYS[1:]:
            stall, block = (statistics.median(found[way][1:]) for found in (self.stalls, self.blocks))
            print(f"| {way} | {stall * 1e3:.1f} | {(block - alone) * 1e3:.0f} | {(block / alone - 1):.1%} |")
        print(f"a block of {self.block} steps without a checkpoint: {alone * 1e3:.0f} ms", flush=True)


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=1, help="processes; with several FSDP spreads the model")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each way; the first is not counted")
    parser.add_argument("--block", type=int, default=20, help="steps in a block")
    parser.add_argument("--width", type=int, default=384, help="of the network of 4 layers")
    options = parser.parse_args()
    from conformance.runs import run
    from conformance.workshop import workshop, write_config

    folder = workshop() / "stall"
    turns = {
        "class_path": f"{__spec__.name}.Turns",
        "init_args": {"folder": str(folder), "block": options.block},
    }
    network = {
        "vocab_size": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_embd": options.width,
        "max_sequence_length": 16,
    }
    values = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu", "devices": options.ranks, "strategy": "FSDP" if options.ranks > 1 else "auto",
            "max_steps": options.block * options.rounds * len(WAYS), "limit_val_batches": 0, "callbacks": [turns],
            "plugins": ["AtomicCheckpoint"], "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "use_distributed_sampler": False, "default_root_dir": str(folder),
        },
        "model": {
            "network": {"class_path": "GPT", "init_args": network}, "objective": "CausalLM", "optimizer": "AdamW",
        },
        "data": {"class_path": "tests.support.toy.ToyData"},
    }  # fmt: skip
    config = write_config("stall", values)
    done = run(["fit", f"--config={config}"], folder, ranks=options.ranks, timeout=1800)
    print("".join(done.stdout.partition("| way")[1:]).partition("Checkpoints held")[0] or done.error_text)
    return done.code


if __name__ == "__main__":
    sys.exit(main())
