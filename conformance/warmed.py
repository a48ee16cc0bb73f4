"""Imported by the fork server, so that each forked run finds signatures read, as it finds modules imported.

jsonargparse keeps what it found out about a class: to find it out is a quarter of a tiny run's time.
"""

from __future__ import annotations

from pathlib import Path

from core import catalog
from plugins.cli.configuration.parsing import Parsed
from plugins.cli.configuration.request import prepare
from plugins.cli.configuration.trust import trusting

_REQUEST = prepare(
    [f"--config={Path(__file__).with_name('tiny.yaml')}", "--data.source=text", "--data.cache_dir=cache"]
)
with trusting(_REQUEST.trust):
    Parsed("fit", _REQUEST).plain()
catalog.entries.cache_clear()  # the forked process has other packages, it may be
