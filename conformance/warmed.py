"""Imported by the fork server, so that each forked run finds signatures read, as it finds modules imported.

jsonargparse keeps what it found out about a class: to find it out is a quarter of a tiny run's time. Its parser, and
the catalogue, are as much again, and the same in each run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from core import catalog
from plugins.cli.configuration import parsing
from plugins.cli.configuration.request import prepare
from plugins.cli.configuration.trust import trusting


def _folders() -> list[str]:
    """Returns the folders of `sys.path` in which packages are registered."""
    folders = dict.fromkeys(os.path.realpath(path) for path in sys.path if os.path.isdir(path or "."))
    return [path for path in folders if any(name.endswith("-info") for name in os.listdir(path))]


def forget_other_packages() -> None:
    """Has the catalogue read again in a forked process, unless it sees the packages that the fork server saw."""
    if _folders() != _FOLDERS:
        catalog.entries.cache_clear()


def _recorders() -> list[str]:
    """Returns the options of what each run of the kit records itself with."""
    options: dict[str, dict[str, Any]] = {"Recorder": {}, "Saver": {"save_at": 4}, "Figures": {}}
    named = {
        name: {"class_path": f"conformance.recorder.{name}", "init_args": {"folder": "run", **arguments}}
        for name, arguments in options.items()
    }
    callbacks = [named["Recorder"], named["Saver"]]
    return [
        f"--trainer.callbacks={json.dumps(callbacks)}",
        f"--trainer.logger={json.dumps([named['Figures']])}",
    ]


def _parser_of(command: str) -> tuple[parsing.Parser, list[str]]:
    """Returns the parser that was built ahead, once; each further one is built."""
    return _PARSERS.pop() if command == "fit" and _PARSERS else _BUILD(command)


_FOLDERS = _folders()
_BUILD = parsing.parser_of
_PARSERS = [_BUILD("fit")]
_TINY = [f"--config={Path(__file__).with_name('tiny.yaml')}", "--data.source=text", "--data.cache_dir=cache"]
_REQUEST = prepare([*_TINY, "--trust=conformance", *_recorders()])
with trusting(_REQUEST.trust):
    parsing.Parsed("fit", _REQUEST).plain()
for _entry in catalog.entries():
    for _field in ("offers", "replaces", "precision_words", "strategy_words"):
        _entry.declared(_field)
parsing.parser_of = _parser_of
