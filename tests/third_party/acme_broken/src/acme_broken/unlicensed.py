"""Fails when it is imported."""

from lightning.pytorch import Callback

from core.technique import technique

raise PermissionError("the licence server does not answer\n" * 20)


@technique(paper="own work", api=">=1,<2")
class Unlicensed(Callback):
    """Does nothing."""
