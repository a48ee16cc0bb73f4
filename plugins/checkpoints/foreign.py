"""Opens weights of others: a Hugging Face folder, a safetensors file, or a GGUF file. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from toolkit.bounded import parse_json, read_error, read_inside
from toolkit.safetensors_files import LazyTensor, read_safetensors

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GGUF = ".gguf"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class ForeignWeights:
    """Weights under the names of transformers.

    Attributes:
        path: The folder or file.
        config: What config.json holds; None: there is none.
        tensors: Name -> tensor.
        files: Name -> text of the files that would lie beside, of a GGUF file, which has all in one; else None.
    """

    path: Path
    config: dict[str, Any] | None
    tensors: Mapping[str, LazyTensor]
    files: Mapping[str, str] | None = None

    @property
    def folder(self) -> Path:
        """Where config.json and the tokenizer are."""
        return self.path if self.path.is_dir() else self.path.parent


def is_foreign(path: Path) -> bool:
    """Returns whether a path is a Hugging Face folder, a safetensors file or a GGUF file, as far as names tell."""
    if path.is_dir():
        return any((path / name).exists() for name in (CONFIG, INDEX, SINGLE, *PICKLES))
    return path.suffix in (".safetensors", GGUF)


def open_foreign(path: Path) -> ForeignWeights:
    """Opens a folder or a file; reads config.json, index and headers, but no weights.

    Raises:
        ConfigError: If a file is missing, damaged or outside of the folder, or if there are only pickles.
    """
    if path.suffix == GGUF and not path.is_dir():
        return _of_gguf(path)
    if path.is_dir():
        folder, tensors = path, _of_folder(path)
    else:
        folder, tensors = path.parent, read_safetensors(path.parent, path.name)
    config = read_json(folder, CONFIG) if (folder / CONFIG).exists() else None
    return ForeignWeights(path, config, tensors)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a folder.

    Raises:
        ConfigError: If it is missing, outside of the folder, too large, or no JSON object.
    """
    try:
        found = parse_json(read_inside(folder, name), unique=False)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / name} cannot be read: {read_error(error)}.") from error
    return found


def read_text(folder: Path, name: str) -> str:
    """Returns the text of a file of a folder.

    Raises:
        ConfigError: If it cannot be read, is outside of the folder, too large or no UTF-8.
    """
    try:
        return read_inside(folder, name).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / name} cannot be read: {read_error(error)}.") from error


def _of_gguf(path: Path) -> ForeignWeights:
    from plugins.checkpoints import gguf_metadata, gguf_tensors
    from toolkit import gguf_files, gguf_tokenizers

    file = gguf_files.read_gguf(path)
    family, config = gguf_metadata.from_file(file)
    tensors = gguf_tensors.from_tensors(family, config, file)
    special = gguf_tokenizers.names_of_special(file)
    ids = {f"{key}_token_id": number for key, (number, _) in special.items() if key != "unk"}
    files = {"generation_config.json": json.dumps(ids, indent=2) + "\n"}
    if (tokenizer := gguf_tokenizers.from_metadata(file)) is not None:
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        about |= {
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.get("max_position_embeddings"),
        }
        about |= {f"{key}_token": token for key, (_, token) in special.items()}
        files |= {"tokenizer.json": tokenizer, "tokenizer_config.json": json.dumps(about, indent=2) + "\n"}
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        files["chat_template.jinja"] = template
    return ForeignWeights(path, config, tensors, files)


def _of_folder(folder: Path) -> dict[str, LazyTensor]:
    if (folder / INDEX).exists():
        return _indexed(folder)
    if (folder / SINGLE).exists():
        return read_safetensors(folder, SINGLE)
    if any((folder / name).exists() for name in PICKLES):
        raise ConfigError(
            f"{folder} holds its weights as pickles ({PICKLES[0]}), which may run code: they are not read.\n"
            "Convert them first: `save_pretrained` of transformers writes safetensors."
        )
    raise ConfigError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there.")


def _indexed(folder: Path) -> dict[str, LazyTensor]:
    """Returns the tensors of a folder whose index says which file holds which."""
    places = read_json(folder, INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ConfigError(f"{folder / INDEX}: weight_map is no table of tensors and files.")
    found: dict[str, LazyTensor] = {}
    for file in dict.fromkeys(places.values()):
        inside = read_safetensors(folder, file)
        wanted = [name for name, place in places.items() if place == file]
        if missing := [name for name in wanted if name not in inside]:
            raise ConfigError(
                f"{folder / file} has no {ascii(missing[0])[1:-1][:80]}, which {INDEX} places there."
            )
        found |= {name: inside[name] for name in wanted}
    return found
