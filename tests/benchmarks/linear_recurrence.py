"""Time of the chunked form of a recurrence beside the loop over tokens, forward and backward.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.linear_recurrence

Batches of 2 rows of T tokens, 4 heads with keys and values of 32 features, float32, on the CPU. The two take turns; of each
the fastest of the rounds counts, as other load only slows. The last column is attention with a causal mask, of the same sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from plugins.networks.parts.linear_recurrence import chunked, recurrent

ROUNDS, LENGTHS = 3, (256, 1024, 2048)
KINDS = {
    "gated linear attention": (32, False, 8),
    "Mamba-2": (1, False, 64),
    "gated DeltaNet": (1, True, 64),
}
"""Gates a head, whether with the delta rule, tokens of a chunk."""


def seconds(call: Callable[[], Tensor]) -> float:
    """Returns how long forward and backward take."""
    start = time.perf_counter()
    call().sum().backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start


def inputs(length: int, gates: int, delta: bool) -> tuple[list[Tensor], Tensor | None]:
    """Returns queries, keys, values and decays, and the strength of the delta rule."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 32, requires_grad=True) for _ in range(3))
    decay = (-torch.rand(2, 4, length, gates)).requires_grad_()
    beta = torch.rand(2, 4, length, requires_grad=True) if delta else None
    return [q, torch.nn.functional.normalize(k, dim=-1), v, decay], beta


def measure(length: int, gates: int, delta: bool, chunk_size: int) -> tuple[float, float, float]:
    """Returns the fastest time of chunks, of the loop and of attention."""
    best = [float("inf")] * 3
    for _ in range(ROUNDS):
        given, beta = inputs(length, gates, delta)
        best[0] = min(best[0], seconds(lambda g=given, b=beta: chunked(*g, beta=b, chunk_size=chunk_size)[0]))
        given, beta = inputs(length, gates, delta)
        best[1] = min(best[1], seconds(lambda g=given, b=beta: recurrent(*g, beta=b)[0]))
        given, _ = inputs(length, gates, delta)
        best[2] = min(best[2], seconds(lambda g=given: scaled_dot_product_attention(*g[:3], is_causal=True)))
    return best[0], best[1], best[2]


def main() -> None:
    """Prints a row for each kind and length."""
    print("| | T | chunks, ms | loop, ms | loop / chunks | attention, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, (gates, delta, chunk_size) in KINDS.items():
        for length in LENGTHS:
            chunks, loop, attention = (1000 * x for x in measure(length, gates, delta, chunk_size))
            print(
                f"| {kind} | {length} | {chunks:.1f} | {loop:.0f} | {loop / chunks:.1f} | {attention:.1f} |"
            )


if __name__ == "__main__":
    main()
