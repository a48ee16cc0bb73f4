"""The sizes of a network in the metadata of a GGUF file, in both directions: config.json of transformers lies between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from plugins.checkpoints.gguf_families import FAMILIES, Family
from plugins.networks.parts.positions import Rope
from toolkit.gguf_files import GGUFFile
from toolkit.hugging_face import HuggingFaceForm

LOCAL = "rope.freq_base_swa"
"""Key of the base of rotary positions in layers with a window."""

FREQUENCIES = "rope_freqs.weight"
"""What Llama 3 divides the frequencies of rotary positions by."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's, which a file does not name: it has the quotients alone."""

ONLY_IN_TRAINING = ("attention_dropout", "embedding_dropout", "residual_dropout")
"""Arguments of a network that GGUF does not keep."""


def to_metadata(family: Family, form: HuggingFaceForm, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a network.

    Args:
        family: Its family.
        form: Its form in transformers.
        config: Its config.json.

    Raises:
        ConfigError: If it has an argument that GGUF has no form for; names it.
    """
    config = {**config, "n_inner": config["n_inner"] or 4 * config["n_embd"]} if family.transposed else config
    found = {key: config.get(theirs) for key, theirs in family.keys.items()}
    if family.rotary:
        found |= _rope_to_metadata(config)
    found |= {"vocab_size": config["vocab_size"]}
    metadata = {f"{family.name}.{key}": value for key, value in found.items() if value is not None}
    seen = (*family.biases, "tie_word_embeddings", "vocab_size")  # from the tensors
    stands = {theirs: config[theirs] for theirs in seen if theirs in config}
    wanted = form.init_args(config)
    given = form.init_args(_config(family, metadata, wanted.get("rope_scaling")) | stands)
    for name, value in wanted.items():
        if name in ONLY_IN_TRAINING or (name == "max_window_layers" and not wanted["sliding_window"]):
            continue
        if not _same(value, given[name]):
            raise ConfigError(
                f"{name}={value!r} has no form in GGUF's {family.name}, which has {given[name]!r}.\n"
                "`--format hf` or `--format torch` may write it."
            )
    return metadata


def from_file(file: GGUFFile) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a file, and config.json for it.

    Raises:
        ConfigError: If there is none, or metadata are missing or of a kind that is not read.
    """
    name = file.metadata.get("general.architecture")
    sparse = bool(file.metadata.get(f"{name}.expert_count"))
    family = next((one for one in FAMILIES if (one.name, one.sparse) == (name, sparse)), None)
    if family is None:
        known = ", ".join(dict.fromkeys(one.name for one in FAMILIES))
        experts = " with experts" if sparse else ""
        raise ConfigError(
            f"{file.path}: there is no network for the architecture {ascii(name)[:80]}{experts} of GGUF; for {known} there is."
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path} has no matrix token_embd.weight.")
    try:
        config = _config(family, file.metadata, _llama3(file, family))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{file.path}: {str(error)[:200]}.") from error
    config |= {key: tensor in file.tensors for key, tensor in family.biases.items()}
    tied = {"tie_word_embeddings": "output.weight" not in file.tensors}
    return family, config | tied | {"vocab_size": embedding.shape[0]}


def _config(family: Family, metadata: Mapping[str, Any], llama3: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns config.json for metadata, as far as these say it."""
    found: dict[str, Any] = {"architectures": [family.architecture], **family.fixed}
    for key, theirs in family.keys.items():
        value = metadata.get(f"{family.name}.{key}")
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise ValueError(f"{family.name}.{key} is {ascii(value)[:80]}, which is no number")
        if found.setdefault(theirs, value) != value:
            raise ValueError(f"{family.name}.{key} is {value}, not {found[theirs]} as the other keys say")
    if family.rotary:
        found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
        found.setdefault("num_key_value_heads", found["num_attention_heads"])
        found["rope_parameters"] = _rope_from_metadata(family.name, metadata, llama3)
    if family.name == "gemma3":
        local = {"rope_type": "default", "rope_theta": metadata.get(f"{family.name}.{LOCAL}", 10000.0)}
        both = {"full_attention": found["rope_parameters"], "sliding_attention": local}
        found |= {"query_pre_attn_scalar": found["head_dim"], "rope_parameters": both}
    return found


def _rope_to_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    both = config["rope_parameters"]
    rope, local = both.get("full_attention", both), both.get("sliding_attention")
    found = {"rope.freq_base": rope["rope_theta"]} | ({LOCAL: local["rope_theta"]} if local else {})
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _rope_from_metadata(
    name: str, metadata: Mapping[str, Any], llama3: Mapping[str, Any] | None
) -> dict[str, Any]:
    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.rope.{key}", default)

    found = {"rope_theta": float(value("freq_base", 10000.0)), "rope_type": "default"}
    kind, factor = value("scaling.type", "linear"), value("scaling.factor", value("scale_linear", 0.0))
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{name}.rope.scaling.type is {ascii(kind)[:40]}; none, linear and yarn are read")
    if (llama3 or {}).get("rope_type") == "llama3":
        return found | dict(llama3 or {})
    if not factor or kind == "none" or (kind == "linear" and factor == 1.0):
        return found
    found |= {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        found["original_max_position_embeddings"] = value("scaling.original_context_length")
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        kept = [{k: v for k, v in each.items() if v is not None} for each in (one, other)]
        return kept[0].keys() == kept[1].keys() and all(_same(v, kept[1][k]) for k, v in kept[0].items())
    if isinstance(one, float) or isinstance(other, float):
        return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def frequencies(config: Mapping[str, Any]) -> Tensor | None:
    """Returns what a network's scaling of rotary positions divides frequencies by, (D / 2,); None: it is not Llama 3's."""
    rope = dict(config.get("rope_parameters") or {})
    if rope.get("rope_type") != "llama3":
        return None
    theta = rope.pop("rope_theta")
    plain, scaled = (Rope(config["head_dim"], theta, scaling).rates()[0] for scaling in (None, rope))
    return plain / scaled


def _llama3(file: GGUFFile, family: Family) -> dict[str, Any] | None:
    """Returns the scaling of a file that has Llama 3's frequencies."""
    if FREQUENCIES not in file.tensors:
        return None
    there = file.tensors[FREQUENCIES].read().float()
    plain = _config(family, file.metadata, None)
    scaling = {"rope_type": "llama3", "factor": round(float(there.max()), 4), **LLAMA3}
    ours = frequencies(
        {**plain, "rope_parameters": {"rope_theta": plain["rope_parameters"]["rope_theta"], **scaling}}
    )
    if ours is None or ours.shape != there.shape or not torch.allclose(ours, there, rtol=1e-4):
        raise ValueError(f"{FREQUENCIES} are not those of Llama 3 ({LLAMA3})")
    return scaling
