"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from core.technique import Package, technique
from plugins.optimizers.half_precision import ChecksEps
from plugins.optimizers.libraries import library
from plugins.optimizers.whole_matrices import placed_like, step_whole
from toolkit.shards import is_sharded

LISTS = ("GG", "Q")
"""Parts of a parameter's state that pytorch_optimizer keeps as lists, with one matrix (or nothing) per dimension."""


@technique(
    paper="SOAP, arXiv:2409.11321, algorithm 3; pytorch_optimizer",
    needs=(Package("pytorch_optimizer>=4", extra="optimizers"),),
)
class SOAP(ChecksEps, library("pytorch_optimizer").SOAP):  # type: ignore[misc]
    """Adam in the eigenbasis of the averaged products of a matrix's gradients with themselves.

    State: 8 bytes per float32 parameter, and for an (m, n) matrix 8 (m^2 + n^2) bytes in addition. The first step
    only computes the basis and changes no weight. The weight decay is decoupled.

    State of weights that are sharded over ranks is sharded, too. For its step each matrix is gathered with its state on one rank,
    which computes it as a single process does and sends the shards back: n ranks share the work, also those of a
    tensor-parallel group and those of replicas. The first step, and under DDP each, is computed by every rank.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate.
        betas: Decay rates of the first and the second moment; the second is used for the basis, too.
        weight_decay: Decoupled decay per step, times the learning rate.
        precondition_frequency: Steps between two updates of the basis.
        max_precondition_dim: Larger dimensions, such as a vocabulary, keep the identity as their basis.
        eps: Added to the square root of the second moment.

    Example:
        model:
          optimizer:
            class_path: SOAP
            init_args: {lr: 3.0e-3, weight_decay: 0.1}
    """

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        weight_decay: float = 0.1,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 2048,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=tuple(betas),
            weight_decay=weight_decay,
            eps=eps,
            precondition_frequency=precondition_frequency,
            max_precondition_dim=max_precondition_dim,
        )

    def step(self, closure: Any = None) -> Any:
        """Performs a step; of sharded matrices each rank steps its share, whole."""
        if is_sharded([parameter for group in self.param_groups for parameter in group["params"]]):
            return step_whole(self, super().step, closure)
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict with each matrix under its own name: GG_0, GG_1, Q_0, Q_1."""
        state = super().state_dict()
        return {**state, "state": {key: _flat(own) for key, own in state["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        for parameter, own in self.state.items():
            for name in LISTS:
                found = [own.pop(f"{name}_{index}", []) for index in range(parameter.ndim)]
                own[name] = placed_like(parameter, found)


def _flat(own: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in own.items() if name not in LISTS}
    matrices = {
        f"{name}_{index}": matrix
        for name in LISTS
        for index, matrix in enumerate(own.get(name) or ())
        if isinstance(matrix, Tensor)
    }
    return plain | matrices
