"""A corpus on which every rule of the quality filters drops some documents and keeps others, on both sides of its threshold.

It is drawn with a fixed seed and needs the standard library alone, so that other programs can be run on it.
"""

import random
from collections.abc import Iterator

COMMON = [
    "the",
    "be",
    "to",
    "of",
    "and",
    "that",
    "have",
    "with",
    "in",
    "it",
    "for",
    "on",
    "was",
    "this",
    "as",
    "are",
    "by",
    "from",
    "at",
    "which",
    "not",
    "or",
    "an",
    "we",
    "they",
    "one",
    "all",
    "there",
    "more",
    "when",
    "will",
    "time",
    "people",
    "water",
    "year",
    "day",
    "house",
    "world",
    "work",
    "way",
    "case",
    "place",
    "week",
    "number",
    "group",
    "problem",
    "fact",
    "small",
    "large",
    "old",
    "new",
    "good",
    "young",
    "important",
    "different",
    "following",
    "same",
    "able",
    "find",
    "give",
    "tell",
    "ask",
    "seem",
    "feel",
    "try",
    "leave",
    "call",
    "know",
    "take",
    "see",
    "come",
    "think",
    "look",
    "want",
    "use",
    "company",
    "government",
    "question",
    "morning",
    "evening",
    "history",
    "language",
    "measure",
    "reader",
    "letter",
    "village",
]
ODD = [
    "don't",
    "can't",
    "it's",
    "they'd",
    "we'll",
    "U.S.",
    "e.g.",
    "Mr.",
    "Dr.",
    "3.14",
    "1,000",
    "$20",
    "50%",
    "10km",
    "well-known",
    "and/or",
    "naïve",
    "café",
    "München",
    "Ångström",
    "http://example.com/page?x=1",
    "someone@example.com",
    "state-of-the-art",
    '"quoted"',
    "(aside)",
    "don’t",
    "I’m",
    "cannot",
    "gonna",
    "Ph.D.",
    "No.7",
    "北京",
    "Москва",
    "Ελλάδα",
    "🙂",
    "C++",
    "x=y",
    "a/b",
    "12:30",
    "5pm",
    ":)",
    "end.Next",
    "v2.0",
    "#tag",
    "@name",
    "_under_",
    "[1]",
    "R&D",
    "½",
    "©",
    "—",
    "–",
]
CLOSING = ".", ".", ".", ".", "!", "?", '."', ".'", "...", "…", ":", ";", "", " 。", "।"


def documents() -> list[str]:
    """Returns the texts, always the same."""
    draw = random.Random(20)
    return [text for family in FAMILIES for text in family(draw)]


def sentence(
    draw: random.Random, length: int | None = None, odd: float = 0.08, end: str | None = None
) -> str:
    """Returns a sentence of so many pieces between spaces."""
    length = length or draw.randint(4, 18)
    found = [draw.choice(ODD) if draw.random() < odd else draw.choice(COMMON) for _ in range(length)]
    found[0] = found[0][:1].upper() + found[0][1:]
    return " ".join(found) + (draw.choice(CLOSING) if end is None else end)


def prose(draw: random.Random, words: int = 120, odd: float = 0.08) -> str:
    """Returns lines of sentences, nothing of which is repeated on purpose."""
    lines = []
    while words > 0:
        length = min(words, draw.randint(8, 16))
        lines.append(sentence(draw, length, odd, end=draw.choice((".", ".", "!", "?"))))
        words -= length
    return "\n".join(" ".join(lines[at : at + 2]) for at in range(0, len(lines), 2))


