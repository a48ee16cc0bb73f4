"""What manifest.json of a prepared folder must say, whoever wrote it; and its checksum."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from toolkit.bounded import parse_json, plain_path

__all__ = ["CHECKSUM", "checksum", "parsed"]

CHECKSUM = "sha256"
"""The key of the manifest's own checksum; folders of earlier versions have none."""

_LEAST = {
    "vocab_size": 1,
    "end_of_text_id": 0,
    "train_tokens": 1,
    "validation_tokens": 1,
    "test_tokens": 1,
    "train_documents": 1,
    "validation_documents": 1,
    "test_documents": 1,
    "text_bytes": 0,
    "train_bytes": 0,
    "validation_bytes": 0,
    "test_bytes": 0,
    "source_bytes": 0,
    "lost_bytes": 0,
    "blank": 0,
    "unigram_loss": 0,
}
_REQUIRED = ("vocab_size", "end_of_text_id", "train_tokens", "unigram_loss")
_COUNTED = ("language_tokens", "license_tokens", "lengths", "rejected", "skipped", "left_out")
_DIGEST = re.compile("[0-9a-f]{64}")
_MOST = 1 << 62
_LARGEST_VOCABULARY = 1 << 32
"""Token ids are stored as uint16 or uint32."""


def parsed(content: bytes) -> dict[str, Any]:
    """Returns what a manifest holds, its types and ranges checked; not its checksum.

    Raises:
        ValueError: With what is wrong.
    """
    manifest = parse_json(content)
    if not isinstance(manifest, dict):
        raise ValueError("it is no manifest of prepared tokens")
    if missing := [name for name in _REQUIRED if name not in manifest]:
        raise ValueError(f"it does not say {missing[0]}")
    for name, least in _LEAST.items():
        if name in manifest:
            _number(name, manifest[name], least, integer=name != "unigram_loss")
    vocab_size, end = manifest["vocab_size"], manifest["end_of_text_id"]
    if vocab_size > _LARGEST_VOCABULARY:
        raise ValueError(f"vocab_size is {vocab_size:,}; token ids have 32 bits at most")
    if end >= vocab_size:
        raise ValueError(f"end_of_text_id is {end:,}, the vocabulary has {vocab_size:,} ids")
    for name in ("files", "extras"):
        _files(name, manifest.get(name, {}))
    if CHECKSUM in manifest and not _is_digest(manifest[CHECKSUM]):
        raise ValueError(f"{CHECKSUM} is {_shown(manifest[CHECKSUM])}")
    _figures(manifest)
    return manifest


def checksum(manifest: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of all that a manifest says but its own: of JSON with sorted keys and no white space."""
    content = {name: value for name, value in manifest.items() if name != CHECKSUM}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def _number(name: str, value: Any, least: int, integer: bool = True) -> None:
    kinds = (int,) if integer else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError(
            f"{name} is {_shown(value)}; it is {'an integer' if integer else 'a number'} of at least {least}"
        )


def _files(key: str, files: Any) -> None:
    for name, known in _items(key, files):
        if not plain_path(name):
            raise ValueError(f"{key} names {_shown(name)}, which is no path inside the folder")
        if not isinstance(known, dict) or not _is_digest(known.get("sha256")):
            raise ValueError(f"{key} does not say the SHA-256 of {_shown(name)}")
        _number(f"the size of {_shown(name)}", known.get("bytes"), 0)


def _figures(manifest: Mapping[str, Any]) -> None:
    """Checks what the report is made of."""
    for name in _COUNTED:
        _counts(name, manifest.get(name, {}))
    for name, counts in _items("sources", manifest.get("sources", {})):
        _counts(f"sources[{_shown(name)}]", counts)
    if not all(key.isascii() and key.isdigit() and len(key) < 4 for key in manifest.get("lengths", {})):
        raise ValueError("lengths has keys that are no powers of 2")
    for name in ("transforms", "stages"):  # the second is what earlier versions wrote
        if not isinstance(transforms := manifest.get(name, []), list):
            raise ValueError(f"{name} is {_shown(transforms)}; it is a list")
        for transform in transforms:
            if not isinstance(transform, dict):
                raise ValueError(f"{name} holds {_shown(transform)}")
            for figures in ("dropped", "counted"):
                _counts(f"{name}.{figures}", transform.get(figures, {}))
            for reason, samples in _items(f"{name}.examples", transform.get("examples", {})):
                _samples(f"{name}.examples[{_shown(reason)}]", samples)
    _flow(manifest)
    _diversity(manifest)


def _diversity(manifest: Mapping[str, Any]) -> None:
    """Checks the measures of the training text, of all sources and of each."""
    if "diversity" not in manifest:
        return
    found = dict(_items("diversity", manifest["diversity"]))
    sources = _items("diversity.sources", found.get("sources"))
    for name, measures in [("all", found.get("all")), *sources]:
        of = dict(_items(f"diversity[{_shown(name)}]", measures))
        for measure in ("distinct_3", "type_token", "compression"):
            _number(f"diversity[{_shown(name)}].{measure}", of.get(measure), 0, integer=False)


def _flow(manifest: Mapping[str, Any]) -> None:
    """Checks what passed each transform: one place more than there are transforms, which earlier versions lack."""
    if "flow" not in manifest:
        return
    places, transforms = manifest["flow"], manifest.get("transforms", manifest.get("stages", []))
    if not isinstance(places, list) or len(places) != len(transforms) + 1:
        raise ValueError(f"flow is {_shown(places)}; it is a list of {len(transforms) + 1} places")
    for place in places:
        if not isinstance(place, dict):
            raise ValueError(f"flow holds {_shown(place)}")
        for name in ("documents", "bytes"):
            _number(f"flow.{name}", place.get(name), 0)
        _samples("flow.samples", place.get("samples"))


def _samples(name: str, samples: Any) -> None:
    """Checks a list of documents: a hash, an id and a text each."""
    lists = isinstance(samples, list) and all(isinstance(one, list) and len(one) == 3 for one in samples)
    if not lists or not all(isinstance(part, str) for one in samples for part in one):
        raise ValueError(f"{name} is {_shown(samples)}; it is a list of documents: hash, id and text")


def _counts(name: str, counts: Any) -> None:
    for key, count in _items(name, counts):
        _number(f"{name}[{_shown(key)}]", count, 0)


def _items(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_shown(value)}; it is an object with keys")
    return list(value.items())


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _shown(value: Any) -> str:
    """Returns a value for a message: short, and without what a terminal would act on."""
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    shown = ascii(value[:60] if isinstance(value, str) else value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
