"""Runs with parts of others that do no harm: nothing should be said of them, though they are compared with leyden's own."""

from __future__ import annotations

import math
from typing import Any

from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.olmoe import OLMoE
from plugins.optimizers.adamw import AdamW
from plugins.optimizers.muon import Muon
from tests.faults.catalogue import Fault, everywhere, packing
from tests.faults.recipes import NETWORKS, OBJECTIVES, OPTIMIZERS, RANKS, RECIPES, RESUMED, STEPS
from tests.faults.unseen import Overlays, part, varied


class OwnGPT(GPT):
    """Derives from GPT, with a smooth activation of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.blocks:
            block.mlp.activation = F.silu  # type: ignore[union-attr]


class OwnLlama(Llama):
    pass


class OwnOLMoE(OLMoE):
    pass


class OwnAdamW(AdamW):
    pass


class OwnMuon(Muon):
    pass


class OwnCosine(LambdaLR):
    """A cosine with a warm-up of six steps.

    Args:
        optimizer: The optimizer.
        steps: Of the run.
    """

    def __init__(self, optimizer: Any, steps: int) -> None:
        super().__init__(
            optimizer, lambda step: min((step + 1) / 6, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        )


def derived(section: str, given: dict[str, dict[str, Any]]) -> Overlays:
    """Returns the recipes' networks or optimizers as classes of another package that derive from them."""
    found = {}
    for name, value in given.items():
        path = f"tests.faults.harmless.Own{value['class_path']}"
        found[name] = {"model": {section: {"class_path": path, "init_args": value["init_args"]}}}
    return found


def by_hand() -> Overlays:
    path = "tests.faults.broken_models.MeanByHand"
    return {
        name: {"model": {"objective": {"class_path": path, "init_args": {"objective": OBJECTIVES[name]}}}}
        for name in RECIPES
    }


NEVER = part("parts.Changing", bug="nothing", first=10**9)
"""A callback that waits for a step that does not come."""

HARMLESS: tuple[Fault, ...] = tuple(
    Fault(name, "nothing", False, overlays)
    for name, overlays in (
        ("a callback that does nothing", NEVER),
        ("a callback that does nothing over two ranks", varied(RANKS, NEVER)),
        ("a callback that does nothing in a resumed run", varied(RESUMED, NEVER)),
        ("a packing that changes nothing", packing("nothing")),
        ("networks of another package", derived("network", NETWORKS)),
        ("optimizers of another package", derived("optimizer", OPTIMIZERS)),
        ("a schedule of another package", everywhere(
            {"model": {"lr_scheduler": {"class_path": "tests.faults.harmless.OwnCosine", "init_args": {"steps": STEPS}}}}
        )),
        ("a mean by hand", by_hand()),
    )
)  # fmt: skip
