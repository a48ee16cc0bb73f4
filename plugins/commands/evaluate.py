"""The command `evaluate`: the evaluations of the callback Evaluate, for a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.arguments import option_values
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, beside, take_option, trusting
from plugins.commands.generate_options import add_model_options
from plugins.commands.new_output import check_writable

if TYPE_CHECKING:
    from toolkit.evaluation import EvaluatedModel, Evaluation
    from toolkit.evaluation_results import SetResult

CALLBACK = "callbacks.evaluate.Evaluate"
_PLACE = ("trainer", "callbacks", "Evaluate", "evaluations")


@technique(paper="intervals: Efron 1979, Koehn 2004; bits per byte: The Pile, arXiv:2101.00027")
def evaluate(arguments: list[str]) -> int:
    """Evaluates a checkpoint and writes a report, results as JSON and CSV, and what was measured of each item.

    The evaluations are those of the callback Evaluate: in the configs that are given, else in the checkpoint's own
    configuration. Results go into the folder `evaluation` of the checkpoint's run, one folder for each step, beside those that the
    step has already; or below --output.

    Options of the Trainer evaluate on several processes, which share the items, as a run of this strategy does: those of the
    checkpoint's run count where they are not given, and weights are computed in float32 unless --trainer.precision says otherwise.

    Example:
        python -m core evaluate --ckpt_path runs/quickstart --config evaluation.yaml
        python -m core evaluate --ckpt_path model.ckpt --config techniques/perplexity --output results
        python -m core evaluate --ckpt_path runs/quickstart --trainer.devices=2 --trainer.strategy=FSDP
    """
    trusted, arguments = take_option(arguments)
    options, words = _options(arguments)
    from plugins.checkpoints.checkpoint import step_recorded, stored_config
    from plugins.checkpoints.finding import resolve
    from plugins.checkpoints.remote_copies import shown
    from plugins.cli.configuration.config_files import compose, find_config
    from toolkit.evaluation_report import write_report
    from toolkit.evaluation_results import (
        RESULTS,
        Results,
        check_names,
        completed,
        digest,
        read_results,
        write_results,
    )

    path = resolve(options.ckpt_path, Path(options.root))
    values = compose(options.config).values if options.config else stored_config(path)
    folder = Path(options.output) if options.output else _folder(path)
    check_writable(str(folder / RESULTS))
    read_results(folder)  # what is damaged shows before hours of work
    whole = Trust(trusted, beside(map(find_config, options.config), [values], arguments))
    with trusting(whole):
        evaluations = _evaluations(values, path, options)
        check_names(evaluations, "Evaluate")
        found, tokenizer, writes = _measured(evaluations, path, options, words)
    if not writes:
        return 0
    results = Results(step_recorded(path) or 0, None, digest(tokenizer), shown(path), found)
    every = results if options.output else completed(results, folder)
    place = write_results(every, folder)
    write_report(folder, every)
    _print(results)
    print(f"\nWritten: {folder}/report.md, report.html, results.csv and {place.name}/")
    return 0


def _options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the words of those of the Trainer."""
    parser = Parser(prog="python -m core evaluate", description=evaluate.__doc__)
    add_model_options(parser, quantize=False)
    parser.add_argument(
        "--config", metavar="FILE", action="append", default=[], help="with Evaluate; may be repeated"
    )
    parser.add_argument("--output", metavar="DIR", help="default: the folder `evaluation` of the run")
    parser.add_argument("--batch_size", type=int, default=16, help="rows computed at once")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="of several; may be repeated"
    )
    found = [at for at in option_values(arguments) if at[2].startswith("trainer.")]
    which = {n for first, count, *_ in found for n in range(first, first + count)}
    options = parser.parse_args([word for n, word in enumerate(arguments) if n not in which])
    if options.batch_size < 1:
        raise ConfigError(f"--batch_size {options.batch_size} must be at least 1.")
    for name in ("device", "dtype"):
        if found and getattr(options, name) != parser.get_default(name):
            raise ConfigError(
                f"--{name} is of one process: with --trainer options give --trainer.accelerator and --trainer.precision."
            )
    return options, [arguments[n] for n in sorted(which)]


