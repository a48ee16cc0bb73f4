"""Options that `generate`, `chat` and `serve` share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from core.errors import ConfigError
from plugins.cli.configuration.command_parser import Parser

FILTERS = ("top_k", "top_p", "min_p")


def add_model_options(parser: Parser, quantize: bool = True) -> None:
    """Adds which checkpoint is loaded, and how; with weights quantised if a command takes such."""
    parser.add_argument(
        "--ckpt_path", required=True, help="a checkpoint, a run folder, a URL, or `last` (newest in --root)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="data type of the weights; default: float32, as they are stored",
    )
    if quantize:
        parser.add_argument(
            "--quantize",
            choices=("int8", "nf4"),
            help="quantise the weights of the blocks' linear layers to 8 or 4.5 bits each",
        )
    parser.add_argument("--root", default="runs", help="where `last` looks for runs")
    parser.add_argument(
        "--trust", metavar="MODULE", help="let the checkpoint's config import from a module; may be repeated"
    )


def add_sampling_options(parser: Parser) -> None:
    """Adds how tokens are chosen, and where a text ends."""
    parser.add_argument("--max_new_tokens", type=int, default=200, help="tokens to generate at most")
    parser.add_argument(
        "--temperature", type=float, help="divides the logits; 0: the likeliest token; default: 0.8"
    )
    parser.add_argument("--top_k", type=int, help="sample among the k likeliest tokens")
    parser.add_argument(
        "--top_p", type=float, help="sample among the likeliest tokens of this total probability"
    )
    parser.add_argument(
        "--min_p", type=float, help="sample among tokens of this share of the likeliest one's probability"
    )
    parser.add_argument(
        "--repetition_penalty", type=float, default=1.0, help="above 1: tokens come less often again"
    )
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end a text before this; may be repeated"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="same seed, same text: text j of prompt i (or answer i), both from 0, has seed + i * n + j",
    )


def check_seed(seed: int) -> None:
    """Raises a ConfigError if torch does not take a seed."""
    if not -(2**63) <= seed < 2**64:
        raise ConfigError("--seed is out of range: torch takes -2^63 to 2^64 - 1.")


def sampling_faults(options: argparse.Namespace) -> Iterator[str]:
    """Yields which options of sampling contradict each other."""
    given = [f"--{name}" for name in FILTERS if getattr(options, name) is not None]
    if options.temperature == 0 and given:
        yield f"--temperature 0 takes the likeliest token: {given[0]} would change nothing. Leave one away."
