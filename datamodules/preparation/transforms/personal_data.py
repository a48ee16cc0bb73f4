"""Replaces personal data and secrets by placeholders."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import pyarrow

from core.contracts import Transform
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.transforms.key_forms import keys
from toolkit.arrow_columns import strings

Kind = Literal["KEY", "EMAIL", "IBAN", "CARD", "SSN", "IPV6", "IPV4", "PHONE"]
Place = tuple[int, int]


class Found(NamedTuple):
    """One piece of personal data.

    Attributes:
        start: Its first character.
        end: The character behind its last one.
        kind: Its type.
    """

    start: int
    end: int
    kind: Kind


@technique(
    paper="FineWeb, arXiv:2406.17557, section 3.6 (emails, public IP addresses); ISO/IEC 7812-1 (cards), "
    "ISO 13616-1 (IBAN), ITU-T E.164 (telephones)"
)
class PersonalData(Transform):
    """Replaces personal data by the name of its type: `<EMAIL>`, `<PHONE>`, `<IPV4>`, `<IPV6>`, `<CARD>`, `<IBAN>`...

    Each type is a regular expression and a check. No document is dropped; the report counts what was replaced.

    - `KEY`: keys of AWS, GitHub, GitLab, Slack, Google, Stripe, OpenAI, Anthropic, Hugging Face, npm, PyPI and others,
      JSON web tokens, private keys in PEM and PGP.
    - `EMAIL`: with a known top-level domain; not the user and host of a URL, of `git@host:path` or of code.
    - `IBAN`: length of its country and checksum. `CARD`: prefix and length of its issuer, groups, Luhn checksum.
    - `SSN` (USA): numbers that were issued, written with hyphens, or in any way behind words such as "SSN".
    - `IPV4`, `IPV6`: addresses of the public internet; not versions, section numbers, networks or reserved ones.
    - `PHONE`: international numbers, usual national forms, and any number behind words such as "phone".

    Names and postal addresses are not found: they have no form. The time is linear in the text's length.

    Args:
        types: What is replaced; the order does not matter.

    Raises:
        ConfigError: If there are no types.

    Example:
        data:
          init_args:
            transforms:
              - class_path: PersonalData
                init_args: {types: [EMAIL, PHONE, IPV4, IPV6, CARD, IBAN, SSN, KEY]}
    """

    def __init__(
        self, types: Sequence[Kind] = ("KEY", "EMAIL", "IBAN", "CARD", "SSN", "IPV6", "IPV4", "PHONE")
    ) -> None:
        if unknown := [kind for kind in types if kind not in _FINDERS]:
            raise ConfigError(f"PersonalData.types has {unknown[0]!r}; there are {', '.join(_FINDERS)}.")
        if not types:
            raise ConfigError(
                "PersonalData.types is empty: name what is replaced, or leave the transform out."
            )
        self.types = [kind for kind in _FINDERS if kind in types]
        self._counts: Counter[str] = Counter()

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the types, in the order in which they are looked for."""
        return {"types": self.types}

    def take_counts(self) -> Mapping[str, int]:
        """Returns how much was replaced since the last call, by type."""
        counts, self._counts = self._counts, Counter()
        return counts

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Replaces what is found in each text."""
        texts = batch["text"].to_pylist()
        redacted = [self.redacted(text) for text in texts]
        if redacted == texts:
            return batch
        return batch.set_column(batch.schema.get_field_index("text"), "text", strings(redacted))

    def redacted(self, text: str) -> str:
        """Returns one document's text with placeholders, and counts them."""
        pieces, at = [], 0
        for start, end, kind in find(text, self.types):
            self._counts[f"{kind} replaced"] += 1
            pieces += [text[at:start], f"<{kind}>"]
            at = end
        return "".join([*pieces, text[at:]]) if pieces else text


def find(text: str, types: Sequence[Kind]) -> list[Found]:
    """Returns the personal data of some types in a text, in its order; where two overlap, the one of the first type."""
    found: list[Found] = []
    taken = bytearray()  # 1 for each character that is part of something
    for kind in types:
        for start, end in _FINDERS[kind](text):
            taken = taken or bytearray(len(text))
            if taken.find(1, start, end) < 0:
                taken[start:end] = b"\1" * (end - start)
                found.append(Found(start, end, kind))
    return sorted(found)


