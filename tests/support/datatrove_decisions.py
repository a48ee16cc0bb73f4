"""Writes what datatrove's filters decide on the quality corpus to a file that the tests read.

    python -m venv datatrove && datatrove/bin/pip install datatrove spacy nltk
    datatrove/bin/python -m tests.support.datatrove_decisions

For each filter with its defaults, with each rule alone, and with thresholds that are crossed more often: a number for
each document, of the list of reasons; 0: kept. C4 also changes texts: a digest of all texts that it keeps.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.quality_corpus import documents, lines, pieces

TABLE = Path(__file__).parents[1] / "datamodules" / "preparation" / "transforms" / "datatrove_decisions.json"
WORDS = Path(__file__).parents[1] / "toolkit" / "spacy_words.json"
OFF: dict[str, dict[str, Any]] = {
    "GopherQualityFilter": dict.fromkeys(
        (
            "min_doc_words",
            "max_doc_words",
            "min_avg_word_length",
            "max_avg_word_length",
            "max_symbol_word_ratio",
            "max_bullet_lines_ratio",
            "max_ellipsis_lines_ratio",
            "max_non_alpha_words_ratio",
            "min_stop_words",
        )
    ),
    "GopherRepetitionFilter": {
        **dict.fromkeys(("dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac")),
        "top_n_grams": [],
        "dup_n_grams": [],
    },
    "C4QualityFilter": {
        **dict.fromkeys(
            (
                "remove_citations",
                "filter_no_terminal_punct",
                "filter_lorem_ipsum",
                "filter_javascript",
                "filter_curly_bracket",
                "filter_policy",
            ),
            False,
        ),
        **dict.fromkeys(("min_num_sentences", "min_words_per_line", "max_word_length"), -1),
    },
    "FineWebQualityFilter": {
        "line_punct_thr": 0.0,
        "short_line_thr": 1.0,
        "char_duplicates_ratio": 1.0,
        "new_line_ratio": 1e9,
    },
}
"""The arguments of each filter that turn its rules off."""

ALONE: dict[str, list[dict[str, Any]]] = {
    "GopherQualityFilter": [
        {"min_doc_words": 50},
        {"max_doc_words": 100_000},
        {"max_doc_words": 150},
        {"min_doc_words": 1, "min_avg_word_length": 3},
        {"min_doc_words": 1, "min_avg_word_length": 4},
        {"min_doc_words": 1, "max_avg_word_length": 10},
        {"min_doc_words": 1, "max_avg_word_length": 5},
        {"min_doc_words": 1, "max_symbol_word_ratio": 0.1},
        {"min_doc_words": 1, "max_symbol_word_ratio": 0.02},
        {"min_doc_words": 1, "max_bullet_lines_ratio": 0.9},
        {"min_doc_words": 1, "max_ellipsis_lines_ratio": 0.3},
        {"min_doc_words": 1, "max_non_alpha_words_ratio": 0.8},
        {"min_doc_words": 1, "max_non_alpha_words_ratio": 0.9},
        {"min_stop_words": 2},
        {"min_stop_words": 1, "stop_words": ["people", "time", "don't", "n't"]},
    ],
    "GopherRepetitionFilter": [
        {"dup_line_frac": 0.3},
        {"dup_para_frac": 0.3},
        {"dup_line_char_frac": 0.2},
        {"dup_para_char_frac": 0.2},
        *(
            {"top_n_grams": [[n, share]]}
            for n, share in ((2, 0.2), (3, 0.18), (4, 0.16), (1, 0.1), (2, 0.05))
        ),
        *({"dup_n_grams": [[n, round(0.2 - n / 100, 2)]]} for n in range(5, 11)),
        {"dup_n_grams": [[2, 0.3]]},
        {"dup_n_grams": [[5, 0.01]]},
    ],
    "C4QualityFilter": [
        {"min_num_sentences": 5},
        {"remove_citations": True},
        {"min_words_per_line": 3},
        {"filter_no_terminal_punct": True},
        {"max_word_length": 1000},
        {"filter_lorem_ipsum": True},
        {"filter_javascript": True},
        {"filter_curly_bracket": True},
        {"filter_policy": True},
    ],
    "FineWebQualityFilter": [
        {"line_punct_thr": 0.12},
        {"line_punct_thr": 0.12, "line_punct_exclude_zero": True},
        {"short_line_thr": 0.67},
        {"short_line_thr": 0.5, "short_line_length": 60},
        {"char_duplicates_ratio": 0.01},
        {"new_line_ratio": 0.3},
        {"new_line_ratio": 0.1},
    ],
}


def main() -> None:
    """Writes the tables."""
    write_words()
    write_decisions()


def write_words() -> None:
    """Writes the words of pieces, and the number of sentences of lines, that spaCy finds as datatrove calls it."""
    from datatrove.utils.text import split_into_sentences, split_into_words

    found = [[piece, *split_into_words(piece)] for piece in pieces()]
    numbers = [len(split_into_sentences(line)) for line in lines()]
    rows = ",\n".join(json.dumps(row) for row in found)
    text = f'{{"spacy": "{version("spacy")}", "sentences": {json.dumps(numbers)}, "words": [\n{rows}\n]}}\n'
    WORDS.write_text(text, encoding="utf-8")


def write_decisions() -> None:
    """Writes what the filters decide."""
    texts = documents()
    found = {
        "datatrove": version("datatrove"),
        "spacy": version("spacy"),
        "documents": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        "decisions": [
            decided(name, options, texts)
            for name, alone in ALONE.items()
            for options in ({}, *({**OFF[name], **one} for one in alone))
        ],
    }
    lines = ",\n".join(json.dumps(one) for one in found.pop("decisions"))
    TABLE.write_text(f'{json.dumps(found)[:-1]}, "decisions": [\n{lines}\n]}}\n', encoding="utf-8")


def decided(name: str, options: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """Returns what a filter decides on each text."""
    from datatrove.data import Document
    from datatrove.pipeline import filters

    rule = getattr(filters, name)(**options)
    reasons: list[str] = ["kept"]
    numbers, kept = [], hashlib.sha256()
    for text in texts:
        document = Document(text=text, id="")
        try:
            result = rule.filter(document)
        except ZeroDivisionError:
            result = False, "ZeroDivisionError"
        reason = "kept" if result is True else result[1]
        if reason not in reasons:
            reasons.append(reason)
        numbers.append(reasons.index(reason))
        if result is True:
            kept.update(document.text.encode() + b"\0")
    one = {"filter": name, "options": options, "reasons": reasons, "kept": kept.hexdigest()}
    return {**one, "documents": "".join(chr(ord("0") + number) for number in numbers)}


if __name__ == "__main__":
    main()