def _folder(path: Path) -> Path:
    """Returns the folder of evaluations of the run that a checkpoint is of."""
    from plugins.checkpoints.remote_copies import is_copy, run_of, shown
    from toolkit.evaluation_results import FOLDER

    if (known := run_of(path)) is not None:
        return known / FOLDER
    if is_copy(path):
        raise ConfigError(
            f"--ckpt_path {shown(path)}: results are written to a folder of this machine: give --output DIR."
        )
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return run / FOLDER


def _evaluations(values: Mapping[str, Any], path: Path, options: argparse.Namespace) -> dict[str, Evaluation]:
    """Returns the evaluations of a configuration by name.

    Raises:
        ConfigError: If there are none, or one cannot be built.
    """
    from core.errors import nearest
    from plugins.checkpoints.stored_network import build
    from plugins.cli.configuration.class_paths import qualify
    from toolkit.evaluation import Evaluation

    trainer = values.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, Mapping) else None
    given = callbacks if isinstance(callbacks, list) else []
    qualify(given)
    own = [one for one in given if isinstance(one, dict) and one.get("class_path") == CALLBACK]
    arguments = own[-1].get("init_args") if own else None
    sets = arguments.get("evaluations") if isinstance(arguments, Mapping) else None
    if not isinstance(sets, Mapping) or not sets:
        where = " ".join(options.config) or f"The configuration of {path}"
        raise ConfigError(
            f"{where}: there are no evaluations. Give a --config with the callback Evaluate, such as techniques/perplexity:\n"
            "trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {books: {class_path: Perplexity, ...}}}}]}"
        )
    for name in options.only:
        if name not in sets:
            raise ConfigError(f"--only {name}: there is no such evaluation.{nearest(name, list(sets))}")
    chosen = {name: one for name, one in sets.items() if not options.only or name in options.only}
    return {
        str(name): build(Evaluation, one, (*_PLACE, str(name)))  # type: ignore[type-abstract]
        for name, one in chosen.items()
    }


def _model(path: Path, options: argparse.Namespace) -> EvaluatedModel:
    """Returns the network of a checkpoint; with its objective where that says what is in a text."""
    from plugins.checkpoints.matching import stored_data
    from plugins.checkpoints.stored_objective import load_objective
    from plugins.commands.chat_prompts import find_template
    from plugins.commands.generate_network import load, move
    from toolkit.evaluation import EvaluatedModel

    data = stored_data(path)
    if "texts" in data:
        stored = load_objective(path)
        for part in (stored.network, stored.objective):
            move(part, options.device, options.dtype)
        tokenizer, end = stored.tokenizer_json, stored.end_of_text_id
        return EvaluatedModel(
            stored.network, tokenizer, end, (), options.batch_size, stored.objective, stored.data
        )
    model = load(path)
    move(model.network, options.device, options.dtype)
    own = model.network, data["tokenizer"], model.end, model.stop_ids, options.batch_size
    return EvaluatedModel(*own, None, data, find_template(model, None))


def _measured(
    evaluations: Mapping[str, Evaluation], path: Path, options: argparse.Namespace, words: list[str]
) -> tuple[dict[str, SetResult], str, bool]:
    """Returns results by name, the tokenizer, and whether this process writes them."""
    import torch

    from toolkit.evaluation_results import check_items
    from toolkit.evaluation_results import evaluate as measure

    if words:
        from plugins.commands.evaluate_ranks import measured

        return measured(evaluations, path, words, options.batch_size)
    model = _model(path, options)
    check_items(evaluations, model)
    found = {}
    with torch.no_grad():
        for name, one in evaluations.items():
            print(f"# {name} ({type(one).__name__})", file=sys.stderr)
            found[name] = measure(name, one, model)
    return found, model.tokenizer_json, True


def _print(results: Any) -> None:
    from plugins.commands.plugins_terminal import print_table
    from toolkit.evaluation_report import figure_rows

    print_table([tuple(row) for row in figure_rows(results.sets)])
