"""Any causal language model of transformers as a network."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError, nearest
from core.technique import Package, technique
from plugins.checkpoints.foreign import open_foreign
from plugins.networks.parts.recorded_initialisation import recorded_starts
from toolkit.initial_values import Start, draw, named
from toolkit.safetensors_files import LazyTensor
from toolkit.shards import copy_to_shard

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@technique(
    paper="transformers: Wolf et al., arXiv:1910.03771",
    needs=[Package("transformers>=5", extra="transformers")],
)
class Pretrained(Network):
    """Any causal language model of transformers, for what there is no class for.

    The folder is read again by a run that resumes and by `generate`. Nothing is downloaded, no code of the folder is run,
    and weights are read from safetensors files alone, and become float32. Under a strategy that shards it each rank reads its part
    of them, and under DeepSpeedZero rank 0 all, one parameter at a time, which DeepSpeed sends to the others. Where transformers
    stores them in another form than it computes with, as of some mixtures of experts, rank 0 has the whole model. Without `weights`
    each rank draws its part; rank 0 has the whole model where that cannot be recorded on the meta
    device, as values that are computed from others. Llama, Qwen, Gemma and others have classes here, which also have tensor and
    pipeline parallelism, masks between documents, and import and export.

    Args:
        path: A local folder with config.json, as `save_pretrained` writes it.
        weights: Whether training starts from the folder's weights; false: from random ones, as the model initialises them.
        max_sequence_length: Largest T; None: as config.json says.

    Raises:
        ConfigError: If there is no such folder, its model is unknown to transformers or not a causal one, it has no
            safetensors files, or a tensor is missing.

    Example:
        model:
          network:
            class_path: Pretrained
            init_args: {path: SmolLM2-135M}
    """

    deferred_init = True

    def __init__(self, path: str, weights: bool = True, max_sequence_length: int | None = None) -> None:
        super().__init__()
        self.folder, self.weights = _folder(path), weights
        config = _config(self.folder)
        device = torch.get_default_device()
        with torch.device("meta"):
            self.model = _model(self.folder, config)
        text = config.get_text_config(decoder=True)
        self.vocab_size = int(text.vocab_size)
        self.max_sequence_length = max_sequence_length or getattr(text, "max_position_embeddings", None)
        self._blocks = _blocks(self.model, int(text.num_hidden_layers))
        self._attention = int(text.num_hidden_layers) * int(text.hidden_size)
        self._takes = set(inspect.signature(self.model.forward).parameters)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @cached_property
    def _starts(self) -> dict[str, Start]:
        """Name -> how it begins, of all that is read as it is stored, or drawn, and of buffers that are computed; empty: unknown."""
        found = _as_they_are(self.folder, self.model) if self.weights else _drawn(self.model)
        return {**found, **_computed(self.model, found)} if found else {}

    def initial_value(self, name: str, tensor: Tensor) -> Start | None:
        """Returns how a parameter or buffer begins, if it is read as it is stored, or drawn; see `toolkit.initial_values`."""
        return self._starts.get(name.removeprefix("model."))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reads the folder's weights in place; without them, initialises every parameter and buffer as the model does."""
        self.model.tie_weights(recompute_mapping=False)  # `to_empty` may have made two of one
        if all(self.initial_value(name, tensor) is not None for name, tensor in named(self)):
            draw(self)
            return
        _forget_initialised(self.model)
        self.model.init_weights()
        if not self.weights:
            return
        stored = _stored(self.folder, type(self.model)).state_dict()
        for name, target in self.model.state_dict(keep_vars=True).items():
            copy_to_shard(target, stored[name])

    def forward(self, batch: Mapping[str, Tensor], cache: Any = None) -> Tensor:
        """Returns logits (B, T, V).

        Raises:
            ConfigError: If the batch has `document_ids`, or the sequence is longer than `max_sequence_length`.
        """
        if "document_ids" in batch:
            raise ConfigError(
                "Pretrained: a model of transformers does not keep the documents of a row apart: set mask_documents to "
                "false, or take PaddedDocuments for data.packing."
            )
        length, past = batch["input_ids"].shape[1], 0 if cache is None else cache.get_seq_length()
        if self.max_sequence_length is not None and past + length > self.max_sequence_length:
            raise ConfigError(
                f"Pretrained: a sequence of {past + length} tokens is longer than max_sequence_length, "
                f"{self.max_sequence_length}."
            )
        given: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": cache is not None}
        if cache is not None:
            given["past_key_values"] = cache
        if "position_ids" in batch and "position_ids" in self._takes:
            given["position_ids"] = batch["position_ids"]
        logits: Tensor = self.model(**given).logits
        return logits

    def new_cache(self, batch_size: int, max_length: int) -> Any:
        """Returns an empty cache of keys and values; None where the model has another state."""
        if "past_key_values" not in self._takes:
            return None
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]  # torch does not declare it a Sequence
        """The list of modules that has one for each layer."""
        return self._blocks

    def parts_by_kind(self) -> dict[str, list[nn.Module]]:
        """Embedding and head, as transformers names them; see `toolkit.network_parts`."""
        ends = {"embedding": self.model.get_input_embeddings(), "head": self.model.get_output_embeddings()}
        return {kind: [module] for kind, module in ends.items() if module is not None}

    @property
    def output_weight(self) -> None:
        """None: `forward` returns logits, as a model may scale or cap them."""
        return

    def flops_per_token(self, sequence_length: int) -> float:
        """Returns 6 N + 12 L C T; N: matrices of the blocks and of the head. Experts count as if all were used."""
        matrices = sum(weight.numel() for weight in self._blocks.parameters() if weight.ndim > 1)
        head = self.vocab_size * int(self.model.config.get_text_config(decoder=True).hidden_size)
        return 6.0 * (matrices + head) + 12.0 * self._attention * sequence_length


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    around = folder.parent if folder.parent.is_dir() else Path()
    hint = nearest(folder.name, {entry.name for entry in around.iterdir() if entry.is_dir()})
    what = "there is no config.json in" if folder.is_dir() else "there is no folder"
    raise ConfigError(f"Pretrained: {what} {path}.{hint} Nothing is downloaded: give a local folder.")


