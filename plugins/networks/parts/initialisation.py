"""How weights begin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

Init = Literal["gpt2", "llama", "small", "mup"]

RESIDUAL = (".o_proj", ".out_proj", ".down_proj")
"""Ends of the names of projections that add to the residual stream: two a block."""


def std_of(
    name: str, init: Init, n_layer: int, n_embd: int, own: Mapping[str, float] | None = None, fan_in: int = 0
) -> float:
    """Returns the standard deviation of a matrix's normal distribution, with mean 0.

    Args:
        name: Of the module, such as "layers.0.mlp.down_proj".
        init: "gpt2": 0.02, and 0.02 / sqrt(2 L) for the 2 projections per block that add to the residual stream
            (Radford et al., 2019, section 2.3). "llama": 0.02 for all, the `initializer_range` that Llama, Qwen,
            Mistral, Gemma and OLMo 2 publish. "small": sqrt(2 / (5 C)), arXiv:1910.05895, and 2 / (L sqrt(C)) for
            those of the residual stream, as GPT-NeoX-20B, arXiv:2204.06745. "mup": 1 / sqrt(fan_in), 1 for embeddings and 0
            for the head, arXiv:2203.03466, table 3 and section D.2; with Adam the learning rates of all but embeddings,
            norms and biases have to go down as 1 / fan_in.
        n_layer: L.
        n_embd: C.
        own: Patterns of names -> standard deviation; the last that fits wins over `init`.
        fan_in: Inputs of a row of the matrix, for "mup".
    """
    residual = name.endswith(RESIDUAL)
    if init == "small":
        std = 2 / (n_layer * math.sqrt(n_embd)) if residual else math.sqrt(2 / (5 * n_embd))
    elif init == "mup":
        std = {"embed_tokens": 1.0, "lm_head": 0.0}.get(name, 1 / math.sqrt(fan_in))
    else:
        std = 0.02 / math.sqrt(2 * n_layer) if residual and init == "gpt2" else 0.02
    for pattern, value in (own or {}).items():
        if fnmatchcase(name, pattern):
            std = value
    return std
