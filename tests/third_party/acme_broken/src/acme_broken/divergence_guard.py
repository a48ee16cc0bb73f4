"""A name that another package has registered, too."""

from lightning.pytorch import Callback

from core.technique import technique


@technique(paper="own work", api=">=1,<2")
class DivergenceGuard(Callback):
    """Does nothing.

    Example:
        trainer:
          callbacks+:
            - class_path: acme_broken.divergence_guard.DivergenceGuard
    """