# --- email addresses --------------------------------------------------------------------------------------------------

_COUNTRIES = frozenset(
    re.findall(
        r"\w+",
        "ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt bw by bz ca cc cd "
        "cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm fo fr ga gd ge "
        "gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg kh "
        "ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms mt mu mv mw "
        "mx my mz na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw sa sb "
        "sc sd se sg sh si sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug uk "
        "us uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw",
    )
)
_GENERIC = frozenset(
    re.findall(
        r"\w+",
        "academy aero africa agency amsterdam app arpa art asia associates barcelona bayern berlin bio biz blog brussels "
        "business cafe capital care careers cat center church city clinic cloud club coach codes coffee college com "
        "community company computer construction consulting coop country dance date dental dentist design dev digital "
        "direct directory doctor earth edu education email energy engineer engineering enterprises estate events example "
        "exchange expert family farm fashion finance financial fit fitness foundation fund fyi gallery games garden global "
        "gmbh gov graphics group guide guru hamburg health help history hospital host hotel house immo inc info ink "
        "institute insure int international investments istanbul jobs koeln kitchen law lawyer legal life limited link "
        "live llc london ltd love management market marketing mba media melbourne memorial mil mobi moscow museum music "
        "nagoya name net network news ngo ninja nyc one ong online org page paris partners parts party pet photo photography "
        "photos physio pictures post press pro productions properties property pub quebec realestate recipes rehab rent "
        "repair report rest restaurant reviews rocks sale salon school science scot security services shop show site social "
        "software solar solutions space store studio style support surf swiss sydney systems taipei tax team tech "
        "technology tel theater tips today tokyo tools top tours town toys trade training travel tube university vegas "
        "ventures vet video villas vision wales wang watch website wedding wien wiki win wine work works world xyz yoga "
        "zone zuerich",
    )
)
_EAST_ASIAN = "\u2e80-\uffff"
"""Characters that stand beside an address without a space between."""
_DOMAIN = re.compile(
    r"@((?:[^\W_%s](?:[-%s]{0,61}[^\W_%s])?\.){1,10}(?:xn--[a-z0-9-]{2,59}|[^\W\d_%s]{2,24}))(?![-%s])".replace(
        "[-%s]", rf"(?:-|[^\W{_EAST_ASIAN}])"
    ).replace("%s", _EAST_ASIAN)
)
_LOCAL = re.compile(rf"[^\W{_EAST_ASIAN}](?:[.+%'-]|[^\W{_EAST_ASIAN}]){{0,63}}\Z")


def _emails(text: str) -> Iterator[Place]:
    """A domain that ends in a known top-level domain, and what before its @ may be a name."""
    if "@" not in text:
        return
    for match in _DOMAIN.finditer(text):
        at, end = match.start(), _end_of_domain(match)
        before = text[max(0, at - 130) : at]
        local = _LOCAL.search(before, max(0, len(before) - 64))
        if not end or not local or _is_no_name(before, local) or text[end : end + 1] in ("(", "["):
            continue
        if text[end : end + 1] == ":" and re.match(r"[\w/~]", text[end + 1 : end + 2]):  # git@host:path
            continue
        yield at - len(local[0]), end


def _end_of_domain(match: re.Match[str]) -> int:
    """Returns where the domain ends, without the sentence that may begin behind its last dot; 0 if it is none."""
    labels = match[1].split(".")
    if len(labels) > 2 and labels[-1].istitle() and labels[-1].lower() not in _GENERIC | _COUNTRIES:
        labels.pop()
    last = labels[-1]
    if last.startswith("xn--") or (
        last.lower() in _GENERIC | _COUNTRIES and (last in (last.lower(), last.upper(), last.title()))
    ):
        return match.start(1) + len(".".join(labels))
    return 0


def _is_no_name(before: str, local: re.Match[str]) -> bool:
    if local[0].endswith(".") or ".." in local[0]:
        return True
    if before[local.start() - 1 : local.start()] in ("@", "/", "$", "{", "\\") and local.start():
        return True
    word = before[: local.start()].rsplit(maxsplit=1)[-1:] or [""]
    _, colon, rest = word[0].rpartition("://")
    return bool(colon) and not re.search(r"[/?=&]", rest)  # the user of a URL


# --- what numbers stand in --------------------------------------------------------------------------------------------

