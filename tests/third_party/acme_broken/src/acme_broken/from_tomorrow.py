"""Written for a version of leyden's contracts that is yet to come."""

from lightning.pytorch import Callback

from core.technique import technique


@technique(paper="own work", api=">=99,<100")
class FromTomorrow(Callback):
    """Does nothing.

    Example:
        trainer:
          callbacks+:
            - class_path: FromTomorrow
    """
