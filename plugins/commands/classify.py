"""The command `classify`: finds the class or number of each text of a file, with a checkpoint that has learnt them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, take_option, trusting
from plugins.commands.generate_options import add_model_options
from plugins.commands.new_output import check_writable

if TYPE_CHECKING:
    from plugins.checkpoints.stored_objective import StoredObjective


@technique(paper="BERT, arXiv:1810.04805, section 4; GPT, Radford et al. 2018, section 3.2")
def classify(arguments: list[str]) -> int:
    """Finds class or number of each text of a .jsonl file, with a checkpoint of SequenceClassification and its like.

    The fields of the texts are those of the run, and labels are not needed. Each record is written as it is, as a JSON line,
    with `prediction` and `probability`, of its class; of words with lists of both, and null where a word is cut or has no
    token. Texts that are longer than the network takes are cut.

    Example:
        python -m core classify --ckpt_path runs/reviews texts.jsonl --output classified.jsonl
    """
    trusted, arguments = take_option(arguments)
    options = _options(arguments)
    from plugins.checkpoints.finding import resolve
    from plugins.checkpoints.stored_objective import load_objective
    from plugins.commands.generate_network import move
    from toolkit.class_labels import Predicts

    path = resolve(options.ckpt_path, Path(options.root))
    with trusting(Trust(trusted)):
        stored = load_objective(path)
    if not isinstance(stored.objective, Predicts) or "texts" not in stored.data:
        raise ConfigError(
            f"{path} is of a run with {type(stored.objective).__name__}, which learns no labels of texts.\nTrain one with "
            "--model.objective=SequenceClassification and --data=LabelledDataModule."
        )
    move(stored.network, options.device, options.dtype)
    move(stored.objective, options.device, options.dtype)
    lines = _lines(stored, options)
    if options.output is None:
        for line in lines:
            sys.stdout.write(line)
        return 0
    from core import durable

    try:
        with (
            durable.replacing(Path(options.output)) as temporary,
            open(temporary, "w", encoding="utf-8") as file,
        ):
            file.writelines(lines)
    except OSError as error:
        raise ConfigError(f"--output {options.output}: {durable.write_error(error)}") from error
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m core classify", description=classify.__doc__)
    parser.add_argument("texts", metavar="TEXTS.jsonl", help="records with texts, one a line")
    add_model_options(parser, quantize=False)
    parser.add_argument(
        "--output", metavar="FILE", help="write there, in place of what it has; default: to the terminal"
    )
    parser.add_argument("--batch_size", type=int, default=32, help="texts computed at once")
    options = parser.parse_args(arguments)
    if options.batch_size < 1:
        raise ConfigError(f"--batch_size {options.batch_size} must be at least 1.")
    if options.output is not None:
        check_writable(options.output)
    return options


def _lines(stored: StoredObjective, options: argparse.Namespace) -> Iterator[str]:
    """Yields the JSON line of each record."""
    from toolkit.label_predictions import LabelPredictions
    from toolkit.record_lines import records

    given = stored.network, stored.objective, stored.tokenizer_json, stored.end_of_text_id
    predictions = LabelPredictions(*given, stored.data["texts"])  # type: ignore[arg-type]
    done, placed = 0, records(options.texts)
    while chosen := list(islice(placed, options.batch_size)):
        for (_, record), found in zip(chosen, predictions.predict(chosen), strict=True):
            yield json.dumps(record | found, ensure_ascii=False) + "\n"
        done += len(chosen)
    cut = f", of which {predictions.cut:,} are cut to {predictions.most} tokens" if predictions.cut else ""
    print(f"# {done:,} texts{cut}", file=sys.stderr)
