"""Reads a SentencePiece model file into a tokenizer of the `tokenizers` library that gives the same ids."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from toolkit.sentencepiece_bpe import merges

SPACE = "▁"
NEVER = -1000.0
"""Score, in nats, of pieces that no text is encoded to: any other segmentation is more likely."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # wire types
_COMPOSED = ("nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")


@dataclass
class SentencePieceModel:
    """The fields of a model file that determine the ids; defaults as in sentencepiece_model.proto."""

    pieces: list[tuple[str, float, int]]
    kind: int = UNIGRAM
    byte_fallback: bool = False
    unknown_id: int = 0
    end_id: int = 2
    suffix_space: bool = False
    normalization: str = ""
    character_map: bytes = b""
    dummy_prefix: bool = True
    strip_spaces: bool = True
    escape_spaces: bool = True
    types: dict[int, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.types = defaultdict(list)
        for piece, _, kind in self.pieces:
            self.types[kind].append(piece)

    @property
    def unspelt(self) -> list[str]:
        """The special pieces: text with their spelling is not encoded to them."""
        return [piece for kind in (CONTROL, UNKNOWN, UNUSED, BYTE) for piece in self.types[kind]]

    @property
    def end_of_text(self) -> str | None:
        """The piece that ends a text; None if the model has none."""
        known = 0 <= self.end_id < len(self.pieces) and self.pieces[self.end_id][2] == CONTROL
        return self.pieces[self.end_id][0] if known else None


def read_sentencepiece_model(data: bytes) -> SentencePieceModel:
    """Parses a model file.

    Raises:
        ValueError: If this is not a model file, or of a kind that is not supported; names the reason.
    """
    try:
        pieces, trainer, normalizer = [], {}, {}
        for number, value in _fields(data):
            if number == 1:
                entry = dict(_fields(value))
                [score] = struct.unpack("<f", entry.get(2, bytes(4)))
                pieces.append((entry[1].decode(), score, entry.get(3, NORMAL)))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        model = SentencePieceModel(
            pieces,
            kind=trainer.get(3, UNIGRAM),
            byte_fallback=bool(trainer.get(35, False)),
            unknown_id=trainer.get(40, 0),
            end_id=trainer.get(42, 2),
            suffix_space=bool(trainer.get(24, False)),
            normalization=normalizer.get(1, b"").decode(),
            character_map=normalizer.get(2, b""),
            dummy_prefix=bool(normalizer.get(3, True)),
            strip_spaces=bool(normalizer.get(4, True)),
            escape_spaces=bool(normalizer.get(5, True)),
        )
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"it is no SentencePiece model, or a damaged one ({error})") from None
    _check(model)
    return model


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each field of a protobuf message: an integer, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if wire == _BYTES:
            size, position = _varint(data, position)
        else:
            size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}[wire]
        if position + size > len(data):
            raise IndexError("it ends too early")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def _check(model: SentencePieceModel) -> None:
    names = [piece for piece, *_ in model.pieces]
    if len(names) < 2 or len(set(names)) < len(names) or not 0 <= model.unknown_id < len(names):
        raise ValueError("it is no SentencePiece model, or a damaged one")
    if model.kind not in (UNIGRAM, BPE):
        raise ValueError("it is a SentencePiece model of words or characters; BPE and Unigram are read")
    if model.suffix_space or not model.escape_spaces:
        raise ValueError(
            "it is a SentencePiece model with treat_whitespace_as_suffix or without escape_whitespaces,\n"
            "which are not supported"
        )


