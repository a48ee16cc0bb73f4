"""AdamW with 8-bit moments that move to the host when GPU memory runs short."""

from __future__ import annotations

from core.technique import Package, technique
from plugins.optimizers.adamw8bit import AdamW8bit
from plugins.optimizers.libraries import not_with_lightnings


@technique(
    paper="8-bit optimizers via block-wise quantization, arXiv:2110.02861; bitsandbytes",
    needs=(Package("bitsandbytes>=0.48"),),
    conflicts=not_with_lightnings("its unified memory is on no device that they gather checkpoints from"),
)
class PagedAdamW8bit(AdamW8bit):
    """AdamW8bit with its state in unified memory: on CUDA it moves to the host when the device is full.

    State: that of AdamW8bit, also of sharded weights. Pages are used for states of 100,000 or more elements on this rank.
    Checkpoints of sharded weights are made from a copy of this rank's state on the device, and bitsandbytes loads the state
    of a checkpoint onto the device, where it stays. On a CPU it does the same as AdamW8bit.

    Example:
        model:
          optimizer:
            class_path: PagedAdamW8bit
            init_args: {lr: 6.0e-4, betas: [0.9, 0.95], weight_decay: 0.1}
    """

    paged = True
