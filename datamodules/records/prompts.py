"""Questions on a text, and translations, as prompts with their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from datamodules.records.chats import field
from datamodules.records.nested import Record, squad

UNANSWERABLE = "unanswerable"
"""The answer of a question that has none, as in lm-eval."""


class Prompts:
    """Makes prompts and completions of SQuAD's articles and questions, and of translations; other records stay as they are.

    They read as in lm-eval's tasks, so that it measures what was trained.

    Args:
        languages: Codes and names of the language that is translated from, then of that to which.
        joined: Whether the answer follows the prompt without a template: then a space is in between.
    """

    def __init__(self, languages: Mapping[str, str], joined: bool) -> None:
        self.languages, self._space = languages, " " if joined else ""

    def __call__(self, record: Record) -> Iterator[Record]:
        """Yields the records of one record.

        Raises:
            WrongRecord: If it cannot be used.
        """
        for one in squad(record):
            if {"context", "question", "answers"} <= one.keys():
                yield self._question(one)
            elif self.languages and "translation" in one:
                yield self._translation(field(one, "translation", dict))
            elif (
                self.languages and self.languages.keys() <= one.keys()
            ):  # a table with a line that names them
                yield self._translation(one)
            else:
                yield one

    def _question(self, one: Record) -> Record:
        answers = field(one, "answers", dict).get("text")
        answer = field({"answers": answers[0]}, "answers") if answers else UNANSWERABLE
        parts = [("Background", field(one, "context")), ("Question", field(one, "question"))]
        if one.get("title"):
            parts.insert(0, ("Title", field(one, "title")))
        prompt = "".join(f"{name}: {text}\n\n" for name, text in parts) + "Answer:"
        kept: dict[str, Any] = {name: one[name] for name in ("id", "title") if one.get(name) is not None}
        return kept | {"prompt": prompt, "completion": self._space + answer}

    def _translation(self, texts: Mapping[str, Any]) -> Record:
        (code, name), (other, other_name) = self.languages.items()
        prompt = f"{name} phrase: {field(texts, code)}\n{other_name} phrase:"
        return {"prompt": prompt, "completion": self._space + field(texts, other)}