def _config(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Pretrained: transformers does not read {folder}/config.json: {_first_line(error)}"
        ) from error


def _model(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ImportError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Pretrained: {folder} has no causal model of transformers: {_first_line(error)}"
        ) from error
    return model.train()


def _stored(folder: Path, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """Returns the model with the weights of its folder, on the CPU."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        with torch.device("cpu"):
            model, notes = kind.from_pretrained(
                folder,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"Pretrained: {folder} has no weights as safetensors that can be read: {_first_line(error)}"
        ) from error
    if odd := [*notes["missing_keys"], *notes["unexpected_keys"], *notes["mismatched_keys"]]:
        raise ConfigError(f"Pretrained: the weights in {folder} lack {odd[0]}, or have it without need.")
    return model


def _as_they_are(folder: Path, model: PreTrainedModel) -> dict[str, Start]:
    """Returns the stored tensors of a model by its first names; empty: transformers changes some, or refuses them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    try:
        stored = open_foreign(folder).tensors
    except ConfigError:  # what transformers says of it is shown
        return {}
    own = model.state_dict(keep_vars=True)
    changes = get_model_conversion_mapping(model, add_legacy=False)
    renames = [change for change in changes if type(change) is WeightRenaming]
    for rename in renames:
        stored = {rename.rename_source_key(name)[0]: tensor for name, tensor in stored.items()}
    converted = len(renames) < len(changes) or hasattr(model.config, "quantization_config")
    if converted or not stored.keys() <= own.keys():
        return {}
    found: dict[int, LazyTensor] = {
        id(own[name]): tensor for name, tensor in stored.items()
    }  # tied: by any name
    if any(
        id(target) not in found or tuple(target.shape) != found[id(target)].shape for target in own.values()
    ):
        return {}
    return {name: found[id(tensor)] for name, tensor in named(model) if id(tensor) in found}


def _drawn(model: PreTrainedModel) -> Mapping[str, Start]:
    """Returns how each parameter begins as the model initialises it; empty: it is not known."""
    empty = copy.deepcopy(model, {id(own): own.to("meta") for _, own in named(model)})
    _forget_initialised(empty)
    return recorded_starts(empty, empty.init_weights)


def _computed(model: PreTrainedModel, stored: Mapping[str, Start]) -> dict[str, Start]:
    """Returns the buffers that are not stored, such as rotary frequencies, as the model initialises them."""
    found: dict[str, Start] = {}
    for place, part in model.named_modules():
        names = [name for name, _ in part.named_buffers(recurse=False) if f"{place}.{name}" not in stored]
        if names:
            one, other = (_initialised(model, part, names, before) for before in (0, 1))
            found |= {f"{place}.{n}": one[n] for n in names if torch.equal(one[n], other[n])}
    return found


@torch.no_grad()
def _initialised(model: PreTrainedModel, part: nn.Module, names: list[str], before: int) -> dict[str, Tensor]:
    """Returns buffers of a part of the model that were filled with a number and initialised."""
    copied = copy.deepcopy(part).to("meta")
    for name in names:
        setattr(copied, name, torch.full_like(getattr(copied, name), before, device="cpu"))
    _forget_initialised(copied)
    model._init_weights(copied)
    return {name: copied.get_buffer(name) for name in names}


def _forget_initialised(model: nn.Module) -> None:
    for part in (*model.modules(), *model.parameters(), *model.buffers()):
        if hasattr(part, "_is_hf_initialized"):  # set by a first initialisation, and skips another
            del part._is_hf_initialized


def _blocks(model: nn.Module, layers: int) -> nn.ModuleList:
    """Returns the list with a module for each layer, the largest if there are several."""
    found = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == layers]
    if not found:
        raise ConfigError(f"Pretrained: {type(model).__name__} has no list of its {layers} layers.")
    return max(found, key=lambda part: sum(weight.numel() for weight in part.parameters()))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
