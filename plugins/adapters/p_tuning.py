"""Learned embeddings in front of each text, made by a small network."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from core.errors import ConfigError
from core.technique import technique
from plugins.adapters.prompt_tuning import Prompts
from plugins.adapters.virtual_tokens import VirtualTokenAdapter, VirtualTokens
from plugins.networks.parts.decoder import Decoder
from toolkit.initial_values import start_added, uniform

ENCODERS = ("mlp", "lstm")


class EncodedPrompts(Prompts):
    """Embeddings of virtual tokens that pass an encoder, float32; its parts are peft's.

    Args:
        count: n.
        network: As for :class:`Prompts`.
        encoder: "mlp" or "lstm".
        hidden: Width of the encoder.
    """

    def __init__(self, count: int, network: Decoder, encoder: str, hidden: int) -> None:
        super().__init__(count, network)
        device, width = self.embeddings.device, network.n_embd
        self.lstm = None
        with torch.device("meta"):  # the constructors of torch would draw numbers
            if encoder == "lstm":
                self.lstm = nn.LSTM(width, hidden, num_layers=2, bidirectional=True, batch_first=True)
                layers = [nn.Linear(2 * hidden, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, width)]
            else:
                layers = [nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, width)]  # fmt: skip
            self.mlp = nn.Sequential(*layers)
        for child in self.children():
            child.to_empty(device=device)
        for place, part in self.named_modules():
            if isinstance(part, nn.Linear | nn.LSTM):
                bound = (part.in_features if isinstance(part, nn.Linear) else hidden) ** -0.5  # as torch's
                for leaf, parameter in part.named_parameters():
                    start_added(parameter, uniform(-bound, bound), network, f"virtual.{place}.{leaf}")

    def embedded(self) -> Tensor:
        """Returns what the first block is given, (n, C)."""
        x = self.embeddings
        if self.lstm is not None:
            x = self.lstm(x[None])[0][0]
        return self.mlp(x)  # type: ignore[no-any-return]


@technique(paper="P-Tuning, arXiv:2103.10385, section 3.2: GPT Understands, Too", offers=("keeps_weights",))
class PTuning(VirtualTokenAdapter):
    """Trains n virtual tokens as `PromptTuning` does, whose embeddings an encoder makes of learned ones.

    The encoder, an MLP or a bidirectional LSTM with an MLP, ties the virtual tokens together, which makes them easier to
    train. All else is as for `PromptTuning`.

    Args:
        count: n.
        encoder: "mlp", three linear layers, or "lstm", two LSTM layers and two linear ones, as in the paper.
        hidden: Width of the encoder; None: C.

    Raises:
        ConfigError: If a value is out of range, or as for `PromptTuning`.

    Example:
        trainer:
          callbacks+:
            - class_path: PTuning
              init_args: {count: 8, encoder: mlp}
    """

    def __init__(
        self, count: int = 8, encoder: Literal["mlp", "lstm"] = "mlp", hidden: int | None = None
    ) -> None:
        super().__init__(count)
        if encoder not in ENCODERS:
            raise ConfigError(f"PTuning takes encoder=mlp or encoder=lstm, not {encoder!r}.")
        if hidden is not None and hidden < 1:
            raise ConfigError(f"PTuning: hidden is {hidden}; it must be at least 1.")
        self.encoder, self.hidden = encoder, hidden

    def tokens_of(self, network: Decoder) -> VirtualTokens:
        """Returns the embeddings and their encoder."""
        return EncodedPrompts(self.count, network, self.encoder, self.hidden or network.n_embd)
