"""Loads the network and tokenizer of a checkpoint for generation, and moves the network to a device and data type."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from toolkit.generation.prompts import PromptEncoder, is_library_error


@dataclass(frozen=True)
class Loaded:
    """A network with what it needs to read and write text.

    Attributes:
        encoder: Of prompts.
        end: The id that ends a text; None: there is none.
        files: File name -> text, of the configs that a checkpoint keeps of a Hugging Face folder.
    """

    network: Any
    encoder: PromptEncoder
    end: int | None
    files: Mapping[str, str]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, for decoding."""
        return self.encoder.tokenizer

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end a text, those of a generation_config.json included."""
        from plugins.checkpoints.kept_files import GENERATION
        from toolkit.bounded import parse_json

        try:
            stored = parse_json(self.files[GENERATION].encode())["eos_token_id"]
        except (KeyError, TypeError, ValueError):
            stored = []
        found = [self.end, *(stored if isinstance(stored, list) else [stored])]
        return sorted({id for id in found if type(id) is int and 0 <= id < self.network.vocab_size})


def prepare(path: Path, options: argparse.Namespace) -> Loaded:
    """Returns the model of a checkpoint, in the data type, on the device and with the quantised weights of the options.

    With `--tensor_parallel` its network has this rank's shards.
    """
    model = load(path, options)
    if _ranks(options) > 1:
        return model
    move(model.network, "cpu", options.dtype)
    if options.quantize:
        from plugins.commands.quantize import quantize

        print(f"# {quantize(model.network, options.quantize)}", file=sys.stderr)
    move(model.network, options.device, None)
    return model


def adapted(model: Loaded, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns name -> network of each `--adapter`; all share the weights of the model's, the base.

    Raises:
        ConfigError: If one was trained on another base, or the checkpoint holds none.
    """
    from plugins.checkpoints.finding import resolve
    from plugins.checkpoints.stored_network import with_adapters

    found = {}
    for name, place in options.adapters.items():
        network = with_adapters(model.network, resolve(place, Path(options.root)))
        found[name] = move(network, options.device, options.dtype)
    return found


def _ranks(options: argparse.Namespace | None) -> int:
    return getattr(options, "tensor_parallel", 1)  # chat and serve have no such option


def load(path: Path, options: argparse.Namespace | None = None) -> Loaded:
    """Returns network and tokenizer of a checkpoint: on the CPU, or with `--tensor_parallel` this rank's shards.

    Raises:
        ConfigError: If weights and configuration do not belong together, or the tokenizer cannot be used.
    """
    from plugins.checkpoints.kept_files import KEPT
    from plugins.cli.configuration.mistakes import main_reason

    try:
        checkpoint, network, text, end = _read(path, options)
        files = checkpoint.get(KEPT, {})
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        said = main_reason(str(error).strip()).splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{path}: its weights are not those of the network that its configuration names, or one of them is damaged:"
            f"\n{' '.join(line.strip() for line in said[:3])[:300]}"
        ) from error
    try:
        encoder = PromptEncoder(text)
    except BaseException as error:  # the library raises nothing narrower
        if not is_library_error(error):
            raise
        raise ConfigError(f"{path}: its tokenizer is damaged: {str(error)[:200]}") from error
    if end is not None and not (type(end) is int and 0 <= end < network.vocab_size):
        raise ConfigError(
            f"{path}: its end-of-text id is {str(end)[:50]}, the network has {network.vocab_size} token ids."
        )
    size = 1 + max(encoder.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if size > network.vocab_size:
        raise ConfigError(
            f"{path}: its tokenizer has {size:,} token ids, the network's vocab_size is {network.vocab_size:,}: "
            "they do not belong together."
        )
    return Loaded(network, encoder, end, files if isinstance(files, Mapping) else {})


def _read(path: Path, options: argparse.Namespace | None) -> tuple[Mapping[str, Any], Any, str, int | None]:
    """Returns what a checkpoint holds, and of it network, tokenizer and end-of-text id."""
    if options is None or _ranks(options) == 1:
        from plugins.checkpoints.stored_network import network_in, read

        checkpoint = read(path)
        return checkpoint, *network_in(checkpoint, path, bool(getattr(options, "adapters", None)))
    import torch

    from plugins.commands.generate_shards import read_shards, shard_network

    checkpoint = read_shards(path)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    return checkpoint, *shard_network(checkpoint, path, torch.device(options.device), dtype)


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
