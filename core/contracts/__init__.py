"""What techniques must offer, as abstract classes, and what they may offer, as Protocols.

`modules` has networks, objectives and schedules, `packed_batches` and `data` the data parts, `offers`
what is optional. Strategies, callbacks and commands rely on these and on nothing else: they ask a network for its
blocks, they never look at its class.

`modules` and `packed_batches` need torch and are imported when a name of theirs is first used: text is prepared
without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from core.contracts import data, offers
from core.contracts.data import *  # noqa: F403
from core.contracts.offers import *  # noqa: F403
from core.errors import deprecated

if TYPE_CHECKING:
    from core.contracts.modules import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*data.__all__, *offers.__all__, *import_module("core.contracts.modules").__all__]
    if name == "misfits":
        deprecated("core.contracts.misfits", name := "compatibility_errors")
    if not name.startswith("__") and name not in ("modules", "packed_batches"):  # not yet imported
        modules = import_module("core.contracts.modules")
        if name in modules.__all__:
            return getattr(modules, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
