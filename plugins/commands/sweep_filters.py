"""The command `sweep-filters`: how much of a source each value of a filter's threshold keeps."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser

if TYPE_CHECKING:
    import pyarrow

    from core.contracts import Transform

_MOST_VALUES = 200
_PLACES = 64
"""In how many pieces of the source a sample is taken at most."""


class Share(NamedTuple):
    """What one value keeps of the sample, 0 to 1; bytes are those of UTF-8."""

    value: float
    documents: float
    bytes: float


@technique(paper="thresholds chosen by what they keep: FineWeb, arXiv:2406.17557, section 3.6")
def sweep_filters(arguments: list[str]) -> int:
    """Prints and draws which share of a source's documents and bytes a transform keeps, for each value of an argument.

    The config is that of `prepare`. The transforms before the one that is named are applied to a sample of the source,
    then that one with each value; nothing is tokenised. Writes NAME.argument.csv and NAME.argument.png.

    Example:
        python -m core sweep-filters --config data/text --transform GopherQuality.min_words=0:200:21
    """
    from plugins.cli.configuration.config_files import compose, find_config
    from plugins.cli.configuration.trust import Trust, beside, take_option, trusting

    trusted, arguments = take_option(arguments)
    options, rest = _parser().parse_known_args(arguments)
    if options.documents < 1:
        raise ConfigError(f"--documents is {options.documents}; a sample has at least 1.")
    own = beside(map(find_config, options.config), compose(options.config).values, rest)
    with trusting(Trust(trusted, own)):
        name, before, shares, sizes = _swept(options, rest)
    kept = f"{sizes[1]:,} documents, {sizes[2]:,} bytes"
    print(f"{sizes[0]:,} documents of the sample; {kept} after {', '.join(before) or 'no transform'}\n")
    print(f"{name:>24}  {'documents':>9}  {'bytes':>7}")
    for share in shares:
        print(f"{share.value:>24g}  {share.documents:>9.1%}  {share.bytes:>7.1%}")
    _write(Path(options.output), name, shares)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m core sweep-filters",
        description=sweep_filters.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--config", "-c", action="append", required=True, help="a config; several compose")
    parser.add_argument(
        "--transform",
        metavar="NAME.ARGUMENT=FROM:TO:STEPS",
        required=True,
        help="what is varied; a transform that the config does not have comes last, with its defaults",
    )
    parser.add_argument("--documents", type=int, default=2000, help="documents of the sample (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    parser.add_argument("--output", metavar="DIR", default="runs/sweep-filters", help="default: %(default)s")
    parser.add_argument("--data.KEY", metavar="VALUE", help="changes an option of the config, as in `fit`")
    parser.add_argument(
        "--trust", metavar="MODULE", help="let the config import from a module; may be repeated"
    )
    return parser


def parsed(word: str) -> tuple[str, str, list[int] | list[float]]:
    """Returns name, argument and values of `NAME.argument=from:to:steps`; whole numbers where both ends are.

    Raises:
        ConfigError: If it is not of this form, or the values are too many.
    """
    target, _, area = word.partition("=")
    name, _, argument = target.rpartition(".")
    try:
        first, last, count = area.split(":")
        begin, end, steps = float(first), float(last), int(count)
    except ValueError:
        name = ""
    if not name or not argument or not (2 <= steps <= _MOST_VALUES and abs(begin) + abs(end) < float("inf")):
        raise ConfigError(
            f"--transform {word[:200]}: write NAME.ARGUMENT=FROM:TO:STEPS, as in GopherQuality.min_words=0:200:21, with 2 to "
            f"{_MOST_VALUES} steps."
        )
    values = [begin + (end - begin) * step / (steps - 1) for step in range(steps)]
    if all(text.strip().lstrip("+-").isdigit() for text in (first, last)):
        return name, argument, list(dict.fromkeys(map(round, values)))
    return name, argument, [float(f"{value:.12g}") for value in values]


def _swept(options: Any, rest: list[str]) -> tuple[str, list[str], list[Share], tuple[int, int, int]]:
    """Returns what is varied, the transforms before it, the shares, and documents and what is left, in bytes too."""
    from plugins.cli.configuration.mistakes import laid_over
    from plugins.commands.prepare import built, composed_config

    name, argument, values = parsed(options.transform)
    composed, changes = composed_config(options.config, rest)
    section = laid_over(composed.values, composed.positions, changes)[0].get("data") or {}
    listed = [_as_mapping(part) for part in (section.get("init_args") or {}).get("transforms") or []]
    names = [part["class_path"].rpartition(".")[2] for part in listed]
    index = names.index(name) if name in names else len(names)
    varied: dict[str, Any] = listed[index] if index < len(names) else {"class_path": _registered(name, names)}

    def transforms(some: Sequence[Mapping[str, Any]]) -> Any:
        return built(options.config, [*rest, f"--data.transforms={json.dumps(some)}"])[0]

    def stage(value: float) -> Transform:
        arguments = {**(varied.get("init_args") or {}), argument: value}
        try:
            found: Transform = transforms([{**varied, "init_args": arguments}]).transforms[0]
        except ConfigError as error:
            raise ConfigError(f"--transform {options.transform}, value {value:g}:\n{error}") from error
        return found

    stages = [(value, stage(value)) for value in values]  # mistakes first
    if stages[0][1].needs_all_documents:
        raise ConfigError(
            f"--transform {name}: it has to see all documents; a sample does not say what it drops."
        )
    preparation = transforms(listed[:index])
    sample = sampled(preparation.documents, options.documents, options.seed)
    count = sum(map(len, sample))
    before, sample = _after(names, preparation.transforms, sample)
    documents, size = sum(map(len, sample)), _bytes(sample)
    if not size:
        raise ConfigError("Nothing of the sample is left before this transform: try a larger --documents.")
    shares = []
    for value, transform in stages:
        kept = _applied(transform, sample)
        shares.append(Share(value, sum(map(len, kept)) / documents, _bytes(kept) / size))
    return f"{name}.{argument}", before, shares, (count, documents, size)


def _after(
    names: Sequence[str], transforms: Sequence[Transform], sample: list[pyarrow.RecordBatch]
) -> tuple[list[str], list[pyarrow.RecordBatch]]:
    """Returns the names of the transforms that were applied to a sample, and what is left of it."""
    before = []
    for name, transform in zip(names, transforms, strict=False):
        if transform.needs_all_documents:
            print(f"{name} is left out: it has to see all documents.", file=sys.stderr)
        else:
            before.append(name)
            sample = _applied(transform, sample)
    return before, sample


def _as_mapping(part: Any) -> dict[str, Any]:
    return {"class_path": part} if isinstance(part, str) else dict(part)


def _registered(name: str, names: Sequence[str]) -> str:
    """Returns the class path of a registered transform."""
    from core import catalog
    from core.contracts import Transform

    kind = catalog.find(name, "data").load()
    if not (isinstance(kind, type) and issubclass(kind, Transform)):
        near = nearest(name, set(names))
        raise ConfigError(
            f"--transform {name}: it is no transform.{near} The config has {', '.join(names) or 'none'}."
        )
    return f"{kind.__module__}.{kind.__qualname__}"


def sampled(documents: Any, most: int, seed: int) -> list[pyarrow.RecordBatch]:
    """Returns documents of a source that are not blank: an equal number from the beginning of each of some pieces.

    Args:
        documents: A reader, or another source of documents; of that, the first ones.
        most: How many documents at most.
        seed: Decides which pieces, where there are many.

    Raises:
        ConfigError: If there are none.
    """
    import pyarrow

    from core.contracts import Reader
    from toolkit.arrow_columns import strings

    sources: list[Callable[[], Iterator[tuple[str, str, str]]]]
    if isinstance(documents, Reader):
        tasks = documents.tasks()
        random.Random(seed).shuffle(tasks)
        sources = [lambda task=task: _rows(documents, task) for task in tasks]  # type: ignore[misc]
    else:
        name = type(documents).__name__
        sources = [lambda: ((text, name, str(at)) for at, text in enumerate(documents.documents()))]
    found: list[tuple[str, str, str]] = []
    share = -(-most // min(len(sources), _PLACES))
    for source in sources:
        if len(found) >= most:
            break
        rows = (row for row in source() if row[0] and not row[0].isspace())
        found += islice(rows, min(share, most - len(found)))
    if not found:
        raise ConfigError("The source has no documents that can be read.")
    groups = [found[begin : begin + 512] for begin in range(0, len(found), 512)]
    columns = [[strings(column) for column in zip(*group, strict=True)] for group in groups]
    return [pyarrow.record_batch(some, ["text", "source", "id"]) for some in columns]


def _rows(reader: Any, task: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for batch in reader.read(task, _pass_over):
        yield from zip(*(batch[name].to_pylist() for name in ("text", "source", "id")), strict=True)


def _pass_over(*what: Any) -> None:
    """Lets input that cannot be read be no part of the sample."""


def _applied(transform: Transform, sample: Sequence[pyarrow.RecordBatch]) -> list[pyarrow.RecordBatch]:
    kept = (transform.apply(batch, _pass_over) for batch in sample)
    return [batch for batch in kept if len(batch)]


def _bytes(sample: Sequence[pyarrow.RecordBatch]) -> int:
    return sum(len(text.encode()) for batch in sample for text in batch["text"].to_pylist())


def _write(folder: Path, name: str, shares: Sequence[Share]) -> None:
    """Writes table and picture."""
    from core import durable

    lines = [f"{name},documents,bytes", *(f"{value:g},{one:.6f},{two:.6f}" for value, one, two in shares)]
    try:
        durable.write(folder / f"{name}.csv", "\n".join(lines) + "\n")
        durable.write(folder / f"{name}.png", draw_png(name, shares))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}. Choose another --output."
        ) from error
    print(f"\nWritten: {folder}/{name}.csv and {name}.png")


def draw_png(name: str, shares: Sequence[Share]) -> bytes:
    """Returns the shares against the values, as a PNG file."""
    from toolkit import pictures

    figure = pictures.new_figure(6.4, 4)
    axes = figure.subplots()
    pictures.tidy(axes)
    values = [share.value for share in shares]
    for label, column in (("documents", 1), ("bytes", 2)):
        axes.plot(values, [100 * share[column] for share in shares], marker=".", label=label)
    axes.set(xlabel=name, ylabel="kept (%)", ylim=(0, 102))
    axes.legend(frameon=False)
    return pictures.as_png(figure)
