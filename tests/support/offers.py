"""Who offers a feature, found by importing everybody: the message finds them without."""

from core import catalog
from core.technique import declaration_of


def offering(feature, kind):
    """Returns the names of the techniques of a kind, ours, that offer a feature."""
    ours = [entry for entry in catalog.entries() if entry.package == "leyden" and entry.kind == kind]
    declared = {entry.name: declaration_of(entry.load()) for entry in ours}
    return [name for name, declaration in declared.items() if declaration and feature in declaration.offers]
