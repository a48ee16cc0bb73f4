"""The command `docs`: a web site of the guides and of every installed technique, to read without a network."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from core import durable
from core.errors import ConfigError
from core.technique import Package, declaration_of, technique
from plugins.cli.configuration.command_parser import Parser
from toolkit import local_paths

MARK = ".leyden-docs"
"""The file by which a folder is known as a site that this command wrote."""


@technique(
    paper="own work: Sphinx 9, MyST and furo",
    needs=[Package("sphinx>=9", "docs"), Package("furo>=2025.9", "docs"), Package("myst-parser>=5", "docs")],
)
def docs(arguments: list[str]) -> int:
    """Builds a web site: the guides, one page for each technique of all installed packages, and a search.

    The site needs no network: scripts, styles and fonts are in the folder. Serve it with any web server, such as
    `python -m http.server --directory site`, or open `index.html`. A site that is there already is replaced when the
    new one is complete. A folder with other files in it is refused.

    Example:
        python -m core docs --output site
    """
    parser = Parser(prog="python -m core docs", description=docs.__doc__)
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="folder of the site: new, empty, or an earlier site"
    )
    output = _checked(Path(local_paths.require_local_path(parser.parse_args(arguments).output, "--output")))
    declared = declaration_of(docs)
    missing = [line for need in declared.needs if (line := need.missing(None))] if declared else []  # type: ignore[arg-type]
    if missing:
        raise ConfigError("\n".join(["The site is built by packages that come with an extra:", *missing]))
    _build(output)
    return 0


def _checked(output: Path) -> Path:
    """Returns the folder to write; raises a ConfigError if it holds something else."""
    output = output.resolve()
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output is {output}, which is a file. Name a folder.")
    if output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
        raise ConfigError(
            f"--output is {output}, which holds files and is no site of this command.\n"
            "Name a new or an empty folder, such as --output site."
        )
    return output


def _build(output: Path) -> None:
    """Builds the site beside its folder, and puts it there when it is complete."""
    # not at the top: this imports Sphinx, and then every technique
    from plugins.commands import docs_site, docs_source

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent) as name:
        source, html, old = (Path(name) / part for part in ("source", "html", "old"))
        count = docs_source.write(source)
        for warning in docs_site.build(source, html):
            print(warning)
        (html / MARK).touch()
        html.chmod(0o777 & ~_umask())
        durable.sync_all(html)
        if output.exists():
            os.replace(output, old)
        shutil.move(html, output)
        durable.sync(output.parent)
    print(f"Written: {output}/index.html, with a page for each of {count} techniques.")
    print(f"Read it with: python -m http.server --directory {output}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
