"""The command `generate`: continues prompts with a trained checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, take_option, trusting
from plugins.commands.generate_options import (
    FILTERS,
    add_model_options,
    add_sampling_options,
    check_seed,
    sampling_faults,
)
from plugins.commands.generate_prompts import read_prompts
from plugins.commands.new_output import check_writable


@technique(
    paper="top-k arXiv:1805.04833, nucleus 1904.09751, min-p 2407.01082, repetition penalty 1909.05858, beam search"
)
def generate(arguments: list[str]) -> int:
    """Continues prompts with a checkpoint: one as text, token by token; several as JSON lines.

    A JSON line has `prompt`, `text`, `ids` (the new tokens), `finish_reason` (stop, or length for --max_new_tokens), and
    `seed`, with which `--prompt` alone gives the same text; for beams `score` instead; with `--adapter` also `adapter`.

    Example:
        python -m core generate --ckpt_path last --prompt "The function returns" --temperature 0.8
        python -m core generate --ckpt_path last --prompts prompts.txt --n 4 --min_p 0.1 --output texts.jsonl
        python -m core generate --ckpt_path runs/base --adapter chat=runs/chat --adapter code=runs/code --prompt "Sort"
    """
    given, (trusted, arguments) = arguments, take_option(arguments)
    options = _options(arguments)
    prompts = read_prompts(options.prompts, options.adapters) if options.prompts else [(options.prompt, None)]
    prompts = [
        (text, one) for text, named in prompts for one in ([named] if named else options.adapters or [None])
    ]
    if options.seed + len(prompts) * options.n > 2**64:
        raise ConfigError("--seed is out of range: the last text's would be above 2^64 - 1, torch's largest.")
    if options.tensor_parallel > 1:
        from plugins.commands import generate_ranks

        if not generate_ranks.is_launched():
            return generate_ranks.start(options.tensor_parallel, generate, given)
        with generate_ranks.connected(options.tensor_parallel, options.device) as (rank, options.device):
            options.output = None if rank else options.output
            return _generate(options, prompts, trusted)
    return _generate(options, prompts, trusted)


def _generate(
    options: argparse.Namespace, prompts: Sequence[tuple[str, str | None]], trusted: tuple[str, ...]
) -> int:
    from plugins.checkpoints.finding import resolve
    from plugins.checkpoints.remote_copies import shown
    from plugins.commands.generate_job import Job, encode, print_text, write_lines
    from plugins.commands.generate_network import adapted, prepare
    from toolkit.generation.single_rows import store_for_single_rows
    from toolkit.generation.texts import split_stops

    path = resolve(options.ckpt_path, Path(options.root))
    with trusting(Trust(trusted)):
        model = prepare(path, options)
        networks = adapted(model, path, options)
    texts = [text for text, _ in prompts]
    stops, stop_ids = split_stops(model.tokenizer, options.stop)
    job = Job(
        options=options,
        network=model.network,
        tokenizer=model.tokenizer,
        stops=stops,
        stop_ids=[*stop_ids, *model.stop_ids],
        texts=texts,
        prompts=encode(model, texts, options.special_tokens),
        networks=networks,
        adapters=[adapter for _, adapter in prompts],
    )
    streams = not (options.as_lines or options.num_beams > 1)
    if streams:
        store_for_single_rows(model.network)
    print(f"# {shown(path)}, seed {options.seed}", file=sys.stderr)
    start = time.perf_counter()
    count = print_text(job) if streams else write_lines(job)
    seconds = time.perf_counter() - start
    print(f"# {count} tokens, {count / max(seconds, 1e-9):.0f} tokens/s", file=sys.stderr)
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    """Returns the options with their defaults; `as_lines`: whether JSON lines are written."""
    parser = Parser(prog="python -m core generate", description=generate.__doc__)
    add_model_options(parser)
    parser.add_argument("--prompt", help="text to continue; default: none, a text from its beginning")
    parser.add_argument(
        "--prompts", metavar="FILE", help="one prompt a line; .jsonl: strings, or objects with a `prompt`"
    )
    parser.add_argument(
        "--special_tokens",
        action="store_true",
        help="read special tokens such as <|endoftext|> in prompts; else they are text",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write JSON lines there, in place of what it has; default: to the terminal",
    )
    parser.add_argument("--json", action="store_true", help="JSON lines also for a single text")
    add_sampling_options(parser)
    parser.add_argument("--num_beams", type=int, default=1, help="above 1: beam search, instead of sampling")
    parser.add_argument(
        "--length_penalty", type=float, help="of beam search: above 0 favours long texts; default: 1"
    )
    parser.add_argument(
        "--adapter",
        metavar="NAME=PATH",
        action="append",
        default=[],
        help="a checkpoint with an adapter of the same base; may be repeated. Each prompt is continued with each of them, "
        "but a line with an `adapter` with that one alone",
    )
    parser.add_argument("--n", type=int, default=1, help="texts for each prompt")
    parser.add_argument(
        "--logprobs", action="store_true", help="log-probability of each token, before filters, in JSON lines"
    )
    parser.add_argument("--batch_size", type=int, default=16, help="texts computed at once")
    parser.add_argument(
        "--tensor_parallel",
        type=int,
        default=1,
        metavar="RANKS",
        help="shard the weights over so many processes, on --device cuda over as many GPUs",
    )
    return _checked(parser.parse_args(arguments))


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    check_seed(options.seed)
    options.adapters = dict(_named(word) for word in options.adapter)
    for name in ("n", "num_beams", "batch_size", "tensor_parallel", "max_new_tokens"):
        least = 0 if name == "max_new_tokens" else 1
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)} must be at least {least}.")
    if options.output is not None:
        _check_output(options.output)
    if problem := next(_contradictions(options), None):
        raise ConfigError(problem)
    options.as_lines = bool(
        options.json
        or options.prompts
        or options.output
        or options.n > 1
        or options.logprobs
        or options.adapters
    )
    options.prompt = options.prompt or ""
    if options.temperature is None:
        options.temperature = 0.8
    if options.length_penalty is None:
        options.length_penalty = 1.0
    from toolkit.generation.filters import Sampling

    filters = options.top_k, options.top_p, options.min_p, options.repetition_penalty
    if wrong := Sampling(options.temperature, *filters).fault():
        raise ConfigError(f"--{wrong}")
    return options


def _named(word: str) -> tuple[str, str]:
    name, equals, path = word.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"--adapter {word}: write NAME=PATH, such as --adapter chat=runs/chat.")
    return name, path


def _check_output(name: str) -> None:
    """Raises a ConfigError if the lines could not be written there, before anything is computed."""
    check_writable(name)
    path = Path(name)
    if path.is_dir():
        raise ConfigError(f"--output {name}: it is a folder, give the name of a file.")
    if path.exists() and not path.is_file():
        raise ConfigError(f"--output {name}: it is no file. Without --output the lines go to the terminal.")


def _contradictions(options: argparse.Namespace) -> Iterator[str]:
    given = [f"--{name}" for name in FILTERS if getattr(options, name) is not None]
    if options.prompt is not None and options.prompts is not None:
        yield "--prompt and --prompts: give one of them."
    if options.quantize and options.tensor_parallel > 1:
        yield "--quantize: quantised weights are not sharded. Leave it, or --tensor_parallel, away."
    for name in ("quantize", "tensor_parallel"):
        if options.adapters and getattr(options, name) not in (None, 1):
            yield f"--adapter and --{name}: adapters share the weights of one process, as they are. Leave one away."
    if options.num_beams == 1:
        if options.length_penalty is not None:
            yield "--length_penalty is of beam search: give --num_beams as well."
        yield from sampling_faults(options)
        if options.temperature == 0 and options.n > 1:
            yield "--temperature 0 gives one text: leave --n away, or give a temperature above 0."
        return
    if options.temperature is not None:
        given.insert(0, "--temperature")
    given += ["--stop"] * bool(options.stop) + ["--logprobs"] * options.logprobs
    if given:
        yield f"--num_beams searches for the likeliest text: it knows no {given[0]}. Leave one away."
    if options.n > options.num_beams:
        yield f"--n {options.n}: {options.num_beams} beams find {options.num_beams} texts."
