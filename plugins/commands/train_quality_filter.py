"""The command `train-quality-filter`: a classifier of good and bad documents, from examples of both."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser

if TYPE_CHECKING:
    import numpy as np

    from toolkit.hashed_ngrams import HashedNGrams

_LEAST = 10
"""Documents of each kind, for training and held out, without which figures mean nothing."""


@technique(
    paper="DataComp-LM, arXiv:2406.11794, section 4.4, with examples of both kinds; hashing of n-grams as in fastText, "
    "arXiv:1607.01759; calibration: Guo et al., arXiv:1706.04599, equation 3"
)
def train_quality_filter(arguments: list[str]) -> int:
    """Trains a quality filter on examples of good and of bad documents, for the transform QualityClassifier.

    A logistic regression on hashed word n-grams, with an L2 penalty. A tenth of the documents is held out, by a hash of
    their text, and measured: accuracy, area under the ROC curve, and calibration error (0 is best).

    Example:
        python -m core train-quality-filter --good books --bad 'web/*.jsonl' --output quality.safetensors
    """
    from plugins.commands.new_output import check_writable

    options = _parser().parse_args(arguments)
    _check(options)
    check_writable(options.output)
    if Path(options.output).is_dir():
        raise ConfigError(f"--output {options.output} is a folder; name a file, such as quality.safetensors.")
    model = _trained(options)
    try:
        model.write(Path(options.output))
    except OSError as error:
        raise ConfigError(f"{options.output} cannot be written: {error.strerror}.") from error
    print(f"Written: {options.output}. Use it as QualityClassifier with path: {options.output}")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m core train-quality-filter", description=train_quality_filter.__doc__)
    kinds = (("good", "documents to keep"), ("bad", "documents to drop"))
    for name, what in kinds:
        parser.add_argument(
            f"--{name}", metavar="SOURCE", nargs="+", required=True, help=f"{what}: files, folders or globs"
        )
    parser.add_argument("--output", metavar="FILE", required=True, help="where to write; it is replaced")
    parser.add_argument("--reader", metavar="NAME", default="TextDocuments", help="default: %(default)s")
    parser.add_argument(
        "--ngrams", metavar="N", nargs="+", type=int, default=[1, 2], help="words of an n-gram (1 2)"
    )
    parser.add_argument("--buckets", type=int, default=1 << 20, help="a power of two (%(default)s)")
    parser.add_argument(
        "--characters", type=int, default=50_000, help="of each document that count (%(default)s)"
    )
    parser.add_argument("--l2", type=float, default=1e-5, help="weight of the penalty (%(default)s)")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the documents (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is held out (%(default)s)")
    return parser


def _check(options: Any) -> None:
    """Raises a ConfigError where a number is out of range."""
    if not 0 < options.l2 < float("inf"):
        raise ConfigError(f"--l2 is {options.l2}; it is above 0, such as 1e-5.")
    if not 0 < options.held_out < 1:
        raise ConfigError(f"--held-out is {options.held_out}; it is a share between 0 and 1, such as 0.1.")


def _trained(options: Any) -> Any:
    """Returns the trained model; prints its figures."""
    import numpy as np

    from plugins.commands.logistic_regression import Rows, fit, sigmoid
    from toolkit.hashed_ngrams import HashedNGrams
    from toolkit.quality_model import QualityModel

    ngrams = HashedNGrams(tuple(options.ngrams), options.buckets, options.characters)
    rows, labels, held = _examples(options, ngrams)
    training = Rows.of(row for row, out in zip(rows, held, strict=True) if not out)
    other = Rows.of(row for row, out in zip(rows, held, strict=True) if out)
    del rows
    used, columns = np.unique(training.columns, return_inverse=True)  # all other weights are 0
    print(f"{(~held).sum():,} documents, {len(used):,} of {ngrams.buckets:,} buckets ...", file=sys.stderr)
    found, bias, steps = fit(training._replace(columns=columns), labels[~held], len(used), options.l2)
    weights = np.zeros(ngrams.buckets, np.float32)
    weights[used] = found
    scores = sigmoid(other.times(weights) + bias)
    figures = _figures(scores, labels, held) | {"l2": options.l2, "steps": steps, "seed": options.seed}
    return QualityModel(ngrams, weights, bias, figures)


def _examples(
    options: Any, ngrams: HashedNGrams
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, np.ndarray]:
    """Returns the rows of all documents that have a word, whether each is good, and whether it is held out."""
    import numpy as np

    rows, labels, held = [], [], []
    for good, sources in ((True, options.good), (False, options.bad)):
        for text in _documents(options.reader, sources):
            columns, values = ngrams.row(text)
            if len(columns):
                rows.append((columns.astype(np.int32), values.astype(np.float32)))
                labels.append(good)
                held.append(held_out(text, options.held_out, options.seed))
    for good, kind in ((True, "good"), (False, "bad")):
        counts = [
            sum(one == good and out == which for one, out in zip(labels, held, strict=True))
            for which in (0, 1)
        ]
        if min(counts) < _LEAST:
            raise ConfigError(
                f"--{kind}: {counts[0]} documents to train on and {counts[1]} held out; {_LEAST} of each is the least. "
                "Give more documents, or\nanother --held-out. A .txt file is one document, each line of a .jsonl file is one."
            )
    return rows, np.array(labels), np.array(held)


def _documents(reader: str, sources: Sequence[str]) -> Iterator[str]:
    """Yields the documents of the sources, in their order."""
    from core import catalog
    from core.contracts import DocumentSource

    kind = catalog.find(reader, "data").load()
    if not (isinstance(kind, type) and issubclass(kind, DocumentSource)):
        raise ConfigError(f"--reader {reader}: it does not read documents. TextDocuments does.")
    for source in sources:
        yield from kind(source=source).documents()  # type: ignore[call-arg]


def held_out(text: str, share: float, seed: int) -> bool:
    """Returns whether a document is held out: by its text, so that copies of it are all on one side."""
    digest = hashlib.blake2b(
        text.encode("utf-8", "surrogatepass"), digest_size=8, key=str(seed).encode()[:64]
    )
    return int.from_bytes(digest.digest(), "little") < share * 2**64


def _figures(scores: np.ndarray, labels: np.ndarray, held: np.ndarray) -> dict[str, float]:
    """Returns and prints what was measured on the documents that were held out."""
    from plugins.commands.logistic_regression import accuracy, area_under_curve, calibration_error

    truth = labels[held]
    figures = {
        "good_documents": int(labels.sum()),
        "bad_documents": int((~labels).sum()),
        "held_out_documents": len(truth),
        "accuracy": accuracy(scores, truth),
        "area_under_curve": area_under_curve(scores, truth),
        "calibration_error": calibration_error(scores, truth),
    }
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        print(f"{name.replace('_', ' '):<20} {shown:>10}")
    return figures