_RUN = re.compile(r"[+(]?\d[\d ().+/\u2010-\u2013-]{6,}", re.ASCII)
_BEHIND = 4
"""Characters behind a run that a pattern may look at; too few for a number of their own."""


@lru_cache(maxsize=1)  # several types ask for those of one text
def _runs(text: str) -> list[Place]:
    """Returns where there are digits, and between them what numbers are written with."""
    return [match.span() for match in _RUN.finditer(text)]


def _in_runs(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    for start, end in _runs(text):
        yield from pattern.finditer(text, start, end + _BEHIND)


# --- numbers with checksums -------------------------------------------------------------------------------------------

_IBAN_LENGTHS = {
    country: int(length)
    for length, countries in {
        "15": "NO",
        "16": "BE",
        "18": "DK FI FO GL NL SD",
        "19": "MK SI",
        "20": "AT BA EE KZ LT LU MN XK",
        "21": "CH HR LI LV",
        "22": "BG BH CR DE GB GE IE ME RS VA",
        "23": "AE GI IL IQ OM TL",
        "24": "AD CZ ES MD PK RO SA SE SK TN VG",
        "25": "LY PT ST",
        "26": "IS TR",
        "27": "BI DJ FR GR IT MC MR SM",
        "28": "AL AZ BY CY DO GT HU LB NI PL SV",
        "29": "BR EG PS QA UA",
        "30": "JO KW MU YE",
        "31": "MT SC",
        "32": "LC",
        "33": "RU",
    }.items()
    for country in countries.split()
}
_IBAN = re.compile(  # its check digits: few places have them
    r"\d\d(?<=[A-Za-z]{2}\d\d)(?<![A-Za-z0-9_][A-Za-z]{2}\d\d)(?=[ -]?[A-Za-z0-9]{4})", re.ASCII
)


def _iban_form(length: int) -> re.Pattern[str]:
    groups, rest = divmod(length - 9, 4)  # the last one has 1 to 4 characters
    form = rf"[A-Z]{{2}}\d\d([ -]?)[A-Z0-9]{{4}}(?:\1[A-Z0-9]{{4}}){{{groups}}}\1[A-Z0-9]{{{rest + 1}}}(?![A-Z0-9_])"
    return re.compile(form, re.IGNORECASE)


_IBAN_FORMS = {length: _iban_form(length) for length in set(_IBAN_LENGTHS.values())}


def _ibans(text: str) -> Iterator[Place]:
    """Country, length, and the remainder 1 modulo 97 of its characters as numbers, the first four last."""
    for match in _IBAN.finditer(text):
        start = match.start() - 2
        length = _IBAN_LENGTHS.get(text[start : start + 2].upper())
        if length and (whole := _IBAN_FORMS[length].match(text, start)):
            code = re.sub("[ -]", "", whole[0]).upper()
            if int("".join(str(int(c, 36)) for c in code[4:] + code[:4])) % 97 == 1:
                yield whole.span()


_CARD = re.compile(
    r"(?<![\w+])(?<!\d[ .,-])(?:\d{14,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{4,5})"
    r"(?!\w|[.-]\d|,\d{1,2}(?!\d)| \d{4})",
    re.ASCII,
)
_ISSUERS = re.compile(  # without spaces: Visa, Mastercard, American Express, Discover, JCB, Diners, UnionPay, Mir, Maestro
    r"4(?:\d{15}|\d{18})|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}"
    r"|(?:6011|64[4-9]\d|65\d\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|3(?:0[0-5]|[689]\d)\d{11}|62\d{14,17}|220[0-4]\d{12}"
    r"|(?:50|5[6-8]|6[37])\d{14}",
    re.ASCII,
)
_DOUBLED = str.maketrans("0123456789", "0246813579")


def _cards(text: str) -> Iterator[Place]:
    for match in _in_runs(_CARD, text):
        digits = match[0].replace(" ", "").replace("-", "")
        if _ISSUERS.fullmatch(digits) and _luhn(digits):
            yield match.span()


def _luhn(digits: str) -> bool:
    """Whether the digits, every second from the right doubled and its digits added, are a multiple of 10 in sum."""
    return sum(map(int, digits[::-2] + digits[-2::-2].translate(_DOUBLED))) % 10 == 0


_SSN = re.compile(
    r"(?<![\w$])(?<!\w[-/.])(\d{3})([-\u2010-\u2013])(\d{2})\2(\d{4})(?![\w/]|[-\u2010-\u2013.]\w)", re.ASCII
)
_SSN_DIGITS = re.compile(r"(?<![\w$-])(\d{3})([ -]?)(\d{2})\2(\d{4})(?!\w|-\d)", re.ASCII)
_SSN_BEFORE = re.compile(
    r"(?<![A-Za-z])(?:SSNs?|soc(?:ial|\.)?[ -]?sec(?:urity|\.)?)[^\d\n]{1,24}\Z", re.IGNORECASE | re.ASCII
)
_PART_BEFORE = re.compile(
    r"(?:part|item|order|model|sku|ref|catalog(?:ue)?)[ .:#]{0,3}(?:no|num(?:ber)?)?[ .:#]{0,3}\Z", re.I
)


def _social_security_numbers(text: str) -> Iterator[Place]:
    """Area 001 to 899 without 666, group and serial number not 0: what the administration issues."""
    for pattern in (_SSN, _SSN_DIGITS):
        for match in _in_runs(pattern, text):
            area, _, group, serial = match.groups()
            before = text[max(0, match.start() - 48) : match.start()]
            issued = area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"
            named = _SSN_BEFORE.search(before) is not None
            if issued and (named or (pattern is _SSN and not _PART_BEFORE.search(before))):
                yield match.span()


# --- addresses of computers -------------------------------------------------------------------------------------------

_RESERVED = [  # IANA's registries of special-purpose addresses, and multicast
    ipaddress.IPv4Network(block)
    for block in re.findall(
        r"\S+",
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
        "192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3",
    )
]
_RESERVED6 = [
    ipaddress.IPv6Network(block) for block in ("2001:db8::/32", "2001::/32", "2002::/16", "3fff::/20")
]
_IPV4 = re.compile(
    r"(?<![\w.])(?<![A-Za-z][-/])(?<![=<>~!]=)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w]|\.\w|-[A-Za-z])",
    re.ASCII,
)
_NO_ADDRESS_BEFORE = re.compile(
    r"(?:\b(?:versions?|ver|v|release|revision|rev|build|firmware|driver|oid|section|sec|chapter|clause|table|figure|fig"
    r"|appendix)\b|§)[ .:#=\"']{0,4}\Z",
    re.I,
)
_OBJECT_IDENTIFIERS = ("1.2.", "1.3.", "2.5.")
_IPV6 = re.compile(
    r"[23](?<![\w:.-][23])[0-9a-f]{3}:(?:[0-9a-f]{0,4}:){1,6}[0-9a-f]{0,4}(?![\w:])", re.IGNORECASE
)


def _ipv4_addresses(text: str) -> Iterator[Place]:
    """Public addresses of hosts. Where the first three numbers are below 10 it is rather a version or a section."""
    for match in _in_runs(_IPV4, text):
        parts = match[0].split(".")
        if max(map(len, parts[:3])) == 1 or parts[-1] == "0" or match[0].startswith(_OBJECT_IDENTIFIERS):
            continue
        try:
            address = ipaddress.IPv4Address(match[0])
        except ValueError:
            continue
        before = text[max(0, match.start() - 16) : match.start()]
        if not any(address in block for block in _RESERVED) and not _NO_ADDRESS_BEFORE.search(before):
            yield match.span()


def _ipv6_addresses(text: str) -> Iterator[Place]:
    """Public addresses, 2000::/3; with less than three groups it is rather a slice of an array."""
    for match in _IPV6.finditer(text):
        written = match[0] if match[0].endswith("::") else match[0].rstrip(":")
        try:
            address = ipaddress.IPv6Address(written)
        except ValueError:
            continue
        groups = [group for group in written.split(":") if group]
        if len(groups) > 2 and not any(address in block for block in _RESERVED6):
            yield match.start(), match.start() + len(written)


# --- telephone numbers ------------------------------------------------------------------------------------------------

_INTERNATIONAL = re.compile(
    r"(?<![\w.+/-])(?:\+|00[ -]?(?=[1-9]))(\d{1,3}(?:[ .-]?\d|[ .-]?\(\d{1,5}\)[ .-]?\d|[ .-]?\d[ /-]\d){6,13}+)(?![\w.]\d|\d|[A-Za-z_])",
    re.ASCII,
)
_COUNTRY_CODES = re.compile(
    r"1[2-9]|7[3-9]|2[07]|3[0-469]|4[013-9]|5[1-8]|6[0-6]|8[1246]|9[0-58]"
    r"|2[1234569]\d|3[578]\d|42[013]|50\d|59\d|6[789]\d|80[08]|85[02356]|87\d|88[0168]|96\d|97\d|99[2-68]"
)
_NATIONAL = re.compile(
    r"(?<![\w.,+/$#])(?<![\d)][ -])(?<!\w-)(?:"
    r"(?:1[ .-])?(?:\([2-9]\d\d\)[ .-]?|[2-9]\d\d([ .-]))[2-9]\d\d(?(1)\1|[ .-])\d{4}"  # North America
    r"|0[1-9]([ .])\d\d(?:\2\d\d){3}(?! ?[\da-fA-F]{2}\b)"  # France
    r"|0[1-9]\d{0,3}(?:[ -]|/| / )\d{3,8}(?:[ -]\d{2,5}){0,3}"  # trunk prefix 0: Germany, United Kingdom, Japan...
    r"|\(0[1-9]\d{0,4}\)[ -]?\d{2,8}(?:[ -]\d{2,5}){0,3}"
    r"|\([1-9]\d\)[ ]?(?:9\d{4}|[2-5]\d{3})-\d{4}"  # Brazil
    r"|1[3-9]\d([ -])\d{4}\3\d{4}"  # China
    r")(?![\w]|[.,/-]\d|[ ]\d{3})",
    re.ASCII,
)  # fmt: skip
_NUMBER = re.compile(
    r"[+(]?(?<![\w.+$#/-][+(])(?<![\w.+$#/-])\d(?:[ ()./-]{0,3}\d){6,14}+(?!\w|[./-]\d)", re.ASCII
)
_PHONE_BEFORE = re.compile(
    r"(?:(?<![^\W_])(?:(?:tele)?phones?|telefon[eo]?|tel[eé]fono|t[eé]l[eé]phone|tfno|tlf|t[eé]l|fon|ph|fax|mobile?|mob|cell|"
    r"handy|hotline|whatsapp|sms|call|text|ring|dial|тел|телефон|contact number)(?![^\W_])|手机|电话|電話)"
    r"[\"']?[.:\uff1a#]?(?:\s{0,2}(?:no|number|us|me|him|her|at|on|is|nr|toll[ -]free)\b[.:]?){0,3}[\s:=\"'#]{0,4}\Z",
    re.IGNORECASE,
)
_ZIP = re.compile(r"\d{5}-\d{4}")
_DATE = re.compile(r"\d{4}([-./])\d\d\1\d\d|\d\d?([-./])\d\d?\2\d{4}")


def _phones(text: str) -> Iterator[Place]:
    for match in _in_runs(_INTERNATIONAL, text):
        if _is_international(match[0], match[1]):
            yield match.span()
    for match in _in_runs(_NATIONAL, text):
        if 9 <= _digits(match[0]) <= 12 and not _DATE.match(match[0]) and not _ZIP.fullmatch(match[0]):
            yield match.span()
    for match in _in_runs(_NUMBER, text):
        before = text[max(0, match.start() - 48) : match.start()]
        if _PHONE_BEFORE.search(before) and not _DATE.match(match[0]):
            yield match.span()


def _is_international(written: str, number: str) -> bool:
    digits = re.sub(r"\D", "", number)
    fraction = re.fullmatch(r"\+\d+\.(\d+)", written)  # a decimal, unless as WHOIS writes it
    short = bool(fraction) and len(fraction[1]) < 8  # type: ignore[index]
    return 9 <= len(digits) <= 15 and not short and _COUNTRY_CODES.match(digits) is not None


def _digits(text: str) -> int:
    return sum(map(str.isdigit, text))


_FINDERS: dict[Kind, Callable[[str], Iterator[Place]]] = {
    "KEY": keys,
    "EMAIL": _emails,
    "IBAN": _ibans,
    "CARD": _cards,
    "SSN": _social_security_numbers,
    "IPV6": _ipv6_addresses,
    "IPV4": _ipv4_addresses,
    "PHONE": _phones,
}
"""What finds each type, in their order of precedence."""
