"""Records of published sets that hold several ones, or whose texts are put together from several fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from datamodules.records.chats import WrongRecord, field

Record = dict[str, Any]


def squad(record: Record) -> Iterator[Record]:
    """Yields the questions of an article as SQuAD's files have it: title, paragraphs, and of each the questions (`qas`).

    Each has the fields of Hugging Face's `squad`: id, title, context, question, answers. Other records stay as they are.
    """
    if not isinstance(record.get("paragraphs"), list):
        yield record
        return
    for paragraph in _objects(record, "paragraphs"):
        for one in _objects(paragraph, "qas"):
            texts = [field(answer, "text") for answer in _objects(one, "answers")]
            yield {
                "id": one.get("id"),
                "title": record.get("title"),
                "context": field(paragraph, "context"),
                "question": field(one, "question"),
                "answers": {"text": texts},
            }


def multirc(record: Record) -> Iterator[Record]:
    """Yields each answer of a passage of MultiRC with its question, and whether it is right."""
    passage = field(record, "passage", dict)
    for one in _objects(passage, "questions"):
        for answer in _objects(one, "answers"):
            text = f"{field(one, 'question')} {field(answer, 'text')}"
            yield {"paragraph": field(passage, "text"), "answer": text, "label": answer.get("label")}


def record(record: Record) -> Iterator[Record]:
    """Yields each entity of a passage of ReCoRD in place of a query's @placeholder, and whether it is an answer."""
    passage = field(record, "passage", dict)
    text = field(passage, "text")
    names = dict.fromkeys(_span(text, entity) for entity in _objects(passage, "entities"))
    for one in _objects(record, "qas"):
        answers = {field(answer, "text") for answer in _objects(one, "answers")}
        for name in names:
            query = field(one, "query").replace("@placeholder", name)
            yield {"passage": text, "query": query, "label": name in answers}


def copa(record: Record) -> Iterator[Record]:
    """Yields a premise of COPA with both choices as one text, as T5 has it (arXiv:1910.10683, appendix D.4)."""
    names = ("choice1", "choice2", "premise", "question")
    text = " ".join(f"{name}: {field(record, name)}" for name in names)
    yield {"text": text, "label": record.get("label")}


def wsc(record: Record) -> Iterator[Record]:
    """Yields a sentence of WSC whose pronoun stands between asterisks, as in T5, and what it may refer to."""
    target = field(record, "target", dict)
    words, at = field(record, "text").split(" "), field(target, "span2_index", int)
    pronoun = field(target, "span2_text").split(" ")
    marked = words[max(at, 0) : at + len(pronoun)]
    if not marked:
        raise WrongRecord("span2_index is beyond the text", f"it is {at}")
    words[at : at + len(pronoun)] = [f"*{' '.join(marked)}*"]
    yield {"text": " ".join(words), "name": field(target, "span1_text"), "label": record.get("label")}


def _objects(record: Mapping[str, Any], name: str) -> list[Record]:
    """Returns a field that is a list of objects."""
    found = field(record, name, list)
    if wrong := next((one for one in found if not isinstance(one, dict)), None):
        raise WrongRecord(f'the field "{name}" is not a list of objects', f"it has {wrong!r}"[:100])
    return found  # type: ignore[no-any-return]


def _span(text: str, entity: Record) -> str:
    begin, end = field(entity, "start", int), field(entity, "end", int)  # the last character's place
    if not 0 <= begin <= end < len(text):
        raise WrongRecord("an entity is beyond the text", f"it is from {begin} to {end}")
    return text[begin : end + 1]
