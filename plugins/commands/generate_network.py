"""Loads the network of a checkpoint for generation, and moves it to a device and data type."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from core.errors import ConfigError


def load(path: Path, options: argparse.Namespace) -> tuple[Any, Any, int | None]:
    """Returns network, tokenizer and end-of-text id of a checkpoint; with `--tensor_parallel` this rank's shards.

    Raises:
        ConfigError: If weights and configuration do not belong together, or the tokenizer cannot be used.
    """
    from tokenizers import Tokenizer

    from plugins.cli.configuration.mistakes import main_reason

    try:
        network, text, end = _read(path, options)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        said = main_reason(str(error).strip()).splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{path}: its weights are not those of the network that its configuration names, or one of them is damaged:"
            f"\n{' '.join(line.strip() for line in said[:3])[:300]}"
        ) from error
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path}: its tokenizer is damaged: {str(error)[:200]}") from error
    if end is not None and not (type(end) is int and 0 <= end < network.vocab_size):
        raise ConfigError(
            f"{path}: its end-of-text id is {str(end)[:50]}, the network has {network.vocab_size} token ids."
        )
    return network, tokenizer, end


def _read(path: Path, options: argparse.Namespace) -> tuple[Any, str, int | None]:
    import torch

    if options.tensor_parallel == 1:
        from plugins.checkpoints.stored_network import load_network

        return load_network(path)
    from plugins.commands.generate_shards import load_shards

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    return load_shards(path, torch.device(options.device), dtype)


def move(network: Any, device: str, dtype: str | None) -> Any:
    """Returns the network on a device, its weights in a data type; None: in theirs.

    Tables of positions stay in float32, and quantised weights as they are.

    Raises:
        ConfigError: If the device cannot be used.
    """
    import torch
    from torch import nn

    if dtype is not None:
        for parameter in network.parameters():
            if type(parameter) is nn.Parameter and parameter.dtype in (
                torch.float32,
                torch.bfloat16,
                torch.float16,
            ):
                parameter.data = parameter.data.to(getattr(torch, dtype))
    try:
        if torch.device(device).type == "meta":
            raise RuntimeError("it computes nothing")
        return network.to(device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:  # torch built without CUDA asserts
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--device {device[:50]} cannot be used: {said[:200]}") from error
