"""The command `compare-tokenizers`: several tokenizers on the same text, in a table and a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser

if TYPE_CHECKING:
    from core.contracts import Tokenizer

_HELP = """\
a registered tokenizer, with its arguments after a colon (UnigramTokenizer,
BPETokenizer:vocab_size=8192), or a trained tokenizer: a tokenizer.json, a
merges.txt or vocab.json, a SentencePiece .model, or a folder with one of these"""


@technique(paper="fertility as in Rust et al., arXiv:2012.15613, section 3.2")
def compare_tokenizers(arguments: list[str]) -> int:
    """Compares tokenizers on the same text: bytes per token, fertility, speed, round trip, vocabulary, sequences.

    Those that learn from text are trained on nine documents of ten; all are measured on the others. Writes
    compare-tokenizers.md and compare-tokenizers.png.

    Example:
        python -m core compare-tokenizers BPETokenizer:vocab_size=8192 UnigramTokenizer:vocab_size=8192 gpt2/merges.txt
    """
    parser = Parser(
        prog="python -m core compare-tokenizers",
        description=compare_tokenizers.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("tokenizers", metavar="NAME_OR_FILE", nargs="+", help=_HELP)
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        nargs="+",
        default=["python-docs"],
        help="paths or globs that TextDocuments reads, each a column of its own (%(default)s)",
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens in a sequence (%(default)s)")
    parser.add_argument(
        "--output", metavar="DIR", default="runs/compare-tokenizers", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if options.length < 1:
        raise ConfigError(f"--length is {options.length}; a sequence has at least 1 token.")
    for words, what in ((options.tokenizers, "tokenizer"), (options.data, "source")):
        if twice := next((word for word in words if words.count(word) > 1), None):
            raise ConfigError(f"The {what} {twice} is given twice. Name each once.")
    _compare([(word, built(word)) for word in options.tokenizers], options)
    return 0


def _compare(tokenizers: list[tuple[str, Tokenizer]], options: Any) -> None:
    from core import catalog, durable
    from plugins.commands.tokenizer_comparison import (
        Sample,
        as_markdown,
        draw_png,
        measure,
        notes,
        table,
    )

    reader = catalog.find("TextDocuments", "data").load()
    sources = {name: reader(name) for name in options.data}
    samples = {name: Sample.of(source) for name, source in sources.items()}
    measured = []
    for name, tokenizer in tokenizers:
        print(f"{name} ...", file=sys.stderr, flush=True)
        documents = (text for sample in samples.values() for text in sample.training())
        measured.append(
            measure(name, tokenizer, documents, {name: sample.texts for name, sample in samples.items()})
        )
    rows, said = table(measured, options.length), notes(samples, options.length)
    _print(rows)
    print(f"\n{said}")
    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        durable.write(folder / "compare-tokenizers.png", draw_png(measured, options.length))
        durable.write(folder / "compare-tokenizers.md", as_markdown(rows, said))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}. Choose another --output."
        ) from error
    print(f"\nWritten: {folder}/compare-tokenizers.md and compare-tokenizers.png")


def _print(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *figures in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]))


def built(word: str) -> Tokenizer:
    """Returns the tokenizer that a word of the command line means: a file, or NAME:argument=value,argument=value.

    Raises:
        ConfigError: If there is no such file or tokenizer, or it does not take these arguments; names the nearest.
    """
    from core import catalog
    from core.contracts import Tokenizer

    name, _, listed = word.partition(":")
    names = {entry.name: entry for entry in catalog.entries() if entry.kind == "data"}
    if Path(word).expanduser().exists() or (
        name not in names and (set("/\\") & set(word) or _has_suffix(word))
    ):
        return catalog.find("PretrainedTokenizer", "data").load()(word)
    kind = catalog.find(name, "data").load() if name in names else None
    if not (isinstance(kind, type) and issubclass(kind, Tokenizer)):
        own = {name for name in names if name.endswith("Tokenizer")}
        raise ConfigError(
            f"There is no tokenizer {name!r}, and no file of this name.{nearest(name, own)}\n"
            f"There are {', '.join(sorted(own))}, with arguments as in BPETokenizer:vocab_size=8192;\nor give a "
            "tokenizer.json, merges.txt or .model file, or the folder that holds it."
        )
    return kind(**dict(_arguments(word, kind, listed)))


def _has_suffix(word: str) -> bool:
    return Path(word).suffix in (".json", ".model", ".txt", ".bpe")


def _arguments(word: str, kind: type, listed: str) -> Iterator[tuple[str, Any]]:
    """Yields the arguments that `argument=value,argument=value` gives a class, values as in YAML."""
    import yaml

    from plugins.cli.configuration.signatures import REQUIRED, accepts, parameters

    known, _ = parameters(kind)
    given = [part for part in listed.split(",") if part]
    names = [part.partition("=")[0] for part in given]
    for part, name in zip(given, names, strict=True):
        if "=" not in part:
            example = f"{name}=VALUE" if name in known else f"{next(iter(known), 'argument')}={part}"
            raise ConfigError(
                f"{word}: write arguments as {kind.__name__}:{example}, with commas between several."
            )
        if name not in known:
            raise ConfigError(
                f"{word}: {kind.__name__} has no argument {name!r}.{nearest(name, set(known))}\n"
                f"It takes {', '.join(known) or 'none'}."
            )
        text = part.partition("=")[2]
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        if not accepts(known[name].hint, value):
            raise ConfigError(
                f"{word}: {name} cannot be {text!r}, it is of type {_type_name(known[name].hint)}."
            )
        yield name, value
    if missing := [
        name for name, argument in known.items() if argument.default is REQUIRED and name not in names
    ]:
        raise ConfigError(
            f"{word}: {kind.__name__} needs {missing[0]}. Write {kind.__name__}:{missing[0]}=VALUE."
        )


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
