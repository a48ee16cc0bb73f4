"""The command `generate`: continues a prompt with a trained checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, take_option, trusting


@technique(paper="temperature, top-k (arXiv:1805.04833) and nucleus sampling (arXiv:1904.09751)")
def generate(arguments: list[str]) -> int:
    """Continues a prompt with a checkpoint, printing tokens as they come.

    Example:
        python -m core generate --ckpt_path last --prompt "The function returns" --temperature 0.8
    """
    trusted, arguments = take_option(arguments)
    options = _options(arguments)
    from plugins.checkpoints.finding import resolve
    from toolkit.sampling import generate as sample

    path = resolve(options.ckpt_path, Path(options.root))
    with trusting(Trust(trusted)):
        network, tokenizer, end = _loaded(path)
    prompt = tokenizer.encode(options.prompt).ids or [end or 0]
    ids = sample(
        _moved(network, options.device),
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_id=end,
    )
    print(f"# {path}, seed {options.seed}", file=sys.stderr)
    sys.stdout.write(options.prompt)
    start, count = time.perf_counter(), -1  # the last piece is a flush, no token
    for piece in texts(tokenizer, ids, prompt[-8:]):
        sys.stdout.write(piece)
        sys.stdout.flush()
        count += 1
    seconds = time.perf_counter() - start
    print(f"\n# {count} tokens, {count / max(seconds, 1e-9):.0f} tokens/s", file=sys.stderr)
    return 0


def _loaded(path: Path) -> tuple[Any, Any, int | None]:
    """Returns network, tokenizer and end-of-text id of a checkpoint.

    Raises:
        ConfigError: If weights and configuration do not belong together, or the tokenizer cannot be used.
    """
    from tokenizers import Tokenizer

    from plugins.checkpoints.stored_network import load_network
    from plugins.cli.configuration.mistakes import main_reason

    try:
        network, text, end = load_network(path)
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


def _moved(network: Any, device: str) -> Any:
    import torch

    try:
        if torch.device(device).type == "meta":
            raise RuntimeError("it computes nothing")
        return network.to(device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:  # torch built without CUDA asserts
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--device {device[:50]} cannot be used: {said[:200]}") from error


def texts(tokenizer: Any, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
    """Yields, for each token id, the text that it completes.

    A character that consists of several tokens comes with the last of them, so that printed text never changes.
    Tokens are decoded together with those before them: a SentencePiece token at the start of a text loses its space.

    Args:
        tokenizer: Of the `tokenizers` library.
        ids: The tokens.
        after: Those before them.
    """
    shown, pending = list(after), []
    for token in ids:
        pending.append(token)
        before = tokenizer.decode(shown, skip_special_tokens=True)
        text = tokenizer.decode([*shown, *pending], skip_special_tokens=True)[len(before) :]
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 8:
            yield ""
        else:
            shown, pending = pending, []
            yield text
    yield tokenizer.decode(pending, skip_special_tokens=True)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m core generate", description=generate.__doc__)
    parser.add_argument(
        "--ckpt_path", required=True, help="a checkpoint, a run folder, or `last` (newest in --root)"
    )
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="tokens to generate at most")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="divides the logits; 0: the likeliest token"
    )
    parser.add_argument("--top_k", type=int, help="sample among the k likeliest tokens")
    parser.add_argument(
        "--top_p", type=float, help="sample among the likeliest tokens of this total probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    parser.add_argument("--root", default="runs", help="where `last` looks for runs")
    parser.add_argument(
        "--trust", metavar="MODULE", help="let the checkpoint's config import from a module; may be repeated"
    )
    options = parser.parse_args(arguments)
    if not -(2**63) <= options.seed < 2**64:
        raise ConfigError("--seed is out of range: torch takes -2^63 to 2^64 - 1.")
    return options
