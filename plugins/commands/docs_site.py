"""Builds the web site from Markdown: Sphinx with MyST and furo.

Sphinx is taken because its search is a script that works from a file without a server or a network, a broken link is
a warning of the build, and furo loads nothing from elsewhere. zensical 0.1.2, the successor of MkDocs Material, was
the other candidate: it requires zensical-ui==0.0.42, which the package index that this was tried with does not have.
"""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from typing import Any

from core import __version__

SETTINGS: dict[str, Any] = {
    "project": "leyden",
    "version": __version__,
    "release": __version__,
    "html_title": f"leyden {__version__}",
    "extensions": ["myst_parser"],
    "root_doc": "index",
    "html_theme": "furo",
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "html_show_copyright": False,
    "html_static_path": ["_static"],
    "html_css_files": ["narrow.css"],
    "myst_heading_anchors": 3,
    # Docstrings of other packages are text: they cannot bring markup or scripts into the site.
    "myst_disable_syntax": ["html_block", "html_inline", "myst_role", "substitution"],
    "suppress_warnings": ["myst.header", "misc.highlighting_failure"],
}

NARROW = """\
@media (max-width: 46em) {
  article pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  article .highlight-python pre, article .highlight-yaml pre { white-space: pre; }
  article table.docutils thead { display: none; }
  article table.docutils, article table.docutils tbody, article table.docutils tr { display: block; }
  article table.docutils tr { padding: 0.4rem 0; border-bottom: 1px solid var(--color-table-border); }
  article table.docutils td { display: inline-block; border: 0; padding: 0.1rem 0.4rem; }
  article table.docutils td:last-child { display: block; }
}
"""
"""Style of narrow screens, on which tables and commands of furo are wider than the page: a table's row is a paragraph."""


def build(source: Path, output: Path) -> list[str]:
    """Builds the site.

    Args:
        source: The folder with the Markdown; `index.md` is the first page.
        output: The folder that the HTML is written to.

    Returns:
        What Sphinx warned of, one line each: links that lead nowhere, above all.
    """
    from sphinx.application import Sphinx
    from sphinx.util.console import nocolor

    nocolor()
    (source / "_static").mkdir(exist_ok=True)
    (source / "_static" / "narrow.css").write_text(NARROW, encoding="utf-8")
    warnings = io.StringIO()
    # no conf.py: it would be a file of code to execute
    application = Sphinx(
        srcdir=source,
        confdir=None,
        outdir=output,
        doctreedir=source.with_name("doctrees"),
        buildername="html",
        confoverrides=SETTINGS,
        status=None,
        warning=warnings,
        freshenv=True,
    )
    application.build(force_all=True)
    for name in (".buildinfo", "objects.inv"):  # for later builds and for other sites
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(output / "_sources", ignore_errors=True)
    text = re.sub(r"\x1b\[[0-9;]*m", "", warnings.getvalue())
    return [line.replace(f"{source}/", "") for line in text.splitlines() if line.strip()]
