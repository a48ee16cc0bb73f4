"""Words and sentences of English text, split as spaCy's blank English pipeline splits them, on which datatrove's rules rely."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple

__all__ = ["MOST_REMEMBERED", "SENTENCE_ENDS", "count_sentences", "words", "words_of"]

MOST_REMEMBERED = 1 << 17
"""Pieces between spaces whose words are remembered; then all are forgotten (some 30 MB)."""

SPLIT_BEFORE = {
    "'m 'ma": "i",
    "'ll 'll've 'd 'd've": "i you he she it we they who what when where why how there that this these those",
    "'ve": "i you we they who what when where why how there these those could might must should would",
    "'re": "you we they who what when where why how there these those",
    "'s": "he she it who what when where why how there that this",
    "n't n't've": "ca could do does did had may might must need ought sha should wo would",
    "n't": "ai are is was were have has dare",
}
"""Endings that are words of their own, behind these; also without the apostrophe, and with a capital."""

NOT_SPLIT = "ill its hell shell shed were well whore"
SPLIT_AT = (
    "y'|all y|all how|'d|'y not|'ve not|ve can|not gon|na got|ta let|'s c'm|on",
    "How|'d|'y Not|'ve Not|ve Can|not Gon|na Got|ta Let|'s C'm|on",
)
WHOLE = (
    "a.m. Adm. Bros. co. Co. Corp. D.C. Dr. e.g. E.g. E.G. Gen. Gov. i.e. I.e. I.E. Inc. Jr. Ltd. Md. Messrs. Mo. Mont. "
    "Mr. Mrs. Ms. p.m. Ph.D. Prof. Rep. Rev. Sen. St. vs. v.s. Mt.",
    "Ak. Ala. Ariz. Ark. Calif. Colo. Conn. Del. Fla. Ga. Ia. Id. Ill. Ind. Kan. Kans. Ky. La. Mass. Mich. Minn. Miss. "
    "N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Okla. Ore. Pa. S.C. Tenn. Va. Wash. Wis.",
    "Jan. Feb. Mar. Apr. Jun. Jul. Aug. Sep. Sept. Oct. Nov. Dec.",
    "and/or w/o ma'am Ma'am o'clock O'clock 'bout 'cause 'Cause 'cos 'Cos 'coz 'Coz 'cuz 'Cuz 'd 'em 'll 'nuff 're 's 'S ‘s ‘S",
    "doin' Doin' goin' Goin' nothin' Nothin' nuthin' Nuthin' ol' Ol' somethin' Somethin' lovin' Lovin' havin' Havin'",
    "ä. ö. ü. — ' '' \\\") \\t \\n <space> C++",
)
"""Pieces that are one word, although something in them would be split."""

FACES = (
    ":) :)) :))) :-) :-)) :-))) (: (-: =) (= :] :-] [: [-: [= =] :o) (o: :} :-} 8) 8-) (-8 ;) ;-) (; (-; :( :(( :((( "
    ":-( :-(( :-((( ): )-: =( >:( :') :'-) :'( :'-( :/ :-/ =/ =| :| :-| ]= =[ :1 :P :-P :p :-p :O :-O :o :-o :0 :-0 :() "
    ">:o :* :-* :3 :-3 =3 :> :-> :X :-X :x :-x :D :-D ;D ;-D =D xD XD xDD XDD 8D 8-D",
    "^_^ ^__^ ^___^ >.< >.> <.< ._. ;_; -_- -__- v.v V.V v_v V_V o_o o_O O_o O_O 0_o o_0 0_0 o.O O.o O.O o.o 0.0 o.0 0.o "
    "@_@ <3 <33 <333 </3 (^_^) (-_-) (._.) (>_<) (*_*) (¬_¬) ಠ_ಠ ಠ︵ಠ (ಠ_ಠ) ¯\\(ツ)/¯ (╯°□°）╯︵┻━┻ ><(((*>",
)

QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉〈〉⟦⟧"
PUNCTUATION = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
MONEY = "$£€¥฿₽﷼₴₠₡₢₣₤₥₦₧₨₩₪₫₭₮₯₰₱₲₳₵₶₷₸₹₺₻₼₾₿"
UNITS = (
    "km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh mph hPa Pa mbar "
    "mb MB kb KB gb GB tb TB T G M K %"
)
HYPHENS = "--- -- —— - – — ~"
_TERMINAL = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 "
    "17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 "
    "2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb "
    "fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 "
    "111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 "
    "1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 "
    "16b37-16b38 16b44 16e98 1bc9f 1da88"
)

_SUFFIX = 8
"""Characters of the longest suffix, and of what is before it; but for dots, of which there may be any number."""

_LONGEST, _LONGEST_ADDRESS = 4_000, 2_000
"""Characters of what is split in one go, and looks like an address."""

_ALONE = frozenset(QUOTES + PUNCTUATION) - {"…"}
"""Affixes of one character that no longer one begins or ends with."""

_DIGITS = frozenset("0123456789")
_PLAIN_SIGNS = frozenset(".-+*^,:<>=/~")
"""What words are split at in the middle, of ASCII."""

_HOST = r"(?:(?:[A-Za-z0-9\xa1-\uffff][A-Za-z0-9\xa1-\uffff_-]{0,62})?[A-Za-z0-9\xa1-\uffff]\.)+"
_OCTETS = (
    r"(?!(?:10|127)(?:\.\d{1,3}){3})(?!(?:169\.254|192\.168)(?:\.\d{1,3}){2})(?!172\.(?:1[6-9]|2\d|3[01])(?:\.\d{1,3}){2})"
    r"(?:[1-9]\d?|1\d\d|2[01]\d|22[0-3])(?:\.(?:1?\d{1,2}|2[0-4]\d|25[0-5])){2}\.(?:[1-9]\d?|1\d\d|2[0-4]\d|25[0-4])"
)


SENTENCE_ENDS = frozenset(
    chr(code)
    for first, _, last in (part.partition("-") for part in _TERMINAL.split())
    for code in range(int(first, 16), int(last or first, 16) + 1)
)
"""The Unicode property Sentence_Terminal: what ends sentences, in all scripts."""


class _Rules(NamedTuple):
    prefix: re.Pattern[str]
    suffix: re.Pattern[str]
    infix: re.Pattern[str]
    address: re.Pattern[str]
    user_address: re.Pattern[str]
    special: dict[str, tuple[str, ...]]


class _Remembered(dict[str, tuple[str, ...]]):
    """Words of a piece between spaces, found when they are first asked for."""

    def __missing__(self, piece: str) -> tuple[str, ...]:
        if len(self) >= MOST_REMEMBERED:
            self.clear()
        found = _found(piece)
        if len(piece) < 64:
            self[piece] = found
        return found


def words(text: str) -> list[str]:
    """Returns the words of a text; punctuation, and endings such as "n't" and "'s", are words of their own.

    They are those of spaCy 3.8's tokenizer for English: what is listed, affixes, addresses, what is within a piece.
    """
    return list(chain.from_iterable(map(_REMEMBERED.__getitem__, text.split())))


def words_of(piece: str) -> tuple[str, ...]:
    """Returns the words of a piece of text that has no spaces."""
    return _REMEMBERED[piece]


def count_sentences(text: str, enough: int | None = None) -> int:
    """Returns the number of sentences of a text, one line or several; not more than are enough, if that is given.

    A sentence ends with one of `SENTENCE_ENDS` and the punctuation that follows: the rule of spaCy's sentencizer.
    """
    sentences, ended = 0, True
    for piece in _SPACED.findall(text) if _ODD_SPACE.search(text) else text.split():
        for word in (piece,) if piece.isspace() else _REMEMBERED[piece]:
            ends = word in SENTENCE_ENDS
            if ended and (not sentences or not (ends or _is_punctuation(word))):
                sentences += 1
                if sentences == enough:
                    return sentences
                ended = False
            if ends:
                ended = True
    return sentences


_REMEMBERED = _Remembered()
_PLAIN = re.compile(r"([(\[\"'“‘]{0,2})([A-Za-z]*[a-z])(['’]s)?((?:[)\]\"'”’,;:!?]|\.(?!\.)){0,3})")
_SPACED = re.compile(r"\S+|(?<=\S)\s(?:\s+|(?<! ))|^\s+")  # one plain space belongs to the word before it
_ODD_SPACE = re.compile(r"\s\s|[^\S ]")


def _found(piece: str) -> tuple[str, ...]:
    special = _rules().special
    if piece in special:
        return special[piece]
    if match := _PLAIN.fullmatch(piece):  # most pieces
        front, word, ending, behind = match.groups()
        if not front and not ending and not behind:
            return (word,)
        found = (*front, *special.get(word, (word,)), *([ending] if ending else ()), *behind)
        if _apart()[1].isdisjoint(pairwise(found)):
            return found
    # a long piece is cut, or its time would grow with the square of its length
    parts = (piece[at : at + _LONGEST] for at in range(0, len(piece), _LONGEST))
    return tuple(word for part in parts for word in _split(part))


def _is_punctuation(word: str) -> bool:
    return all(unicodedata.category(character)[0] == "P" for character in word)


def _split(piece: str) -> list[str]:
    """Returns the words of a piece; those of a listed one also where it was taken apart, as in "Mr.Smith"."""
    found = list(_taken_apart(piece, _rules().special))
    apart, beginnings = _apart()
    if len(found) < 2 or beginnings.isdisjoint(pairwise(found)):
        return found
    longest = range(min(len(found), max(map(len, apart))), 1, -1)
    spans = [
        (n, at) for n in longest for at in range(len(found) - n + 1) if tuple(found[at : at + n]) in apart
    ]
    taken: set[int] = set()
    starts: dict[int, int] = {}
    for n, at in spans:
        if taken.isdisjoint(range(at, at + n)):
            taken.update(range(at, at + n))
            starts[at] = n
    for at in sorted(starts, reverse=True):
        found[at : at + starts[at]] = apart[tuple(found[at : at + starts[at]])]
    return found


@cache
def _apart() -> tuple[dict[tuple[str, ...], tuple[str, ...]], frozenset[tuple[str, ...]]]:
    """Returns, for what the listed pieces would be without the list, their words; and with what two words these begin."""
    special = _rules().special
    found = {tuple(_taken_apart(piece, {})): parts for piece, parts in special.items()}
    found = {apart: parts for apart, parts in found.items() if len(apart) > 1}
    return found, frozenset(apart[:2] for apart in found)


def _taken_apart(piece: str, special: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yields the words of a piece: what is in front, what is in the middle, what is behind."""
    rules = _rules()
    behind: list[str] = []
    while piece and piece not in special:
        front = _front(piece, rules)
        back = _back(piece, front, rules)
        if front and piece[front:] in special:
            back = len(piece)
        elif back < len(piece) and piece[:back] in special:
            front = 0
        if not front and back == len(piece):
            break
        if front:
            yield piece[:front]
        if back < len(piece):
            behind.append(piece[back:])
        piece = piece[front:back]
    if piece:
        yield from special.get(piece) or _middle(piece, rules)
    yield from reversed(behind)


