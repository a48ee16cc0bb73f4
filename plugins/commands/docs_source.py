"""The Markdown of the web site: the guides as they are, an index for each kind, a page for each technique."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from core import catalog
from plugins.commands.docs_page import HOUSE, Pages, line, page, row

GUIDES = (
    "first-run",
    "your-own-text",
    "mix-and-compare",
    "data-preparation",
    "cleaning",
    "cluster",
    "stability",
    "write-a-technique",
    "public-contracts",
    "threat-model",
)
"""Pages of docs/ in the order of the menu; others follow."""
MORE = ("configs/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
_ALONE = "# leyden\n\nThis installation has no guides: they are in the folder `docs` of leyden's source.\n"
"""The first page of a site without guides."""


def write(folder: Path) -> int:
    """Writes everything that the site is built from.

    Args:
        folder: A new folder. The guides are in it at the places that they have in a checkout, so that their
            links hold.

    Returns:
        The number of techniques.
    """
    entries = catalog.entries()
    pages = Pages(entries)
    texts: dict[str, str] = {}
    for entry in entries:
        texts[pages.path(entry)] = page(entry, pages)
    for kind, found in groupby(entries, key=lambda entry: entry.kind):
        texts[f"techniques/{kind}/index.md"] = _kind(kind, list(found), pages)
    guides = _guides()
    texts |= {name: _adapted(text, name) for name, text in guides.items()}
    kinds = [
        f"techniques/{kind}/index.md" for kind in catalog.KINDS if f"techniques/{kind}/index.md" in texts
    ]
    texts["index.md"] = _first(guides, kinds)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in _pictures(texts):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HOUSE / name, folder / name)
    return len(entries)


def _kind(kind: str, entries: list[catalog.Entry], pages: Pages) -> str:
    names = [pages.relative(entry, f"techniques/{kind}") for entry in entries]
    rows = [
        row(f"[{line(entry.name)}]({name})", line(entry.package), line(entry.summary()))
        for entry, name in zip(entries, names, strict=True)
    ]
    table = "\n".join(["| name | package | what it does |", "| --- | --- | --- |", *rows])
    return f"# {kind.capitalize()}\n\n{table}\n\n{_menu('', names)}"


def _guides() -> dict[str, str]:
    """Returns path -> text of what is written by hand; nothing where it was left out of an installation."""
    if not (HOUSE / "docs" / "first-run.md").is_file():
        return {}
    found = [HOUSE / "docs" / f"{name}.md" for name in GUIDES]
    found += [path for path in sorted((HOUSE / "docs").glob("*.md")) if path not in found]
    paths = [*found, *(HOUSE / name for name in MORE)]
    return {
        str(path.relative_to(HOUSE)): path.read_text(encoding="utf-8") for path in paths if path.is_file()
    }


def _first(guides: Mapping[str, str], kinds: Iterable[str]) -> str:
    """Returns the first page: the README with the menu of the site."""
    readme = HOUSE / "README.md"
    text = readme.read_text(encoding="utf-8") if guides and readme.is_file() else _ALONE
    menus = [
        _menu("Guides", [name for name in guides if name.startswith("docs/") and name != "docs/README.md"]),
        _menu("Techniques", kinds),
        _menu("More", [name for name in guides if name in MORE or name == "docs/README.md"]),
    ]
    return "\n".join([_adapted(text, "README.md"), *menus])


def _menu(caption: str, names: Iterable[str]) -> str:
    names = list(names)
    options = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", ":hidden:", *options, "", *names, "```", ""]) if names else ""


def _adapted(text: str, name: str) -> str:
    """Returns a guide as the site shows it: links lead to pages of the site, marks of generated tables go."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    here = Path(name).parent

    def link(found: re.Match[str]) -> str:
        label, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found[0]
        path, mark, anchor = target.partition("#")
        there = (HOUSE / here / path).resolve()
        up = "../" * len(here.parts)
        if there == HOUSE / "README.md":
            return f"[{label}]({up}index.md{mark}{anchor})"
        if label in catalog.KINDS:
            return f"[{label}]({up}techniques/{label}/index.md)"
        shown = there.suffix in (".md", ".png") or not there.is_relative_to(HOUSE)
        return found[0] if shown else label

    return _outside_code(text, lambda part: re.sub(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)", link, part))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Applies a function to what is outside of fenced blocks."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))


def _pictures(texts: Mapping[str, str]) -> Iterator[str]:
    """Yields the pictures that pages show, as paths below the checkout."""
    for name, text in texts.items():
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+\.png)\)", text):
            path = (HOUSE / Path(name).parent / target).resolve()
            if path.is_relative_to(HOUSE) and path.is_file():
                yield str(path.relative_to(HOUSE))
