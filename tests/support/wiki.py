"""Dumps as MediaWiki exports them."""

from xml.sax.saxutils import escape


def wiki_page(number, title, text, namespace=0, redirect="", model="wikitext"):
    """Returns the XML of a page."""
    moved = f'<redirect title="{redirect}" />' if redirect else ""
    return (
        f"<page><title>{escape(title)}</title><ns>{namespace}</ns><id>{number}</id>{moved}<revision><id>1{number}</id>"
        f"<timestamp>2024-01-02T03:04:05Z</timestamp><contributor><username>U</username><id>7</id></contributor>"
        f'<model>{model}</model><format>text/x-wiki</format><text bytes="1" xml:space="preserve">{escape(text)}</text>'
        "</revision></page>\n"
    )


def dump(pages):
    """Returns the XML of a dump of a German wiki."""
    names = "".join(
        f'<namespace key="{key}" case="first-letter">{name}</namespace>'
        for key, name in {"0": "", "6": "Datei", "14": "Kategorie"}.items()
    )
    head = f"<siteinfo><sitename>W</sitename><namespaces>{names}</namespaces></siteinfo>\n"
    return f'<mediawiki version="0.11" xml:lang="de">{head}{"".join(pages)}</mediawiki>'
