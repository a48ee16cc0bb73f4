"""BPE as SentencePiece has it, Llama 2's for example: scores in GGUF files, merges in a tokenizer.json.

SentencePiece joins the two neighbours whose piece has the highest score, the `tokenizers` library those whose merge comes
first: with all pairs that make a piece, by score, the ids are the same. Spaces are `▁`; unknown characters are their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import ConfigError

__all__ = ["merges"]

SPACE, BYTE = "▁", 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

UNREACHED = -1e9
"""Score of pieces that no merge makes: letters, bytes and special tokens."""


def merges(pieces: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that concatenate to a piece, highest score first."""
    known = {piece for piece, _ in pieces}
    return [
        (piece[:cut], piece[cut:])
        for piece, _ in sorted(pieces, key=lambda pair: -pair[1])
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


def described(
    pieces: Sequence[tuple[str, float]], vocabulary: Mapping[str, int], unknown: str | None, prefix: bool
) -> dict[str, Any]:
    """Returns the parts of a tokenizer.json that differ from one tokenizer to another, but for its added tokens.

    Args:
        pieces: Pieces that text is merged to, and the score of each.
        vocabulary: Piece -> id.
        unknown: The piece for what has none.
        prefix: Whether texts begin with a space, which decoding removes.
    """
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    parts = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*parts, {"type": "Fuse"}, *after]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": dict(vocabulary),
            "merges": [list(pair) for pair in merges(pieces)],
        },
    }


def prefix_and_scores(found: Mapping[str, Any]) -> tuple[bool, dict[str, float]]:
    """Returns whether texts begin with a space, and the score of each piece, for a tokenizer.json with byte fallback.

    Raises:
        ConfigError: If it gives ids that no scores give.
    """
    model, added = found["model"], {token["content"] for token in found.get("added_tokens") or ()}
    vocabulary, added = model["vocab"], added | {model.get("unk_token")}
    if missing := [byte for byte in BYTES if byte not in vocabulary]:
        raise ConfigError(f"The tokenizer has no token {missing[0]}; llama.cpp needs one for each byte.")
    pieces = [piece for piece in vocabulary if piece not in added and piece not in BYTES]
    pairs = [
        tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]
    ]
    kept = [pair for pair in pairs if "".join(pair) in vocabulary and not {"".join(pair), *pair} & added]
    order = {piece: -float(rank) for rank, piece in enumerate(dict.fromkeys(map("".join, kept)))}
    wanted = merges([(piece, order.get(piece, UNREACHED)) for piece in pieces])
    in_turn = [
        piece
        for place, piece in enumerate(map("".join, kept))
        if not place or "".join(kept[place - 1]) != piece
    ]
    if model.get("ignore_merges") or set(kept) != set(wanted) or len(in_turn) != len(order):
        raise ConfigError(
            "The tokenizer's merges are not those of SentencePiece, all pairs that make a token, by its score.\n"
            "GGUF has scores alone; `--format hf` writes any."
        )
    return _prefix(found, pieces), {piece: order.get(piece, UNREACHED) for piece in vocabulary}


def _prefix(found: Mapping[str, Any], pieces: Sequence[str]) -> bool:
    """Returns whether texts begin with a space.

    Raises:
        ConfigError: If something else is done to them, too.
    """
    prefix, spaces = False, False
    whole = not any(SPACE in piece[1:] for piece in pieces)  # then cuts before spaces change no id
    runs = not any(SPACE in piece.lstrip(SPACE) for piece in pieces)
    for step in (
        *_steps(found.get("normalizer"), "normalizers"),
        *_steps(found.get("pre_tokenizer"), "pretokenizers"),
    ):
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                spaces = True
            case {"type": "Metaspace", "replacement": "▁"} if whole or step.get("split") is False:
                prefix, spaces = step.get("prepend_scheme", "always") != "never", True
            case {"type": "Split", "pattern": {"String": " "}} if spaces:
                pass  # there are none left
            case {"type": "Split", "pattern": {"Regex": r"▁*[^▁]+|▁+"}, "behavior": "Isolated"} if runs:
                pass
            case _:
                raise ConfigError(
                    f"GGUF has no form for the {step.get('type')} that the tokenizer applies to texts.\n"
                    "`--format hf` writes any."
                )
    if not spaces:
        raise ConfigError("The tokenizer keeps spaces; GGUF's llama writes ▁ for them.")
    return prefix


def _steps(found: Mapping[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if found is None:
        return []
    return (
        [part for step in found[key] for part in _steps(step, key)]
        if found["type"] == "Sequence"
        else [dict(found)]
    )