def _front(piece: str, rules: _Rules) -> int:
    """Returns where the first affix of a piece ends; 0 if it begins with none."""
    first = piece[0]
    if first in _ALONE:
        return 1
    if (first.isalnum() and "$" not in piece) or not (match := rules.prefix.match(piece)):
        return 0
    return match.end()


def _back(piece: str, front: int, rules: _Rules) -> int:
    """Returns where the last affix of a piece begins, behind that in front; its length if it ends with none."""
    length, last = len(piece), piece[-1]
    if length == front:
        return length
    if last in _ALONE:
        return length - 1
    begin = front if piece.endswith("..") else max(front, length - _SUFFIX)
    end = piece[begin:]
    if end.isalpha() or last in _DIGITS:
        return length
    match = rules.suffix.search(end)
    return match.start() + begin if match else length


def _middle(piece: str, rules: _Rules) -> Iterable[str]:
    if piece.isalnum() or (_PLAIN_SIGNS.isdisjoint(piece) and piece.isascii()):
        return (piece,)
    if "." in piece and len(piece) < _LONGEST_ADDRESS:
        address = rules.user_address if "@" in piece else rules.address
        if address.match(piece):
            return (piece,)
    found = []
    start = 0
    for match in rules.infix.finditer(piece):
        begin, end = match.span()
        if begin:
            if begin > start:
                found.append(piece[start:begin])
            found.append(piece[begin:end])
            start = end
    if start < len(piece):
        found.append(piece[start:])
    return found


