"""Files of trained quality filters: a linear classifier of hashed word n-grams, in safetensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core import durable
from core.errors import ConfigError
from toolkit.bounded import parse_json, read_error, read_inside
from toolkit.hashed_ngrams import HashedNGrams

__all__ = ["VERSION", "QualityModel", "read_quality_model"]

VERSION = 1
"""Version of the form of the file, and of how n-grams are hashed."""

_KEY = "quality_filter"
_MOST_HEADER = 1 << 20
_TENSORS: dict[str, tuple[str, Any]] = {"bias": ("F64", np.dtype("<f8")), "weights": ("F32", np.dtype("<f4"))}


@dataclass(frozen=True)
class QualityModel:
    """A trained quality filter.

    Attributes:
        ngrams: How texts become rows.
        weights: Weight of each bucket, float32 (buckets,).
        bias: What is added.
        figures: What was measured when it was trained, by name.
        digest: SHA-256 of the file it was read from.
    """

    ngrams: HashedNGrams
    weights: np.ndarray
    bias: float
    figures: Mapping[str, float]
    digest: str = ""

    def score(self, text: str) -> float:
        """Returns the probability that a text is one of the good ones, 0 to 1."""
        columns, values = self.ngrams.row(text)
        margin = float((self.weights[columns] * values).sum()) + self.bias
        return math.exp(-math.log1p(math.exp(-margin))) if margin > -700 else 0.0

    def write(self, path: Path) -> None:
        """Writes the file, completely or not at all; the same bytes for the same model.

        Raises:
            OSError: If it cannot be written.
        """
        from safetensors.numpy import save

        described = {
            "version": VERSION,
            "sizes": list(self.ngrams.sizes),
            "buckets": self.ngrams.buckets,
            "characters": self.ngrams.characters,
            "figures": dict(self.figures),
        }
        tensors = {"weights": self.weights.astype("<f4"), "bias": np.array([self.bias], "<f8")}
        durable.write(path, save(tensors, {_KEY: json.dumps(described, sort_keys=True)}))


def read_quality_model(path: Path) -> QualityModel:
    """Reads a file that :meth:`QualityModel.write` wrote, whoever gave it.

    Raises:
        ConfigError: If it cannot be read, is damaged, is no such file, or has numbers that are not finite.
    """
    from safetensors import SafetensorError, deserialize

    path = path.expanduser()
    try:
        content = read_inside(path.parent, path.name)
        described = _described(content)
        ngrams = HashedNGrams(*(described[key] for key in ("sizes", "buckets", "characters")))
        tensors = {name: _tensor(name, tensor, ngrams.buckets) for name, tensor in deserialize(content)}
    except (OSError, ValueError, ConfigError, SafetensorError) as error:
        reason = read_error(error) if isinstance(error, OSError | ValueError) else str(error)
        raise ConfigError(
            f"{ascii(str(path))[1:-1][:300]} cannot be used as a quality filter: {reason.partition(chr(10))[0][:300]}.\n"
            "Give the file that `python -m core train-quality-filter --output FILE` wrote."
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    return QualityModel(ngrams, tensors["weights"], float(tensors["bias"][0]), described["figures"], digest)


def _described(content: bytes) -> dict[str, Any]:
    """Returns what the header says of the model, checked; that its tensors are those two, of these types."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_MOST_HEADER, len(content) - 8):
        raise ValueError("it is cut off, or no safetensors file")
    header = parse_json(content[8 : 8 + length])
    kept = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(kept, dict) or not isinstance(kept.get(_KEY), str):
        raise ValueError(f"its metadata has no {_KEY!r}; it is a file of another kind")
    found = parse_json(kept[_KEY].encode())
    if not isinstance(found, dict) or found.get("version") != VERSION:
        version = found.get("version") if isinstance(found, dict) else None
        raise ValueError(
            f"it has version {ascii(version)[:20]}, this program reads {VERSION}: train it again"
        )
    if header.keys() != _TENSORS.keys():
        raise ValueError(f"its tensors are not {' and '.join(_TENSORS)}")
    for key in ("buckets", "characters"):
        if type(found.get(key)) is not int:
            raise ValueError(f"{key!r} is no whole number")
    sizes, figures = found.get("sizes"), found.get("figures")
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        raise ValueError("'sizes' are no list of whole numbers")
    if not isinstance(figures, dict) or not all(type(value) in (int, float) for value in figures.values()):
        raise ValueError("'figures' are no numbers by name")
    return found | {"sizes": tuple(sizes)}


def _tensor(name: str, tensor: Mapping[str, Any], buckets: int) -> np.ndarray:
    """Returns a tensor of the file."""
    kind, dtype = _TENSORS[name]
    shape = [buckets] if name == "weights" else [1]
    if tensor["dtype"] != kind or list(tensor["shape"]) != shape:
        found = f"{ascii(tensor['dtype'])[1:-1][:20]} {ascii(tensor['shape'])[:60]}"
        raise ValueError(f"{name} is {found}, not {kind} {shape}")
    values = np.frombuffer(tensor["data"], dtype)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has numbers that are not finite")
    return values
