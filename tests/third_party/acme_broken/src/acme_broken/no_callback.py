"""Registered as a callback, but not derived from Lightning's."""

from core.technique import technique


@technique(paper="own work", api=">=1,<2")
class NoCallback:
    """Does nothing.

    Example:
        trainer:
          callbacks+:
            - class_path: NoCallback
    """

    def on_train_start(self, trainer, pl_module):
        """Would do something."""
