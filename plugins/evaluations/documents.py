"""The documents of a reader, as items of an evaluation."""

from __future__ import annotations

from core.contracts import Reader, raise_reject
from core.errors import ConfigError, nearest
from toolkit.evaluation import Item


def documents(reader: Reader, most: int, group_by: str | None, owner: str) -> list[Item]:
    """Returns the first documents that are not blank: id, text and group of each.

    Args:
        reader: Reads them.
        most: How many, at most.
        group_by: The column that names the group of a document; None: they have none.
        owner: The evaluation, for messages.

    Raises:
        ConfigError: If a document cannot be read, there is none, or the reader has no such column.
    """
    found: list[Item] = []
    for task in reader.tasks():
        for batch in reader.read(task, raise_reject):
            names = batch.schema.names
            if group_by is not None and group_by not in names:
                raise ConfigError(
                    f"{owner}.group_by: the documents have no {group_by!r}.{nearest(group_by, names)}\n"
                    f"They have {', '.join(names)}. A reader adds fields with its argument metadata."
                )
            ids, texts = batch["id"].to_pylist(), batch["text"].to_pylist()
            groups = [""] * len(ids) if group_by is None else batch[group_by].to_pylist()
            for id, text, group in zip(ids, texts, groups, strict=True):
                if text and not text.isspace():
                    found.append(Item(id, text, group or ""))
                if len(found) == most:
                    return found
    if not found:
        raise ConfigError(f"{owner}: {type(reader).__name__} finds no text, all documents are blank.")
    return found
