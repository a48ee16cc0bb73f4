"""Refuses checkpoints of one file where a model is sharded because it is large: rank 0 would need room for all of it."""

from __future__ import annotations

from lightning.pytorch import Trainer

from core import catalog
from core.contracts import SavesParts
from core.errors import ConfigError

BYTES_PER_PARAMETER = 12
"""Of a checkpoint with AdamW's state: the weight and two moments, in float32."""
MOST_BYTES = 32 * 10**9
"""Above it a checkpoint takes minutes to gather and to write, while all ranks wait for the first."""


def check(trainer: Trainer, parameters: int) -> None:
    """Raises a ConfigError if a run gathers a larger model than that for each checkpoint.

    Args:
        trainer: The trainer of the run, before it is started.
        parameters: Parameters of the network.
    """
    size, strategy = parameters * BYTES_PER_PARAMETER, trainer.strategy
    ranks = trainer.num_devices * trainer.num_nodes
    # Weights are loaded after `setup` where it shards them.
    gathers = strategy.restore_checkpoint_after_setup and not isinstance(strategy.checkpoint_io, SavesParts)
    if ranks == 1 or not trainer.checkpoint_callbacks or not gathers or size <= MOST_BYTES:
        return
    shards = catalog.offering("sharded_checkpoints", "checkpoints").name
    raise ConfigError(
        f"trainer.plugins: {type(strategy.checkpoint_io).__name__} has rank 0 gather the whole model and its optimizer "
        f"for each checkpoint, about {size / 1e9:,.0f} GB,\nwhile {ranks - 1:,} others wait. "
        f"Set {shards} in its place, with which each rank writes its shards (--config techniques/sharded_checkpoint).\n"
        "`python -m core consolidate` makes a single file of such a checkpoint, in one process."
    )