def convert(model: SentencePieceModel) -> Tokenizer:
    """Returns the tokenizer; control pieces are its special tokens.

    Of segmentations that are about equally likely under a Unigram model ("*****" into "**" and "***"), it may choose
    another one than SentencePiece, which adds in single precision. UnigramEncoder gives SentencePiece's ids.
    """
    tokenizer = Tokenizer(_bpe(model) if model.kind == BPE else _unigram(model))
    tokenizer.normalizer = normalizers.Sequence(list(_normalizers(model)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(_cuts(model)))
    strip = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = [AddedToken(piece, special=True, normalized=False) for piece in model.types[CONTROL]]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _normalizers(model: SentencePieceModel) -> Iterator[normalizers.Normalizer]:
    # The library maps a grapheme by its first code points or, from 6 bytes on, character by character;
    # SentencePiece maps the longest known sequence. With NFC and "\r\n" replaced first, both agree except for
    # rare graphemes: a compatibility character with a mark (a ligature with an accent) loses the mark.
    if model.character_map:
        if model.normalization in _COMPOSED:
            yield normalizers.NFC()
        mapped = normalizers.Precompiled(model.character_map)
        yield normalizers.Replace("\r\n", mapped.normalize_str("\r") + mapped.normalize_str("\n"))
        yield mapped
    if model.strip_spaces:
        yield normalizers.Replace(Regex(r"\A +"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
    yield normalizers.Replace(" ", SPACE)
    if model.strip_spaces:
        yield normalizers.Replace(Regex(rf"{SPACE}+\z"), "")
    if model.dummy_prefix:
        yield normalizers.Prepend(SPACE)


def _cuts(model: SentencePieceModel) -> Iterator[pre_tokenizers.PreTokenizer]:
    """Yields splits of the normalized text that do not change the ids of the model."""
    if model.kind == BPE and model.types[USER_DEFINED]:
        yield _split(any_of(model.types[USER_DEFINED]))
    elif model.kind == UNIGRAM:
        # an unknown character would be less likely than "</s>", which contains it
        known = {piece for piece in model.types[NORMAL] if len(piece) == 1}
        if unknown := {letter for piece in model.unspelt for letter in piece} - known:
            yield _split(any_of(unknown))
    if not any(
        SPACE in piece.lstrip(SPACE) for kind in (NORMAL, USER_DEFINED) for piece in model.types[kind]
    ):
        yield _split(f"{SPACE}*[^{SPACE}]+|{SPACE}+")  # for speed: short parts are cached; changes no id
    if model.kind == BPE and model.types[USER_DEFINED]:
        yield _split(_first_parts(model))


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _first_parts(model: SentencePieceModel) -> str:
    """Matches the first piece of a text such as "</s>", which the model would otherwise take for the control piece."""
    merging = _bpe(model, ignore_merges=False)
    ends = {piece: merging.tokenize(piece)[0].offsets[1] or 1 for piece in model.unspelt}
    return "|".join(
        rf"\A{re.escape(piece[:end])}(?={re.escape(piece[end:])}\z)"
        for piece, end in ends.items()
        if piece[end:]
    )


def any_of(words: Iterable[str]) -> str:
    """Returns a regular expression that matches the longest possible of the words."""
    return "|".join(re.escape(word) for word in sorted(words, key=lambda word: (-len(word), word)))


def _unigram(model: SentencePieceModel) -> models.Unigram:
    best = max(score for _, score, kind in model.pieces if kind == NORMAL)
    unspelt = set(model.unspelt)
    pieces = [
        # a user-defined piece is more likely than any other segmentation of its bytes
        (
            piece,
            NEVER
            if piece in unspelt
            else len(piece.encode()) * best - 0.1
            if kind == USER_DEFINED
            else score,
        )
        for piece, score, kind in model.pieces
    ]
    return models.Unigram(pieces, model.unknown_id, model.byte_fallback)


def _bpe(model: SentencePieceModel, ignore_merges: bool = True) -> models.BPE:
    return models.BPE(
        {piece: number for number, (piece, *_) in enumerate(model.pieces)},
        merges([(piece, score) for piece, score, kind in model.pieces if kind == NORMAL]),
        unk_token=model.pieces[model.unknown_id][0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=ignore_merges
        and bool(
            model.types[USER_DEFINED]
        ),  # user-defined pieces are split off first: no merges lead to them
    )
