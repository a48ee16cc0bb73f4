"""Source files, each of which is read and parsed once for all tests of a process."""

import ast
from collections import defaultdict
from functools import cache


@cache
def text_of(path):
    """Returns the text of a file, which does not change while tests run."""
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path):
    """Returns the syntax tree of a file; nobody changes it."""
    return ast.parse(text_of(path))


@cache
def nodes_by_kind(path):
    """Returns kind of node -> those of a file, in the order of `ast.walk`."""
    found = defaultdict(list)
    for node in ast.walk(tree_of(path)):
        found[type(node)].append(node)
    return dict(found)


def nodes(path, *kinds):
    """Yields the nodes of these kinds of a file, one kind after the other."""
    found = nodes_by_kind(path)
    for kind in kinds:
        yield from found.get(kind, ())


def forget():
    """Drops all trees, millions of objects that each later search for cycles would go through."""
    for known in (text_of, tree_of, nodes_by_kind):
        known.cache_clear()
