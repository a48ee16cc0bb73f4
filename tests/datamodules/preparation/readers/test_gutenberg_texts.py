"""Project Gutenberg's files: marks of three decades, encodings, copies of a book, archives."""

import time

import pytest

from datamodules.preparation.readers import gutenberg_texts
from datamodules.preparation.readers.gutenberg_texts import GutenbergTexts, body, described
from tests.support.books import write_zip
from tests.support.corpus import rows_of, texts_of

HEADER = """The Project Gutenberg eBook of Frankenstein

This eBook is for the use of anyone anywhere.

Title: Frankenstein;
       or, the modern prometheus

Author: Mary Wollstonecraft Shelley

Release Date: October 31, 1993 [eBook #84]
                [Most recently updated: December 2, 2022]

Language: {language}

"""
MODERN = (
    HEADER + "*** START OF THE PROJECT GUTENBERG EBOOK FRANKENSTEIN;\nOR, THE MODERN PROMETHEUS ***\n\n\n"
)
FOOTER = "\n\n*** END OF THE PROJECT GUTENBERG EBOOK FRANKENSTEIN ***\n\nUpdated editions\n\n*** START: FULL LICENSE ***\n"
BOOK = "CHAPTER 1\n\nIt was a dark night.\n\n* * * * *\n\nThe end of the project was near."

OLD = (
    "***The Project Gutenberg Etext of Alice***\n\n***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\n"
    'Why is this "Small Print!" statement here?\n\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n'
)
OLDER = OLD.replace("*END*THE SMALL", "*END THE SMALL")


def modern(text=BOOK, language="English"):
    return MODERN.format(language=language) + text + FOOTER


@pytest.mark.parametrize(
    "text",
    [
        modern(),
        modern().replace("THE PROJECT GUTENBERG EBOOK", "THIS PROJECT GUTENBERG EBOOK").replace("*** ", "***"),
        modern("Produced by Judith Boss and\nothers at pgdp.net\n\n\n" + BOOK + "\n\nEnd of Project Gutenberg's Frankenstein"),
        modern(BOOK + "\n\nEnd of the Project Gutenberg EBook of Frankenstein\n"),
        OLD + BOOK + "\n\nEnd of the Project Gutenberg Etext of Alice\n",
        OLDER + BOOK + "\n\n\nEnd of Project Gutenberg Etext Alice\n",
        OLD + BOOK,
    ],
)  # fmt: skip
def test_header_and_footer_are_left_out(text):
    assert body(text)[1] == BOOK


def test_a_mark_in_the_middle_of_a_long_book_is_text():
    book = "word\n" * 20_000 + "End of Project Gutenberg's dream\n" + "word\n" * 20_000 + "last"
    assert body(modern(book))[1] == book


def test_what_the_header_says():
    assert described(body(modern(language="French"))[0]) == {
        "title": "Frankenstein; or, the modern prometheus",
        "author": "Mary Wollstonecraft Shelley",
        "language": "fr",
        "date": "1993-10-31",
    }
    assert set(described("Title:\n\nLanguage: Klingon\n\nRelease Date: Smarch 4, 1990").values()) == {None}
    assert described("Release Date: May, 1997 [Etext #900]")["date"] == "1997-05"


def test_one_file_of_each_book_is_read(tmp_path):
    for number, names in {
        1: ["1.txt", "1-8.txt", "1-0.txt", "1-0.zip"],
        2: ["2-8.txt", "2.zip"],
        3: ["3-8.txt"],
    }.items():
        for name in names:
            path = tmp_path / str(number) / name
            content = modern(f"caf\u00e9 {name}").encode("latin1" if "-8" in name else "utf-8")
            if path.suffix == ".zip":
                write_zip(path, {f"{number}.txt": content, "../x.txt": b"out", "readme.md": b"?"})
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content.replace(b"\n", b"\r\n"))
    (tmp_path / "notes.txt").write_text(modern("notes"))
    rows, _ = rows_of(GutenbergTexts(str(tmp_path)))
    assert [(row["id"], row["text"], row["language"]) for row in rows] == [
        ("1/1-0.txt", "caf\u00e9 1-0.txt", "en"), ("2/2.zip:2.txt", "caf\u00e9 2.zip", "en"),
        ("3/3-8.txt", "caf\u00e9 3-8.txt", "en"), ("notes.txt", "notes", "en"),
    ]  # fmt: skip


def test_other_files_are_rejected(tmp_path):
    (tmp_path / "a.txt").write_text("A text of somebody.")
    (tmp_path / "b.txt").write_text(modern(""))
    (tmp_path / "c.zip").write_bytes(b"PK")
    (tmp_path / "d.txt").write_text(modern("It stays."))
    rejects = []
    assert texts_of(GutenbergTexts(str(tmp_path)), rejects) == ["It stays."]
    assert [reject[2] for reject in rejects] == [
        gutenberg_texts.UNMARKED,
        gutenberg_texts.EMPTY,
        "broken zip file",
    ]


def test_strange_files_take_no_time():
    begin = time.process_time()
    for text in (
        "\n" * 10**6,
        " " * 10**6,
        "*** START OF THE PROJECT GUTENBERG " * 10**5,
        "*** START**THE SMALL PRINT!" * 10**5,
    ):
        body(text)
    body(modern("Produced by\n" + "x\n" * 10**6))
    described("Title: a\n" + " b\n" * 10**5 + "Author: " * 10**5)
    assert time.process_time() - begin < 30
