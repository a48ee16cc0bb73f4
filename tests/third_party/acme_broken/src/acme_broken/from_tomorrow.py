"""Written for a version of leyden's contracts that is yet to come."""

from core.technique import technique
from lightning.pytorch import Callback


@technique(paper="own work", api=">=99,<100")
class FromTomorrow(Callback):
    """Does nothing.

    Example:
        trainer:
          callbacks+:
            - class_path: FromTomorrow
    """