@cache
def _rules() -> _Rules:
    lower, upper, icons = _classes()
    letters = lower + upper
    either = re.escape(QUOTES + PUNCTUATION)
    shared = rf"\.\.+|[{either}{icons}]"
    units = "|".join(map(re.escape, sorted(UNITS.split(), key=len, reverse=True)))
    hyphens = "|".join(HYPHENS.split())
    money = rf"(?:US|[AC])\$|[{re.escape(MONEY)}]"
    suffixes = (
        f"……|{shared}",
        "['’][sS]|[—–]",
        rf"(?<=[0-9])(?:\+|{money}|{units})",
        r"(?<=°[FfCcKk])\.",
        rf"(?<=[0-9{lower}%²+|{either}-])\.",
        rf"(?<=[{upper}][{upper}])\.",
    )
    infixes = (
        rf"\.\.+|…|[{icons}]",
        "(?<=[0-9])[-+*^](?=[0-9-])",
        rf"(?<=[{lower}{re.escape(QUOTES)}])\.(?=[{upper}{re.escape(QUOTES)}])",
        rf"(?<=[{letters}]),(?=[{letters}])",
        rf"(?<=[{letters}0-9])(?:{hyphens}|[:<>=/])(?=[{letters}])",
    )
    scheme = r"(?:[\w+.-]{2,}://)?"
    rest = rf"(?:{_OCTETS}|{_HOST}[{lower}]{{2,63}})(?::\d{{2,5}})?(?:[/?#]\S*)?$"
    return _Rules(
        re.compile(rf"[§%=—–]|\+(?![0-9])|{shared}|{money}"),
        re.compile(f"(?:{'|'.join(suffixes)})$"),
        re.compile(
            f"(?=[-.+*^,:<>=/~…—–{icons}])(?:{'|'.join(infixes)})"
        ),  # most characters fail there at once
        re.compile(rf"{scheme}{rest}"),
        re.compile(rf"{scheme}(?:\S+(?::\S*)?@)?{rest}"),
        _special(),
    )


