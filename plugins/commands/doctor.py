"""The command `doctor`: what was wrong with a run, from its folder."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.commands.run_folders import require_run
from toolkit.diagnosis import Case, diagnose, read_config, read_history, write_findings, write_remedy


@technique(paper="the rules of TrainingDoctor, on the files of a run")
def doctor(arguments: list[str]) -> int:
    """Says what is wrong with a run, from its metrics.csv and config.yaml: causes, evidence, what to switch on.

    The rules are those of the callback TrainingDoctor. They know the more, the more the run logged: with TrainingDoctor and the
    monitors in it all of them apply. Remedies are written to RUN_DIR/doctor/remedy-CAUSE.yaml, for `--config`,
    and the findings to RUN_DIR/doctor/findings.jsonl, for `watch`.

    Example:
        python -m core doctor runs/quickstart
        python -m core fit --config quickstart --config runs/quickstart/doctor/remedy-rate_too_high.yaml
    """
    parser = Parser(prog="python -m core doctor", description=doctor.__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run folder with a metrics.csv")
    parser.add_argument(
        "--least_confidence", type=float, default=0.6, help="findings below are left out, 0 to 1: %(default)s"
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.least_confidence <= 1:
        raise ConfigError(f"--least_confidence {options.least_confidence:g} must be from 0 to 1.")
    folder = Path(options.run_dir)
    require_run(folder)
    case = Case(read_history(folder / "metrics.csv"), read_config(folder))
    if not case.history.names():
        raise ConfigError(
            f"{folder}/metrics.csv has no figures: the run has not reached its first logged step, or ended before it."
        )
    found = [finding for finding in diagnose(case) if finding.confidence >= options.least_confidence]
    if found or (folder / "doctor").is_dir():  # what `watch` shows of an earlier look
        write_findings(found, folder)
    for finding in found:
        print(finding.line())
        if finding.remedy:
            print(f"  --config {write_remedy(finding, folder)}")
    if not found:
        print(f"Nothing is wrong that {len(case.history.names())} figures over {case.step} steps would show.")
    return 0
