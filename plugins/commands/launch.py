"""The command `launch`: one run on a cluster, or a sweep of them, from a template for torchrun, SLURM or Kubernetes."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.cli.configuration.arguments import last, without
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.config_files import configs_folder
from plugins.commands.launch_sweep import FOLDER, Trial, as_array, as_one_run, in_turn, trials
from plugins.commands.plugins_terminal import write

SUBMIT = {"torchrun": ["bash"], "slurm": ["sbatch"], "kubernetes": ["kubectl", "apply", "-f"]}
"""Cluster -> the command that takes the script."""

OF_A_SWEEP = {
    "torchrun": ("trials", "trial", "next_trial"),
    "slurm": ("array", "trials", "trial"),
    "kubernetes": ("name",),
}
"""Cluster -> names that a template needs for the runs of a sweep."""

COMMANDS = ("fit", "validate", "test", "predict")
"""What divides its work among the processes of a launcher; any other command would do all of it in each of them."""

PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
"""A number from 0 to 65,535."""

PATTERNS = {
    "name": (r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "small letters, digits and dashes"),
    "time": (r"\d{1,9}(:\d\d){0,2}|\d{1,5}-\d\d?(:\d\d){0,2}", "minutes, HH:MM:SS or DAYS-HH:MM:SS"),
    "mem": (r"\d{1,12}[KMGT]?", "a number with K, M, G or T, such as 480G; without a letter megabytes"),
    "partition": (r"\w[\w.-]*(,\w[\w.-]*)*", "the name of a partition, or several with commas"),
    "account": (r"\w[\w.@-]*", "the name of an account"),
    "image": (r"\w[\w./:@-]*", "the name of a container image"),
    "volume": (
        r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
        "the name of a persistent volume claim",
    ),
    "rdzv_endpoint": (
        rf"(\w[\w.-]*|\[[\da-fA-F:]+\]):{PORT}",
        "HOST:PORT, with a port from 0 to 65535",
    ),
}
"""Option -> what it may look like, and that in words: it is put into a script, where none of it means anything else."""

LIMITS = {
    "nodes": (1, 65_536),
    "least_nodes": (1, 65_536),
    "devices": (1, 1_024),
    "max_restarts": (0, 2**31 - 1),
    "cpus_per_task": (1, 65_536),
}
"""Option -> the least and the largest number."""

DEFAULTS = {"time": "24:00:00", "image": "leyden:latest", "volume": "workspace", "max_restarts": 3}
"""Values of options that are not given. A template's line with an option that has neither is left out."""

ENDPOINT = "${RDZV_ENDPOINT:?set it to HOST:PORT of one of the machines, the same on all of them}"
"""The rendezvous of several machines if none was given: bash ends with that message."""


