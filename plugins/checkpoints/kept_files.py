"""Files that checkpoints keep for `chat` and `export`, as a Hugging Face folder has them: chat template, generation config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugins.checkpoints import sharded
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.checkpoints.finding import resolve
from plugins.checkpoints.foreign import ForeignWeights, is_foreign, open_foreign, read_json, read_text
from toolkit.chat_template import TEMPLATE, EndsAnswers, stored_template

KEPT = "hugging_face"
"""Key of a checkpoint: file name -> its text."""

TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
KEPT_FILES = (TOKENIZER, TOKENIZER_CONFIG, GENERATION, "special_tokens_map.json", "chat_template.jinja")


def kept_files(source: ForeignWeights) -> dict[str, str]:
    """Returns the texts of the files of `KEPT_FILES` that came with weights.

    Raises:
        ConfigError: If a file cannot be read, or is no JSON object where it should be.
    """
    if source.files is not None:
        return dict(source.files)
    folder = source.folder
    for name in (TOKENIZER_CONFIG, GENERATION):
        if (folder / name).exists():
            read_json(folder, name)
    return {name: read_text(folder, name) for name in KEPT_FILES if (folder / name).exists()}


def kept_by_a_run(weights: str) -> dict[str, str]:
    """Returns what the checkpoints of a run keep of the weights that it starts from.

    All but the tokenizer, which is that of its data. A safetensors file comes alone.

    Args:
        weights: As `model.weights`.

    Raises:
        ConfigError: As :func:`kept_files`.
    """
    path = Path(weights).expanduser()
    if not is_foreign(path):
        path = resolve(weights, path)
        found = (sharded.state(path) if sharded.is_sharded(path) else read_checkpoint(path)).get(KEPT, {})
    else:
        found = {} if path.suffix == ".safetensors" and path.is_file() else kept_files(open_foreign(path))
    return {name: found[name] for name in KEPT_FILES if name != TOKENIZER and name in found}


def with_template(files: Mapping[str, str], data: Any) -> dict[str, str]:
    """Returns the files with the chat template that a run trains on, and what ends an answer under it.

    Args:
        files: What is kept of weights.
        data: The run's data module; nothing is added for one without a template.
    """
    found = dict(files)
    if not isinstance(data, EndsAnswers) or data.template is None:
        return found
    before = stored_template(found)
    if before is None or before.source != data.template.source:
        found[TEMPLATE] = data.template.source
    generation = json.loads(found.get(GENERATION, "{}"))
    ends = generation.get("eos_token_id")
    generation["eos_token_id"] = sorted(
        {*(ends if isinstance(ends, list) else [ends]), *data.stop_ids} - {None}
    )
    return found | {GENERATION: json.dumps(generation)}
