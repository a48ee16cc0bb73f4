"""Files of a diagnosis: the configuration it reads, the findings and remedies it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from core import durable
from core.errors import ConfigError
from toolkit.bounded import MOST_BYTES
from toolkit.diagnosis.case import Finding


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of a run folder; empty for a run that was not started from the command line.

    Raises:
        ConfigError: If there is one that cannot be read.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES:,} bytes: it is not as `fit` writes it.")
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not as `fit` writes it: {str(error).splitlines()[0]}.") from error
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{path} is not as `fit` writes it: it has no sections, such as trainer.")
    return found or {}


def remedy_text(finding: Finding) -> str:
    """Returns a remedy as YAML, with the finding above it."""
    return f"# {finding.line()}\n" + yaml.safe_dump(dict(finding.remedy), sort_keys=False)


def write_remedy(finding: Finding, folder: Path) -> Path:
    """Writes a remedy to `doctor/remedy-CAUSE.yaml` of a run folder."""
    path = folder / "doctor" / f"remedy-{finding.cause}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write(path, remedy_text(finding))
    return path


def write_findings(findings: Sequence[Finding], folder: Path) -> None:
    """Replaces `doctor/findings.jsonl` of a run folder, which `watch` shows: a JSON object for each finding. Remedies of others are removed."""
    path = folder / "doctor" / "findings.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = ("cause", "since", "confidence", "evidence", "advice")
    for remedy in path.parent.glob("remedy-*.yaml"):  # of causes that an earlier look found
        if remedy.stem.removeprefix("remedy-") not in {one.cause for one in findings}:
            remedy.unlink()
    durable.write(
        path, "".join(json.dumps({key: getattr(one, key) for key in keys}) + "\n" for one in findings)
    )