def lengths(draw: random.Random) -> Iterator[str]:
    """Yields few words and very many."""
    for number in [*range(1, 12), *range(44, 58)]:
        yield sentence(draw, number, odd=0, end=".")
        yield sentence(draw, number, odd=0.3)
    for number in (99_999, 100_000, 100_001):
        yield "\n".join(" ".join(draw.choices(COMMON, k=9)) for _ in range(number // 9)) + " the" * (
            number % 9
        )


def word_lengths(draw: random.Random) -> Iterator[str]:
    """Yields texts of short words and of long ones."""
    short, long = ["a", "I", "to", "of", "be"], ["international", "representations", "straightforward"]
    for count in range(40, 80, 2):
        yield " ".join(draw.choices(short, k=count) + draw.choices(COMMON, k=80 - count))
    for count in range(30, 80, 3):
        yield " ".join(draw.choices(long, k=count) + draw.choices(COMMON, k=80 - count))


def symbols(draw: random.Random) -> Iterator[str]:
    """Yields texts with number signs, ellipses and numbers among the words."""
    for symbol in ("#", "...", "…", "17"):
        for count in (*range(6, 18), 20, 24, 28, 32):
            found = draw.choices(COMMON, k=100)
            for at in range(count):
                found.insert(at * 5, symbol)
            yield " ".join(found)
    for count in range(8):
        yield " ".join(
            ["Number", "village", "letter"] * 25
            + ["The", "Of"]
            + ["the", "of", "with", "and", "be", "to", "that"][:count]
        )


def line_beginnings(draw: random.Random) -> Iterator[str]:
    """Yields lists, and lines that end in an ellipsis."""
    for mark in ("• ", "- ", "  -", "* "):
        for count in (16, 17, 18, 19, 20):
            yield "\n".join((mark if at < count else "") + sentence(draw, 6, 0) for at in range(20))
    for mark in ("...", "…", "… ", ".."):
        for count in range(8):
            yield "\n".join(sentence(draw, 6, 0, mark if at < count else ".") for at in range(20))


def repeated_lines(draw: random.Random) -> Iterator[str]:
    """Yields texts in which some lines or paragraphs occur again, short ones or long ones."""
    for gap in ("\n", "\n\n", "\n\n\n", " \n\n"):
        for count in range(9):
            for length in (2, 8, 30):
                lines = [sentence(draw, 9, 0) for _ in range(20 - count)]
                lines += [sentence(draw, length, 0, ".")] * (count + 1)
                draw.shuffle(lines)
                yield gap.join(lines)


def repeated_phrases(draw: random.Random) -> Iterator[str]:
    """Yields texts in which a phrase of some words occurs again and again."""
    for size in range(1, 13):
        phrase = " ".join(draw.choices(COMMON, k=size))
        for times in (1, 2, 3, 4, 6, 8, 12, 16):
            found = draw.choices(COMMON, k=150)
            for at in range(times):
                found.insert(at * (150 // times), phrase)
            yield " ".join(found)


def web_lines(draw: random.Random) -> Iterator[str]:
    """Yields pages with the lines that C4 removes."""
    lines = (
        "Please enable JavaScript to read this page.",
        "This site uses cookies to give you the best experience.",
        "Read our Privacy Policy and the terms of use.",
        "Home", "Click here.", "Two words.", "Three words here.", "Lorem ipsum dolor sit amet.", "lorem ipsum",
        "function () { return 1; }", "A curly { in a line of words.", "As was shown [1] by others.[citation needed]",
        "History[edit]", "It was said to be so.[12]", "He waits and waits...", "x" * 1001 + " is one long word.",
        "x" * 1000 + " is one long word.", 'She said "this is it"', "Who is it?  Nobody.", "Read on: it is here:",
        "Mr. Smith of the U.S. came at 5 p.m. to see us. It was late!", "  Indented with a tab.\t", "JAVASCRIPT IS GREAT.",
    )  # fmt: skip
    for line in lines:
        for count in range(3, 8):
            yield "\n".join([*(sentence(draw, 7, 0, ".") for _ in range(count)), line])
    for count in range(60):
        own = [sentence(draw, draw.randint(1, 9), 0.1) for _ in range(draw.randint(1, 8))]
        own += draw.choices([*lines[:7], *lines[11:]], k=count % 5)
        draw.shuffle(own)
        yield draw.choice(("\n", "\r\n", "\n\n", "\u2028", "\x0b")).join(own)


def short_lines(draw: random.Random) -> Iterator[str]:
    """Yields menus and poems: short lines, few of which end in punctuation."""
    for count in range(21):
        lines = [sentence(draw, 3, 0, "." if at % 3 else "") for at in range(count)]
        yield "\n".join(lines + [sentence(draw, 12, 0) for _ in range(20 - count)])
    for count in range(8):
        yield "\n".join(sentence(draw, 9, 0, "." if at < count else "") for at in range(25))
    for length in range(1, 8):
        yield "\n".join(sentence(draw, length, 0, ".") for _ in range(24))
    for length in (29, 30, 31):
        yield "\n".join("a" * (length - 2) + f"{letter}." for letter in "abcdefghij")
    for count in range(6, 14):
        yield prose(draw, 200, 0) + "\n" * count * 8 + "The end is near."


def mixtures(draw: random.Random) -> Iterator[str]:
    """Yields pages of everything: prose, lists, repeated lines, symbols."""
    for number in range(160):
        parts = [prose(draw, draw.randint(5, 150), draw.choice((0, 0.05, 0.2)))]
        for _ in range(number % 4):
            line = sentence(draw, odd=0.1)
            parts.append(
                draw.choice((
                    "\n".join([line] * draw.randint(1, 5)),
                    "\n".join("- " + sentence(draw, 5) for _ in range(draw.randint(1, 12))),
                    " ".join(draw.choices(ODD, k=draw.randint(1, 40))),
                    prose(draw, draw.randint(5, 80)),
                    "#" * draw.randint(1, 9) + " " + line,
                    "   ".join(draw.choices(COMMON, k=20)),
                ))
            )  # fmt: skip
        draw.shuffle(parts)
        yield draw.choice(("\n", "\n\n", " ", "\r\n")).join(parts)


def unusual(draw: random.Random) -> Iterator[str]:
    """Yields texts without words, without letters, without spaces, in other scripts."""
    yield from (
        "",
        " ",
        "\n\n",
        "\x00",
        "...",
        "#",
        "word",
        "•",
        "。",
        "\u200b",
        "\xa0",
        "!!!",
        "the\n" * 60,
        "\t" * 9 + "the.",
    )
    yield "北京是中国的首都。" * 40
    yield "Это предложение на русском языке. " * 12
    yield "\n".join(f"{number} {number * 7}" for number in range(120))
    yield "-" * 500 + "\n" + prose(draw)
    yield "\n".join("| " + " | ".join(draw.choices(COMMON, k=4)) + " |" for _ in range(30))
    yield prose(draw).upper()
    yield prose(draw, 300, 0.5)
    yield prose(draw).replace(" ", "\n")
    yield prose(draw).replace(" ", "")


FAMILIES = (
    lengths,
    word_lengths,
    symbols,
    line_beginnings,
    repeated_lines,
    repeated_phrases,
    web_lines,
    short_lines,
    mixtures,
    unusual,
)


def pieces() -> list[str]:
    """Returns pieces without spaces: words of the corpus, and parts put together at random."""
    draw = random.Random(21)
    parts = (
        *ODD, "word", "Word", "WORD", "a", "A", "e.g.", "don't", "’s", "n't", "10", "km", "$", "€", "3.14", "...", "…", "..",
        *"\"'“”‘’()[]{}<>.,:;!?/@#•*&_~^|+-=%`—–©°", "--", "http://", "www.", ".com", "😀", "é", "É", "中文", "1", "US$",
    )  # fmt: skip
    found = [*ODD, *COMMON[:20]]
    found += ["".join(draw.choices(parts, k=draw.randint(1, 5))) for _ in range(3000)]
    return sorted({piece for piece in found if not piece.count(" ")})


def lines() -> list[str]:
    """Returns lines of some sentences, with odd spaces."""
    draw = random.Random(22)
    parts = (
        "Hello",
        "world",
        ".",
        "!",
        "...",
        "?",
        " ",
        " ",
        "  ",
        "\t",
        ")",
        '"',
        "U.S.",
        "Mr.",
        "\xa0",
        "(",
        "-",
        "e.g.",
        "？",
    )
    found = ["".join(draw.choices(parts, k=draw.randint(2, 9))) for _ in range(1000)]
    return [*found, *(" ".join(sentence(draw) for _ in range(draw.randint(1, 6))) for _ in range(200))]
