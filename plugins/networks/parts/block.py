"""The repeated part of a decoder: attention and MLP with their norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor, nn

from plugins.networks.parts.mlp import MLP
from toolkit.network_parts import MLP_READERS

Placement = Literal["pre", "post", "sandwich", "after"]


class Block(nn.Module):
    """Attention, then an MLP, each added to what it was given.

    Args:
        attention: Or another mixer of tokens; called with the arguments of :meth:`forward`.
        mlp: Maps (B, T, C) to (B, T, C).
        new_norm: Returns a norm of C features.
        placement: Of the norms, for f attention or MLP. "pre": x + f(norm(x)), as GPT-2 and Llama;
            "post": norm(x + f(x)), as BERT; "after": x + norm(f(x)), as OLMo 2; "sandwich": x + norm(f(norm(x))), as
            Gemma 2 and 3.
        dropout: Of what is added.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        new_norm: Callable[[], nn.Module],
        placement: Placement,
        dropout: float = 0.0,
    ):
        super().__init__()
        if placement != "after":
            self.attention_norm, self.mlp_norm = new_norm(), new_norm()
        if placement in ("after", "sandwich"):
            self.attention_out_norm, self.mlp_out_norm = new_norm(), new_norm()
        self.attention, self.mlp, self.placement = attention, mlp, placement
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: Tensor | None, mask: Any, cache: Any) -> Tensor:
        """Maps x (B, T, C) to (B, T, C); the other arguments go to the attention."""
        if self.placement == "pre":
            x = x + self.dropout(self.attention(self.attention_norm(x), rope, mask, cache))
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        if self.placement == "post":
            x = self.attention_norm(x + self.dropout(self.attention(x, rope, mask, cache)))
            return self.mlp_norm(x + self.dropout(self.mlp(x)))
        sandwich = self.placement == "sandwich"
        y = self.attention(self.attention_norm(x) if sandwich else x, rope, mask, cache)
        x = x + self.dropout(self.attention_out_norm(y))
        y = self.mlp(self.mlp_norm(x) if sandwich else x)
        return x + self.dropout(self.mlp_out_norm(y))

    def parts(self) -> dict[str, list[nn.Module]]:
        """The modules of each kind; see `toolkit.network_parts`."""
        norms = [child for name, child in self.named_children() if name.endswith("norm")]
        readers: list[nn.Module] = [part.down_proj for part in self.mlp.modules() if isinstance(part, MLP)]
        return {"attention": [self.attention], "mlp": [self.mlp], "norm": norms, MLP_READERS: readers}


class MixerBlock(nn.Module):
    """A mixer alone, added to what it was given: x + mixer(norm(x)), as Mamba.

    Args:
        mixer: Called with the arguments of :meth:`forward`.
        norm: Of the width.
    """

    def __init__(self, mixer: nn.Module, norm: nn.Module):
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(self, x: Tensor, rope: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor:
        """Maps x (B, T, C) to (B, T, C); the other arguments go to the mixer."""
        return x + self.mixer(self.norm(x), rope, mask, cache)

    def parts(self) -> dict[str, list[nn.Module]]:
        """The modules of each kind; see `toolkit.network_parts`."""
        return {"attention": [self.mixer], "norm": [self.norm]}


def parts_of(blocks: Iterable[nn.Module]) -> dict[str, list[nn.Module]]:
    """Returns the modules of each kind in some blocks; a process without a block has another module in its place."""
    found: dict[str, list[nn.Module]] = {}
    for block in blocks:
        if isinstance(block, Block | MixerBlock):
            for kind, modules in block.parts().items():
                found.setdefault(kind, []).extend(modules)
    return found
