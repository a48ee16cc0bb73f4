"""The command `launch`: one run on a cluster, from a template for torchrun, SLURM or Kubernetes."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from core.configuration.command_parser import Parser
from core.configuration.config_files import configs_folder
from core.errors import ConfigError, nearest
from core.files import durable
from core.technique import technique

SUBMIT = {"torchrun": ["bash"], "slurm": ["sbatch"], "kubernetes": ["kubectl", "apply", "-f"]}
"""Cluster -> the command that takes the script."""

PATTERNS = {
    "name": (r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "small letters, digits and dashes"),
    "time": (r"(\d+-)?\d+(:\d\d){0,2}", "minutes, HH:MM:SS or DAYS-HH:MM:SS"),
    "image": (r"[\w][\w./:@-]*", "the name of a container image"),
    "volume": (r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", "the name of a persistent volume claim"),
}
"""Option -> what it may look like, and that in words: it is put into a script."""


@technique(paper="torchrun's elastic agents; SLURM's --requeue and --signal; Kubeflow's PyTorchJob v1")
def launch(arguments: list[str]) -> int:
    """Starts a run on a cluster: writes a script from a template, shows it (--dry-run) or submits it.

    What stands behind the options is the command, as for `python -m core`. A job that is preempted, or loses a
    worker or a machine, goes on from its last checkpoint. Templates lie in configs/cluster; one of your own is
    given by its path, and may use the same names in double braces. With lines of #SBATCH it goes to sbatch, as
    .yaml.template to kubectl, else to bash.

    Example:
        python -m core launch --cluster slurm --nodes 4 --devices 8 --dry-run fit --config quickstart
    """
    options = _parser().parse_args(arguments)
    if not options.command or options.command[0].startswith("-"):
        raise ConfigError(
            "launch: behind its options comes a command: launch --cluster slurm ... fit --config X"
        )
    template = _template(options.cluster)
    text = template.read_text(encoding="utf-8")
    kind = _kind(template, text)
    script = fill(text, _values(options, kind), str(template))
    if options.dry_run:
        print(script, end="")
        return 0
    path = Path(options.output or f"{options.name}{template.with_suffix('').suffix}")
    durable.write(path, script)
    return _submit(kind, path)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m core launch", description=launch.__doc__)
    parser.add_argument("--cluster", required=True, help=f"{', '.join(SUBMIT)}, or a template's path")
    parser.add_argument("--nodes", type=int, default=1, help="machines (%(default)s)")
    parser.add_argument("--least-nodes", type=int, help="go on with as few as these (default: --nodes)")
    parser.add_argument("--devices", type=int, default=8, help="processes on each, one a GPU (%(default)s)")
    parser.add_argument("--max-restarts", type=int, default=3, help="of failed workers (%(default)s)")
    parser.add_argument("--name", default="leyden", help="the job's (%(default)s)")
    parser.add_argument("--time", default="24:00:00", help="SLURM: the limit (%(default)s)")
    parser.add_argument("--image", default="leyden:latest", help="Kubernetes: the container (%(default)s)")
    parser.add_argument("--volume", default="workspace", help="Kubernetes: the shared volume (%(default)s)")
    parser.add_argument("--output", metavar="FILE", help="where the script goes (default: after --name)")
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="fit --config X ...")
    return parser


def _template(cluster: str) -> Path:
    shipped = {path.name.partition(".")[0]: path for path in configs_folder().glob("cluster/*.template")}
    path = shipped.get(cluster, Path(cluster))
    if not path.is_file():
        hint = nearest(cluster, set(shipped))
        raise ConfigError(
            f"--cluster {cluster}: there is no such template.{hint} There are {', '.join(sorted(shipped))}."
        )
    return path


def _kind(template: Path, text: str) -> str:
    """Returns what a template is for, one of `SUBMIT`."""
    if re.search(r"^#SBATCH ", text, re.MULTILINE):
        return "slurm"
    return "kubernetes" if template.with_suffix("").suffix == ".yaml" else "torchrun"


def _values(options: argparse.Namespace, kind: str) -> dict[str, str]:
    """Returns what stands for the names in a template."""
    least = options.nodes if options.least_nodes is None else options.least_nodes
    if not 1 <= least <= options.nodes or options.devices < 1 or options.max_restarts < 0:
        raise ConfigError(
            "launch takes 1 <= --least-nodes <= --nodes, --devices >= 1 and --max-restarts >= 0, not "
            f"{least}, {options.nodes}, {options.devices} and {options.max_restarts}."
        )
    for name, (pattern, words) in PATTERNS.items():
        if not re.fullmatch(pattern, getattr(options, name)):
            raise ConfigError(f"launch: --{name} is {getattr(options, name)!r}, not {words}.")
    command = list(options.command)
    sizes = {"devices": options.devices, "num_nodes": options.nodes}
    if kind != "slurm":
        sizes = {"devices": "auto"}  # what torchrun has started, also after it lost some
    for key, value in sizes.items():
        if not any(word.startswith(f"--trainer.{key}") for word in command):
            command.append(f"--trainer.{key}={value}")
    return {
        **{name: getattr(options, name) for name in PATTERNS},
        "nodes": str(options.nodes),
        "least_nodes": str(least),
        "nodes_range": f"{least}:{options.nodes}" if least < options.nodes else str(options.nodes),
        "devices": str(options.devices),
        "max_restarts": str(options.max_restarts),
        "command": shlex.join(command),
        "command_as_list": json.dumps(command),
    }


def fill(template: str, values: Mapping[str, str], where: str) -> str:
    """Replaces each `{{name}}` of a template.

    Raises:
        ConfigError: If it has a name that is not known.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            line = template[: found.start()].count("\n") + 1
            raise ConfigError(f"{where}:{line}: there is no {found[0]}.{nearest(found[1], set(values))}")
        return values[found[1]]

    return re.sub(r"\{\{(\w+)\}\}", value, template)


def _submit(kind: str, path: Path) -> int:
    command = [*SUBMIT[kind], str(path)]
    print(f"+ {shlex.join(command)}", flush=True)
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is not installed here, and nothing was submitted. The script is {path}: "
            f"take it to where `{shlex.join(command)}` works."
        ) from None