def _special() -> dict[str, tuple[str, ...]]:
    """Returns the pieces whose words are listed."""
    found: list[tuple[str, ...]] = [(word,) for word in " ".join((*WHOLE, *FACES)).split()]
    found += [(f"{letter}.",) for letter in "abcdefghijklmnopqrstuvwxyz"]
    found += [tuple(parts.split("|")) for parts in " ".join(SPLIT_AT).split()]
    found += [(str(hour), half) for hour in range(1, 13) for half in ("am", "a.m.", "pm", "p.m.")]
    found += [("°", letter, ".") for letter in "cfkCFK"]
    for endings, stems in SPLIT_BEFORE.items():
        for ending in endings.split():
            marked = re.findall("n't|'(?:ll|ve|re|[dms])|a", ending)
            bare = [part.replace("'", "") for part in marked]
            both = [stem for word in stems.split() for stem in (word, word.title())]
            found += [(stem, *end) for stem in both for end in (marked, bare)]
    whole = {spelling for word in NOT_SPLIT.split() for spelling in (word, word.title())}
    table = {"".join(parts): parts for parts in found if "".join(parts) not in whole}
    for parts in [*table.values()]:
        curly = tuple(part.replace("'", "’") for part in parts)
        table.setdefault("".join(curly), curly)
    return table


def _classes() -> tuple[str, str, str]:
    """Returns lower-case letters, upper-case letters (those without case are both) and icons, as parts of a class."""
    lower, upper, icons = [], [], []
    for code in chain(range(0x3000, 0x10000), range(0x3000), range(0x1F000, 0x1FC00)):
        character = chr(code)
        if character.isalpha():
            if not character.isupper():
                lower.append(code)
            if not character.islower():
                upper.append(code)
        elif unicodedata.category(character) == "So":
            icons.append(code)
    return _as_ranges(lower), _as_ranges(upper), _as_ranges(icons)


def _as_ranges(codes: list[int]) -> str:
    codes = sorted(codes)
    starts = [code for code, before in zip(codes, [-1, *codes], strict=False) if code != before + 1]
    ends = [code for code, after in zip(codes, [*codes[1:], -1], strict=True) if code + 1 != after]
    return "".join(f"{chr(start)}-{chr(end)}" for start, end in zip(starts, ends, strict=True))