@technique(paper="torchrun's elastic agents; SLURM's --requeue and --signal; Kubeflow's PyTorchJob v1")
def launch(arguments: list[str]) -> int:
    """Starts a run on a cluster: writes a script from a template, shows it (--dry-run) or submits it.

    After the options comes the command, as for `python -m core`: fit, validate, test or predict. It is checked
    first, as `check --offline` does, unless --no-check says that it can be checked only on the cluster. A job that
    is preempted, or loses a worker or a machine, continues from its last checkpoint.

    Templates are in configs/cluster. One of your own is given by its path and may use the same names in double
    braces; a line that names an option without a value is left out. With lines of #SBATCH it goes to sbatch, as
    .yaml.template to kubectl, else to bash.

    Example:
        python -m core launch --cluster slurm --nodes 4 --devices 8 --dry-run fit --config quickstart
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    _check_order(parser, options)
    command = _command(options)
    template = _template(options.cluster)
    text = _text(template)
    kind = _kind(template, text)
    _check_options(options, kind, text, template.name)
    found: list[Trial] = []
    if options.sweep:
        command, found = trials(Path(options.sweep), command, f"{options.nodes} x {options.devices}")
    filled = _filled(options, command, kind, found, template, text)
    if not options.no_check:
        for words in [trial.words for trial in found] or [[]]:
            _check_run(options, [*command, *words])
    if options.dry_run:
        print(filled, end="")
        return 0
    if options.nodes > 1 and ENDPOINT in filled and "RDZV_ENDPOINT" not in os.environ:
        raise ConfigError(
            f"launch: {options.nodes} machines need a rendezvous: give --rdzv-endpoint=HOST:PORT, one of them and "
            "a free port, here and on each of the others.\nWithout it each would train the full run by itself."
        )
    path = Path(options.output or f"{options.name}{template.with_suffix('').suffix}")
    write(path, filled)
    if found:
        together = shlex.quote(str(found[0].folder.parent))
        where = ", on the volume" if kind == "kubernetes" else ""
        print(f"{len(found)} runs. When they are done{where}: python -m core compare {together}/*")
    return _submit(kind, path)


def _parser() -> Parser:
    parser = Parser(prog="python -m core launch", description=launch.__doc__)
    parser.add_argument("--cluster", help="torchrun, slurm, kubernetes, or a template's path")
    parser.add_argument("--nodes", type=int, default=1, help="machines (%(default)s)")
    parser.add_argument("--least-nodes", type=int, help="continue with as few as these (default: --nodes)")
    parser.add_argument("--devices", type=int, default=8, help="processes on each, one a GPU (%(default)s)")
    parser.add_argument("--max-restarts", type=int, help="of failed workers (3)")
    parser.add_argument("--name", default="leyden", help="the job's (%(default)s)")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="torchrun: where several machines meet")
    parser.add_argument("--time", help="SLURM: the limit (24:00:00)")
    parser.add_argument("--cpus-per-task", type=int, help="SLURM: cores of each process")
    parser.add_argument("--mem", help="SLURM: memory of each machine, such as 480G; 0: all of it")
    parser.add_argument("--partition", help="SLURM: the partition, or several with commas")
    parser.add_argument("--account", help="SLURM: who is charged")
    parser.add_argument("--image", help="Kubernetes: the container (leyden:latest)")
    parser.add_argument("--volume", help="Kubernetes: the shared volume (workspace)")
    parser.add_argument(
        "--sweep", metavar="FILE", help="YAML of options and their values, a run for each combination"
    )
    parser.add_argument("--output", metavar="FILE", help="where the script goes (default: after --name)")
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    parser.add_argument("--no-check", action="store_true", help="do not check the command here")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="fit --config X ...")
    return parser


def _check_order(parser: Parser, options: argparse.Namespace) -> None:
    """Raises a ConfigError if an option of `launch` is missing, or is among those of the command."""
    late = parser.known_options() - {"--help"}
    if found := next((word for word in options.command if word.partition("=")[0] in late), None):
        name = found.partition("=")[0]
        raise ConfigError(
            f"launch: {name} is after the command, whose options follow it. Options of launch come first:\n"
            f"  launch {name} ... {next((word for word in options.command if word != '--'), 'fit')} --config X"
        )
    if options.cluster is None:
        parser.error("the following arguments are required: --cluster")


def _command(options: argparse.Namespace) -> list[str]:
    """Returns the command that a cluster can run, without the `--` before it."""
    words = options.command
    command = words[1:] if words[:1] == ["--"] else list(words)
    if not command or command[0].startswith("-"):
        raise ConfigError(
            "launch: after its options comes a command: launch --cluster slurm ... fit --config X"
        )
    if command[0] == "prepare":
        raise ConfigError(_arrays(options, command))
    if command[0] not in COMMANDS:
        raise ConfigError(
            f"launch: {command[0]!r} cannot be launched.{nearest(command[0], COMMANDS)}\n"
            f"These can: {', '.join(COMMANDS)}. Each process would do all the work of any other command."
        )
    prints = next((word for word in command if re.match(r"(-h|--help|--print_config)(=|$)", word)), None)
    if prints:
        raise ConfigError(
            f"launch: {command[0]} {prints} only prints something. Call `python -m core {command[0]} {prints}` here."
        )
    return command


def _arrays(options: argparse.Namespace, command: list[str]) -> str:
    """Returns how to prepare on a cluster: `prepare` divides its work into tasks that may be done again, and submits them."""
    given = {
        name: getattr(options, name) for name in ("partition", "account", "time", "mem", "cpus_per_task")
    }
    given = {name.replace("_", "-"): str(value) for name, value in given.items() if value is not None}
    words = [*command, "--data.engine=SlurmEngine"]
    if options.nodes > 1:
        words.append(f"--data.engine.jobs={options.nodes}")
    if given:
        words.append(f"--data.engine.options={json.dumps(given)}")
    return (
        "launch: prepare is not started by a launcher: it divides its work into tasks and submits them by itself, as array "
        f"jobs of SLURM.\nCall this on a login node; --dry-run shows the script:\n  python -m core {shlex.join(words)}\n"
        "Without SLURM: --data.engine=RayEngine on several machines, nothing on one, whose cores it then uses."
    )


def _template(cluster: str) -> Path:
    shipped = {path.name.partition(".")[0]: path for path in configs_folder().glob("cluster/*.template")}
    path = shipped.get(cluster, Path(cluster))
    if not os.path.isfile(path):
        hint = nearest(cluster, set(shipped))
        raise ConfigError(
            f"--cluster {cluster[:200]}: there is no such template.{hint} There are {', '.join(sorted(shipped))}."
        )
    return path


def _text(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cluster {template}: this is no template: {error}") from error


def _kind(template: Path, text: str) -> str:
    """Returns what a template is for, one of `SUBMIT`."""
    if re.search(r"^#SBATCH ", text, re.MULTILINE):
        return "slurm"
    return "kubernetes" if template.with_suffix("").suffix == ".yaml" else "torchrun"


def _check_options(options: argparse.Namespace, kind: str, text: str, template: str) -> None:
    """Raises a ConfigError for a value that cannot be put into a script, and for one that would have no effect."""
    places = {
        **{name: (name,) for name in [*PATTERNS, *LIMITS]},
        "least_nodes": ("least_nodes", "nodes_range"),
    }
    for name, names in places.items():
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if name in LIMITS and not LIMITS[name][0] <= value <= LIMITS[name][1]:
            raise ConfigError(f"launch: {option} is {value}, not {LIMITS[name][0]} to {LIMITS[name][1]}.")
        if name in PATTERNS and not re.fullmatch(PATTERNS[name][0], value, re.ASCII):
            raise ConfigError(f"launch: {option} is {value!r}, not {PATTERNS[name][1]}.")
        if name not in ("name", "nodes", "devices") and not any(
            f"{{{{{place}}}}}" in text for place in names
        ):
            raise ConfigError(f"launch: {option} would have no effect: {template} has no {{{{{name}}}}}.")
    missing = [name for name in OF_A_SWEEP[kind] if f"{{{{{name}}}}}" not in text]
    if options.sweep and missing:
        raise ConfigError(
            f"launch: {template} cannot run a sweep: it lacks {{{{{missing[0]}}}}}. Take over the lines with "
            f"{', '.join(OF_A_SWEEP[kind])} from {kind}'s template in configs/cluster."
        )
    if options.sweep and kind == "torchrun" and options.nodes > 1:
        raise ConfigError(
            "launch: with torchrun a sweep trains its runs one after the other on one machine: leave --nodes out, or take "
            "--cluster slurm or kubernetes."
        )
    if (options.least_nodes or 1) > options.nodes:
        raise ConfigError(f"launch: --least-nodes is {options.least_nodes}, --nodes only {options.nodes}.")
    # a PyTorchJob's name begins that of its pods, which is a label of RFC 1035
    longest = 63 - len(f"-worker-{options.nodes - 1}") - (len("-01234567") if options.sweep else 0)
    if kind == "kubernetes" and not (options.name[0].isalpha() and len(options.name) <= longest):
        raise ConfigError(
            f"launch: --name is {options.name!r}: in Kubernetes it begins with a letter and has at most {longest} "
            "characters, because the names of the pods begin with it."
        )


def _sized(options: argparse.Namespace, command: list[str], sizes: Mapping[str, int | str]) -> list[str]:
    """Returns the command with the numbers of its processes.

    Raises:
        ConfigError: If it says others: they would be refused on the cluster.
    """
    started = {"devices": options.devices, "num_nodes": options.nodes}
    result = list(command)
    for key, number in started.items():
        written = last(command, f"trainer.{key}")
        if written is None and key in sizes:
            result.append(f"--trainer.{key}={sizes[key]}")
        elif written is not None and written not in (str(number), "auto" if key == "devices" else ""):
            option = {"devices": "devices", "num_nodes": "nodes"}[key]
            raise ConfigError(
                f"launch: --trainer.{key}={written} is not what is started, --{option}={number}. Give the number to "
                f"launch, as --{option}, and leave --trainer.{key} out."
            )
    return result


def _values(options: argparse.Namespace, command: list[str], kind: str) -> dict[str, str | None]:
    """Returns the values of the names in a template; None for an option that is not given."""
    least = options.least_nodes or options.nodes
    # torchrun says how many it has started, also after it lost some
    sizes = (
        {"devices": options.devices, "num_nodes": options.nodes} if kind == "slurm" else {"devices": "auto"}
    )
    words = _sized(options, command, sizes)
    given = {name: getattr(options, name) for name in [*PATTERNS, *LIMITS]}
    given = {name: DEFAULTS.get(name) if value is None else value for name, value in given.items()}
    return {
        **{name: None if value is None else str(value) for name, value in given.items()},
        "least_nodes": str(least),
        "nodes_range": f"{least}:{options.nodes}" if least < options.nodes else str(options.nodes),
        # port 0: a free one, so that two runs on one machine do not collide
        "rdzv_endpoint": options.rdzv_endpoint or ("localhost:0" if options.nodes == 1 else ENDPOINT),
        "command": shlex.join(words),
        "command_as_list": as_container_arguments(words),
    }


def _filled(
    options: argparse.Namespace, command: list[str], kind: str, found: list[Trial], template: Path, text: str
) -> str:
    """Returns the script of a run, or of the trials of a sweep."""
    values = _values(options, command, kind)
    for trial in found:
        _sized(options, [*command, *trial.words], {})  # raises for numbers of processes of its own
    if not found or kind != "kubernetes":
        ways = {"slurm": as_array, "torchrun": in_turn}
        more = ways[kind](found) if found else as_one_run()
        return fill_template(text, values | more, str(template))
    jobs = []
    for trial in found:
        values = _values(options, [*command, *trial.words, f"--{FOLDER}={trial.folder}"], kind)
        values["name"] = f"{options.name}-{trial.digest}"
        jobs.append(fill_template(text, values | as_one_run(), str(template)).rstrip("\n") + "\n")
    return "---\n".join(jobs)


def as_container_arguments(words: list[str]) -> str:
    """Returns words as a YAML list on one line, of which Kubernetes makes these words again.

    It replaces $(NAME) by a variable of the container, and $$ by $.
    """
    escaped = [word.replace("$", "$$") for word in words]
    # not json.dumps: it writes a character beyond 16 bits as two escapes, which YAML takes for two characters
    return yaml.safe_dump(escaped, default_style='"', default_flow_style=True, width=float("inf")).strip()


def fill_template(template: str, values: Mapping[str, str | None], where: str) -> str:
    """Replaces each `{{name}}` of a template; a line with a name whose value is None is left out.

    Raises:
        ConfigError: If it has a name that is not known.
    """
    lines = []
    for number, line in enumerate(template.splitlines(keepends=True), 1):
        names = re.findall(r"\{\{(\w+)\}\}", line)
        for name in names:
            if name not in values:
                hint = nearest(name, set(values))
                raise ConfigError(f"{where}:{number}: there is no {{{{{name}}}}}.{hint}")
        if all(values[name] is not None for name in names):
            lines.append(re.sub(r"\{\{(\w+)\}\}", lambda found: str(values[found[1]]), line))
    return "".join(lines)


def _check_run(options: argparse.Namespace, command: list[str]) -> None:
    """Checks the run: a mistake is cheaper here than in a cluster's queue."""
    from plugins.cli.run_commands import (
        build,  # imports torch: after everything that can be refused without it
    )

    name, *words = without(without(command, "trainer.devices"), "trainer.num_nodes")
    sizes = [f"--trainer.devices={options.devices}", f"--trainer.num_nodes={options.nodes}"]
    with redirect_stdout(StringIO()):
        build(name, [*words, *sizes, "--trainer.accelerator=cpu"], offline=True)


def _submit(kind: str, path: Path) -> int:
    # ./ before a name that would be an option
    command = [*SUBMIT[kind], f"./{path}" if str(path).startswith("-") else str(path)]
    print(f"+ {shlex.join(command)}", flush=True)
    try:
        process = subprocess.Popen(command)
    except OSError:
        raise ConfigError(
            f"{command[0]} is not installed here, and nothing was submitted. The script is {path}: "
            f"take it to where `{shlex.join(command)}` works."
        ) from None
    code = _wait(process)
    return code if code >= 0 else 128 - code  # as a shell says that a signal ended it


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit code of a program, to which signals to this process are passed on."""

    def pass_on(number: int, frame: Any) -> None:
        process.send_signal(number)

    # a terminal sends Ctrl-C to both
    ways: dict[int, Any] = {signal.SIGTERM: pass_on, signal.SIGHUP: pass_on, signal.SIGINT: signal.SIG_IGN}
    before = {number: signal.signal(number, way) for number, way in ways.items()}
    try:
        return process.wait()
    finally:
        for number, way in before.items():
            signal.signal(number, way)
