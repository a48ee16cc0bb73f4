"""The command `inspect-data`: shows a batch of prepared tokens as text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from inspect import signature
from itertools import groupby
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from toolkit.prepared import (
    TOKENIZER,
    finished_folder,
    load_tokenizer,
    read_manifest,
    read_tokenizer,
    split_folder,
    splits_of,
)

_COLOURS = ("cyan", "yellow", "green", "magenta")


@technique(paper="rich, rich.readthedocs.io/en/stable/text.html")
def inspect_data(arguments: list[str]) -> int:
    """Shows a batch of prepared tokens as text, with document boundaries and masks in colour.

    Successive documents alternate in colour; | marks where one begins, a dim end-of-text where one ends. Tokens
    whose label is ignored are underlined; padding is counted at the end of its row.

    Example:
        python -m core inspect-data prepared/corpus --index 3 --packing BestFit --batch_size 2
    """
    options = _options(arguments)
    folder = finished_folder(options.folder)
    manifest = read_manifest(folder)
    if options.split not in (splits := splits_of(manifest)):
        raise ConfigError(f"--split is {options.split}; {folder} has {' and '.join(splits)}.")
    from rich.console import Console

    from core import catalog

    packing = _packing(catalog.find(options.packing, "data").load(), options)
    sizes = {"sequence_length": options.sequence_length, "batch_size": options.batch_size}
    batch = _batch(packing.batches(split_folder(folder, options.split), pad=True, **sizes), options.index)
    tokenizer = load_tokenizer(read_tokenizer(folder, manifest), folder / TOKENIZER)
    console = Console(highlight=False)
    for row in range(options.batch_size):
        columns = {name: tensor[row].tolist() for name, tensor in batch.items()}
        console.print(f"row {row} of batch {options.index}, {options.split}", style="bold")
        console.print(_text(columns, tokenizer, manifest["end_of_text_id"]), soft_wrap=True)
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m core inspect-data", description=inspect_data.__doc__)
    parser.add_argument("folder", metavar="DIR", help="the folder that prepare wrote")
    parser.add_argument("--index", type=int, default=0, help="of the batch, in the stored order")
    parser.add_argument("--split", choices=("train", "validation", "test"), default="train")
    parser.add_argument("--sequence_length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--batch_size", type=int, default=1, help="rows in a batch")
    parser.add_argument("--packing", default="Concatenate", help="how documents are put into rows")
    parser.add_argument("--mask_documents", action="store_true", help="Concatenate: each document on its own")
    options = parser.parse_args(arguments)
    for name, least in {"index": 0, "sequence_length": 1, "batch_size": 1}.items():
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} is {getattr(options, name)}; it is at least {least}.")
    return options


def _packing(packing: type, options: argparse.Namespace) -> Any:
    from core.contracts import Packing

    if not (isinstance(packing, type) and issubclass(packing, Packing)):
        raise ConfigError(f"--packing is {options.packing}, which does not pack documents into rows.")
    if options.mask_documents and "mask_documents" not in signature(packing).parameters:
        raise ConfigError(f"--mask_documents: {options.packing} has no such argument. Leave it out.")
    arguments: dict[str, Any] = {"mask_documents": True} if options.mask_documents else {}
    return packing(**arguments)


def _batch(batches: Any, index: int) -> Any:
    """Returns the batch of an index, without reading those before it."""
    cursor = batches.cursor
    for number in range(index + 1):
        rows, cursor = batches.take(cursor, batches.batch_size)
        if not rows:
            raise ConfigError(f"--index is {index}; there are {number:,} batches, counted from 0.")
    return batches.read(rows, slice(0, batches.batch_size))


def _text(columns: dict[str, list[int]], tokenizer: Any, end: int) -> Any:
    """Returns a row as text in colours."""
    from rich.text import Text

    ids, full = columns["input_ids"], _without_padding(columns)
    text = Text()
    document = -1
    for (number, ignored, ends), places in groupby(_states(columns, full, end), key=lambda state: state[1:]):
        if number != document:
            text.append("|", "bold white")
            document = number
        chosen = [ids[place] for place, *_ in places]
        style = "dim" if ends else _COLOURS[number % len(_COLOURS)]
        text.append(
            tokenizer.decode(chosen, skip_special_tokens=False), f"{style} underline" if ignored else style
        )
    if full < len(ids):
        text.append(f"[{len(ids) - full} tokens of padding]", "dim red")
    return text


def _without_padding(columns: dict[str, list[int]]) -> int:
    """Returns how many tokens of a row are none of its padding."""
    full = max((place + 1 for place, label in enumerate(columns["labels"]) if label != -100), default=0)
    given = columns.get("document_ids")
    if given is None or (full == 0 and given[0] == given[-1]):
        return full
    last = given[max(full - 1, 0)]  # the last token of a document may have no label
    return max(place + 1 for place, number in enumerate(given) if number == last)


def _states(columns: dict[str, list[int]], full: int, end: int) -> Iterator[tuple[int, int, bool, bool]]:
    """Yields (place, document, whether its label is ignored, whether it ends a document) of each token."""
    given, number = columns.get("document_ids"), 0
    for place in range(full):
        token = columns["input_ids"][place]
        yield place, given[place] if given else number, columns["labels"][place] == -100, token == end
        number += token == end
