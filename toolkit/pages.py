"""Reports as Markdown and as one HTML file that holds its pictures and needs no other."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

__all__ = ["Rows", "html_page", "html_picture", "html_table", "markdown_table"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
img { max-width: 100%; height: auto }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.8rem; text-align: left; vertical-align: top }
"""

Rows = Sequence[Sequence[str]]
"""A table of texts, its header first."""


def markdown_table(rows: Rows) -> str:
    """Returns a table in Markdown; texts of cells are shown as they are."""
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def html_table(rows: Rows) -> str:
    """Returns a table in HTML."""
    tags = ["th", *["td"] * len(rows)]
    lines = (
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(tags, rows, strict=False)
    )
    return "\n".join(["<table>", *lines, "</table>"])


def html_picture(png: bytes, alt: str) -> str:
    """Returns a picture that is inside of the page."""
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def html_page(title: str, parts: Sequence[str]) -> str:
    """Returns a page of parts in HTML under a heading."""
    title = html.escape(title)
    head = f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n<style>{STYLE}</style>'
    return "\n".join([head, f"<h1>{title}</h1>", *parts, "</html>\n"])
