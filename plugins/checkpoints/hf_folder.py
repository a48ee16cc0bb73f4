"""What lies beside the weights in a Hugging Face folder: configs and tokenizer, in both directions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from core import catalog
from core.contracts import Network
from core.errors import ConfigError, nearest
from plugins.checkpoints.foreign import CONFIG, ForeignWeights
from plugins.checkpoints.kept_files import GENERATION, TOKENIZER, TOKENIZER_CONFIG
from plugins.checkpoints.stored_network import build_network
from toolkit.bounded import parse_json
from toolkit.hugging_face import HasHuggingFaceForm, HuggingFaceForm
from toolkit.sizes import readable

COUNTED = ("n_layer", "n_decoder_layer", "n_experts")
"""Arguments of which a network has at least so many tensors; with others it would take for ever to build."""

MOST_TABLE_BYTES = 1 << 36
"""Limit of tables of positions: those for 100 million tokens of heads with 128 features are smaller."""


def network_config(found: ForeignWeights) -> dict[str, Any]:
    """Returns the `model.network` of a configuration for a config.json.

    Raises:
        ConfigError: If there is no network for its architecture, or it has a value that the network does not compute.
    """
    if found.config is None:
        raise ConfigError(
            f"There is no {CONFIG} in {found.folder}: it says which network the weights are of."
        )
    given = found.config.get("architectures")
    architecture = given[0] if isinstance(given, list) and given else None
    known = architectures()
    if architecture not in known:
        raise ConfigError(
            f"{found.folder / CONFIG}: there is no network for {ascii(architecture)[:80]}."
            f"{nearest(str(architecture), set(known))}\nThere are networks for {', '.join(known)}."
        )
    entry, form = known[architecture]
    try:
        for key, argument in form.arguments.items():
            count = found.config.get(key)
            if argument in COUNTED and count is not None and count > len(found.tensors):
                raise ValueError(f"{key} is {count:,}, for {len(found.tensors)} tensors")
        init_args = form.init_args(found.config)
        with torch.device("meta"):
            network = entry.load()(**init_args)
        _check_tables(network, init_args, found.folder / CONFIG)
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        said = str(error).partition("\n")[0][:200]
        raise ConfigError(
            f"{found.folder / CONFIG} has a value that is no size or of a wrong type: {said}."
        ) from error
    return {"class_path": entry.class_path, "init_args": init_args}


def _check_tables(network: Network, init_args: Mapping[str, Any], path: Path) -> None:
    """Raises a ConfigError if tables of positions, whose length no tensor bounds, would fill the memory."""
    size = sum(buffer.nbytes for buffer in network.buffers())
    if size > MOST_TABLE_BYTES:
        raise ConfigError(
            f"{path}: for {init_args['max_sequence_length']:,} positions the network would need tables of {readable(size, binary=True)}.\n"
            f"Lower the number: the tables may take {readable(MOST_TABLE_BYTES, binary=True)}."
        )


def architectures() -> dict[str, tuple[catalog.Entry, HuggingFaceForm]]:
    """Returns the network for each class of transformers, and its form: the first of a network goes before others'."""
    entries = [entry for entry in catalog.entries() if entry.kind == "networks"]
    found = [(entry, getattr(_loaded(entry), "hugging_face", None)) for entry in entries]
    chains = [(entry, list(form.forms())) for entry, form in found if isinstance(form, HuggingFaceForm)]
    later = {form.architecture: (entry, form) for entry, forms in chains for form in forms[1:]}
    return later | {forms[0].architecture: (entry, forms[0]) for entry, forms in chains}


def _loaded(entry: catalog.Entry) -> Any:
    try:
        return entry.load()
    except ConfigError:  # of a broken package, which hurts only who names it
        return None


def on_meta(config: Mapping[str, Any]) -> Network:
    """Returns a network without weights, for the `model.network` of a configuration."""
    with torch.device("meta"):
        network: Network = build_network(config)
    return network


def exported_form(network: Network, arguments: Mapping[str, Any]) -> tuple[HuggingFaceForm, dict[str, Any]]:
    """Returns the form of a network in transformers, the first that it has, and its config.json.

    Raises:
        ConfigError: If it has none; names the argument.
    """
    if not isinstance(network, HasHuggingFaceForm):
        raise ConfigError(f"{type(network).__name__} has no form in transformers: export --format torch.")
    reasons = []
    for form in network.hugging_face.forms():
        try:
            return form, form.config(type(network), arguments)
        except ConfigError as error:
            reasons.append(str(error))
    raise ConfigError("\n".join([*reasons, "`export --format torch` writes the weights under our names."]))


def kept_object(kept: Mapping[str, str], name: str) -> dict[str, Any]:
    """Returns the JSON object in a file that an import kept; empty if there is none.

    Raises:
        ConfigError: If it is none.
    """
    try:
        found = parse_json(kept.get(name, "{}").encode(), unique=False)
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"The {name} that the checkpoint keeps is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"The {name} that the checkpoint keeps is no JSON object.")
    return found


def data_state(source: ForeignWeights, end_of_text: str | None) -> dict[str, Any] | None:
    """Returns what the data module of a run would keep of the tokenizer that came with weights; None: there is none."""
    place, names = source.folder, (TOKENIZER, "vocab.json", "tokenizer.model")
    if source.files is None and not any((place / name).exists() for name in names):
        return None
    if source.files is not None:
        if TOKENIZER not in source.files:
            return None
        place = source.path
    tokenizer = catalog.find("PretrainedTokenizer", "data").load()(str(place), end_of_text)
    state = {"tokenizer": tokenizer.to_json(), "end_of_text_id": tokenizer.end_of_text_id, "position": None}
    return state


def files_beside(
    config: Mapping[str, Any],
    tokenizer: str | None,
    end: int | None,
    kept: Mapping[str, str],
    dtype: str,
) -> dict[str, str]:
    """Returns the text of each file that lies beside exported weights.

    Args:
        config: The form's keys of config.json.
        tokenizer: The JSON of the tokenizer.
        end: The id that ends a text.
        kept: What an import kept; these are written as they were.
        dtype: Of most weights, such as "float32".
    """
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": config.get("pad_token_id")}
    if before := kept_object(kept, GENERATION):
        special |= {key: before[key] for key in special if key in before}
    files = {CONFIG: _text({**config, **special, "dtype": dtype})}
    files[GENERATION] = _text({key: value for key, value in special.items() if value is not None})
    if tokenizer is not None:
        files |= {TOKENIZER: tokenizer, TOKENIZER_CONFIG: _text(_tokenizer_config(tokenizer, end, config))}
    return files | dict(kept)


def _tokenizer_config(tokenizer: str, end: int | None, config: Mapping[str, Any]) -> dict[str, Any]:
    from tokenizers import Tokenizer

    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    length = config.get("max_position_embeddings") or config.get("n_positions")
    if length:
        found["model_max_length"] = length
    if end is not None:
        found["eos_token"] = Tokenizer.from_str(tokenizer).id_to_token(end)
    return found


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
