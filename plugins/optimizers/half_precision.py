"""What optimizers with second moments need where these are stored in float16."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.selection import Run, Selected

LEAST_EPS = 1e-4
"""With beta2 = 0.95, second moments of gradients below 7.7e-4 are 0 in float16; with this eps, updates stay below 8 lr."""


class ChecksEps:
    """Refuses the usual `eps` in `16-true`, where weights, gradients and moments are float16."""

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields that `eps` is too small for moments in float16."""
        eps = own.arguments.get("eps")
        half = run.argument("trainer.precision") == "16-true" or any(
            item.name == "HalfPrecision" and item.arguments.get("precision") == "16-true"
            for item in run.selected
        )
        if half and isinstance(eps, float) and eps < LEAST_EPS:
            yield (
                f"eps is {eps:g}, and 16-true stores small second moments as 0, so that updates are divided by eps alone: "
                f"set eps to {LEAST_EPS:g}, or take --trainer.precision=bf16-true"
            )
