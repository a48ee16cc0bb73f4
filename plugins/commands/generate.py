"""The command `generate`: continues a prompt with a trained checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from core.configuration.command_parser import Parser
from core.technique import technique


@technique(paper="temperature, top-k (arXiv:1805.04833) and nucleus sampling (arXiv:1904.09751)")
def generate(arguments: list[str]) -> int:
    """Continues a prompt with a checkpoint, printing tokens as they come.

    Example:
        python -m core generate --ckpt_path last --prompt "The function returns" --temperature 0.8
    """
    options = _options(arguments)
    from tokenizers import Tokenizer

    from core.checkpoints.checkpoint import load_network, resolve
    from core.training.sampling import generate as sample

    path = resolve(options.ckpt_path, Path(options.root))
    network, tokenizer_json, end = load_network(path)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    prompt = tokenizer.encode(options.prompt).ids or [end or 0]
    ids = sample(
        network.to(options.device),
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


def texts(tokenizer: Any, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
    """Yields, for each token id, the text that it completes.

    A character that is spread over several tokens comes with the last of them, so that what has been
    printed never has to be taken back. Tokens are decoded behind those before them: a SentencePiece token
    has its space only there.

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
    return parser.parse_args(arguments)
