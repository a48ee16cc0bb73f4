"""The command `classify`: finds the class or number of each text of a file, with a checkpoint that has learnt them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, take_option, trusting
from plugins.commands.generate_options import add_model_options
from plugins.commands.new_output import check_writable

if TYPE_CHECKING:
    from plugins.checkpoints.stored_objective import StoredObjective

MOST_LINE = 1 << 26
"""Bytes of the longest line that is read."""


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
    lines = _Classifier(stored, options).lines(_records(options.texts))
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


def _records(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields place and fields of each line that is not empty."""
    from toolkit.bounded import parse_json, read_error

    try:
        if Path(name).exists() and not Path(name).is_file():
            raise ConfigError(f"{name}: it is no file.")
        with open(name, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
                if len(line) > MOST_LINE:
                    raise ConfigError(f"{name}:{number}: the line has more than {MOST_LINE >> 20} MiB.")
                if not line.strip():
                    continue
                try:
                    record = parse_json(line)
                except ValueError as error:
                    raise ConfigError(f"{name}:{number}: it is no JSON: {str(error)[:200]}") from error
                if not isinstance(record, dict):
                    raise ConfigError(f"{name}:{number}: it is no object with the fields of a record.")
                yield f"{name}:{number}", record
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {read_error(error)}") from error


class _Classifier:
    """Reads texts as the run's data module did, and asks the objective for what they are.

    Args:
        stored: Network and objective.
        options: Of the command.
    """

    def __init__(self, stored: StoredObjective, options: argparse.Namespace) -> None:
        from toolkit.labelled_texts import LabelledTexts

        self.stored, self.options, self.form = stored, options, stored.data["texts"]
        self.most = stored.network.max_sequence_length
        end = 0 if stored.end_of_text_id is None else stored.end_of_text_id
        ways = self.form["position"], self.form["separator"]
        self.texts = LabelledTexts(stored.tokenizer_json, end, *ways)

    def lines(self, records: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[str]:
        """Yields the JSON line of each record."""
        done = cut = 0
        while chosen := list(islice(records, self.options.batch_size)):
            encoded = self.texts.encode([self._text(*one) for one in chosen])
            rows = [self._row(*one) for one in encoded]
            cut += sum(self.most is not None and len(ids) > self.most for ids, _ in encoded)
            found = iter(self.stored.objective.predict(self.stored.network, self._batch(rows)))  # type: ignore[operator]
            for (_, record), (_, places) in zip(chosen, rows, strict=True):
                each = [None if place is None else next(found) for place in places]
                yield json.dumps(record | self._told(each), ensure_ascii=False) + "\n"
            done += len(chosen)
        print(
            f"# {done:,} texts" + (f", of which {cut:,} are cut to {self.most} tokens" if cut else ""),
            file=sys.stderr,
        )

    def _text(self, place: str, record: Mapping[str, Any]) -> Any:
        """Returns the text, pair or list of words of a record."""
        names = [self.form[key] for key in ("text", "pair", "before") if self.form[key]]
        words = self.form["task"] == "words"
        for name in names:
            value = record.get(name)
            if name not in record:
                hint = nearest(name, set(record))
                raise ConfigError(
                    f'{place}: there is no field "{name}", which the run read texts from.{hint}\nIts fields: {", ".join(record)[:300]}.'
                )
            right = (
                isinstance(value, list) and all(isinstance(word, str) for word in value)
                if words
                else isinstance(value, str)
            )
            if not right:
                raise ConfigError(
                    f'{place}: the field "{name}" is no {"list of words" if words else "text"}.'
                )
        text = record[self.form["text"]]
        if self.form["before"]:
            text = f"{record[self.form['before']]}: {text}"
        return (text, record[self.form["pair"]]) if self.form["pair"] else text

    def _row(self, ids: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[int | None]]:
        """Returns ids and places of labels that fit into the network: the first tokens, and the last one."""
        if self.most is None or len(ids) <= self.most:
            return list(ids), list(places)
        last = self.most - 1
        if self.form["task"] == "words":
            return [*ids[:last], ids[-1]], [place if place < last else None for place in places]
        return [*ids[:last], ids[-1]], [min(place, last) for place in places]

    def _batch(self, rows: Sequence[tuple[list[int], list[int | None]]]) -> dict[str, Any]:
        import torch

        from core.contracts import IGNORED_LABEL

        shape = len(rows), max(1, max(len(ids) for ids, _ in rows))
        ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        labels, documents = torch.full(shape, IGNORED_LABEL), torch.full(shape, -1)
        for row, (own, places) in enumerate(rows):
            ids[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
            positions[row, : len(own)] = torch.arange(len(own))
            documents[row, : len(own)] = 0
            labels[row, [place for place in places if place is not None]] = 0
        batch = {"input_ids": ids, "labels": labels, "document_ids": documents, "position_ids": positions}
        return {name: value.to(self.options.device) for name, value in batch.items()}

    def _told(self, found: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
        """Returns what is written of a record, given what was found at each of its labels."""
        if self.form["task"] != "words":
            return dict(found[0] or {}) if found else {"prediction": None}
        return {
            name: [None if one is None else one[name] for one in found]
            for name in ("prediction", "probability")
        }
