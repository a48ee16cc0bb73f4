"""Writes a network and its tokenizer as a GGUF file, tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins.checkpoints import hf_folder
from plugins.checkpoints.gguf_families import family_of
from plugins.checkpoints.gguf_metadata import to_metadata
from plugins.checkpoints.gguf_tensors import to_tensors
from plugins.checkpoints.kept_files import GENERATION, TOKENIZER_CONFIG
from plugins.commands import gguf_q4k
from plugins.commands.new_output import new_output
from toolkit import gguf_tokenizers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.contracts import Network
    from toolkit.safetensors_files import LazyTensor

_WHOLE = (".ffn_gate_inp.weight", "position_embd.weight")
"""Ends of names of matrices that stay float32, as llama.cpp's converter leaves them."""

_FILE_TYPES = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_S"}
"""Type of matrices -> gguf's name for such a file, where that is not MOSTLY_ and the type."""


def write(
    output: Path,
    network: Network,
    arguments: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    tokenizer: str | None,
    end: int | None,
    kept: Mapping[str, str],
    type_name: str,
) -> None:
    """Writes a file.

    Args:
        output: The file.
        network: The network, on the meta device.
        arguments: Of its constructor.
        tensors: Name -> tensor of the network.
        tokenizer: JSON of the tokenizer; None: it has none.
        end: The id that ends a text.
        kept: What an import kept, with a chat template perhaps.
        type_name: Of matrices; norms, biases and routers stay float32.

    Raises:
        ConfigError: If GGUF has no form for the network or the tokenizer, or the file cannot be written.
    """
    form, config = hf_folder.exported_form(network, arguments)
    family = family_of(form.architecture)
    metadata = to_metadata(family, form, config)
    if tokenizer is not None:
        ids = _special_ids(kept) | ({} if end is None else {"eos": end})
        metadata |= gguf_tokenizers.to_metadata(tokenizer, config["vocab_size"], ids)
    if template := _chat_template(kept):
        metadata["tokenizer.chat_template"] = template
    plan = to_tensors(family, form, config, tensors)
    types = {name: _type(name, tensor.shape, type_name.upper()) for name, tensor in plan.items()}
    with new_output(output) as temporary:
        _write(temporary, family.name, metadata, plan, types, type_name.upper())
    if note := _note(types, type_name.upper()):
        print(note)


def _special_ids(kept: Mapping[str, str]) -> dict[str, int]:
    """Returns the ids of special tokens that an import kept."""
    found = hf_folder.kept_object(kept, GENERATION)
    ids = {key: found.get(f"{key}_token_id") for key in ("bos", "pad")}
    return {key: number for key, number in ids.items() if isinstance(number, int)}


def _chat_template(kept: Mapping[str, str]) -> str | None:
    if "chat_template.jinja" in kept:
        return kept["chat_template.jinja"]
    found = hf_folder.kept_object(kept, TOKENIZER_CONFIG).get("chat_template")
    return found if isinstance(found, str) else None


def _write(
    path: Path,
    name: str,
    metadata: Mapping[str, Any],
    plan: Mapping[str, LazyTensor],
    types: Mapping[str, str],
    label: str,
) -> None:
    from gguf import (
        GGML_QUANT_SIZES,
        GGML_QUANT_VERSION,
        GGMLQuantizationType,
        GGUFValueType,
        GGUFWriter,
        LlamaFileType,
    )

    writer = GGUFWriter(path, name)
    writer.add_type("model")
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_file_type(LlamaFileType[_FILE_TYPES.get(label, f"MOSTLY_{label}")])
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(key, value)
        else:
            kinds = {bool: GGUFValueType.BOOL, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
            writer.add_key_value(key, value, kinds[type(value)])
    for tensor, type_name in types.items():
        kind = GGMLQuantizationType[type_name]
        block, width = GGML_QUANT_SIZES[kind]
        size = math.prod(plan[tensor].shape) // block * width
        writer.add_tensor_info(tensor, plan[tensor].shape, np.dtype(np.float32), size, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, type_name in types.items():
            writer.write_tensor_data(_quantised(plan[tensor].read(), type_name))
    finally:
        writer.close()


def _quantised(tensor: Tensor, type_name: str) -> NDArray[Any]:
    from gguf import GGMLQuantizationType, quantize

    values = tensor.float().contiguous().numpy()
    if type_name == "Q4_K":
        return gguf_q4k.quantize(values)
    found: NDArray[Any] = quantize(values, GGMLQuantizationType[type_name])
    return found


def _type(name: str, shape: tuple[int, ...], label: str) -> str:
    """Returns the type of a tensor: where no block of the quantised one divides rows, Q8_0 or else float16."""
    if len(shape) == 1 or name.endswith(_WHOLE):
        return "F32"
    if label == "Q4_K" and shape[-1] % gguf_q4k.BLOCK:
        label = "Q8_0"
    return "F16" if label.startswith("Q") and shape[-1] % 32 else label


def _note(types: Mapping[str, str], label: str) -> str:
    """Returns a line about the matrices that have another type than the one that was asked for."""
    others = {name: kind for name, kind in types.items() if kind not in ("F32", label)}
    if not others:
        return ""
    counts = " and ".join(f"{count} are {kind.lower()}" for kind, count in Counter(others.values()).items())
    block = gguf_q4k.BLOCK if label == "Q4_K" else 32
    return f"{counts}, not {label.lower()}, as their rows are no multiple of {block}: {next(iter(others))}, for one."
