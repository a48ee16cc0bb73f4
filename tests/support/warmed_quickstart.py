"""Imported by the fork server, so that each forked run of the quickstart finds signatures read: a third of a `check`.

It is imported before `conformance.warmed`, which keeps a parser for the first command of each process.
"""

from plugins.cli.configuration import parsing
from plugins.cli.configuration.request import prepare
from plugins.cli.configuration.trust import trusting

_REQUEST = prepare(["--config=quickstart"])
with trusting(_REQUEST.trust):
    parsing.Parsed("fit", _REQUEST).plain()
