"""Compares the logits of a checkpoint with those of transformers, and names the first block in which they drift apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from toolkit.hugging_face import HasHuggingFaceForm

if TYPE_CHECKING:
    from toolkit.safetensors_files import LazyTensor

TOLERANCE = 1e-5
"""Largest difference in float32, relative to the largest value; of logits absolute, where they are below 1."""


def require_transformers(gguf: bool = False) -> None:
    """Raises a ConfigError if transformers, or what it reads GGUF with, is not installed."""
    for name in ("transformers", "accelerate") if gguf else ("transformers",):
        if find_spec(name) is None:
            with_it = "which" if name == "transformers" else f"which reads GGUF with {name}, which"
            raise ConfigError(
                f"--check compares with transformers, {with_it} is not installed: pip install {name}"
            )


def report(path: Path, folder: Path) -> str:
    """Returns how far the logits of a checkpoint are from those of transformers for a folder, or for a GGUF file.

    Of a GGUF file both have its weights, which may be quantised: names and order of rows are what is compared.

    Raises:
        ConfigError: If they drift apart; names the first block.
    """
    import transformers
    from transformers.utils import logging

    from plugins.checkpoints.checkpoint import stored_config
    from plugins.checkpoints.foreign import open_foreign
    from plugins.checkpoints.matching import form_of, pieces_of
    from plugins.checkpoints.stored_network import build_network, own_tensors

    logging.disable_progress_bar()
    network = build_network(stored_config(path)["model"]["network"])
    gguf = {} if folder.is_dir() else {"gguf_file": folder.name}
    tensors: Mapping[str, LazyTensor] = own_tensors(path)
    if gguf:
        found = open_foreign(folder)
        form = form_of(network, found.config)
        assert form is not None, "it was written by it"
        tensors = pieces_of(found, form, {name: tensor.shape for name, tensor in tensors.items()})
    network.load_state_dict({name: tensor.read() for name, tensor in tensors.items()})
    kind = transformers.AutoModelForCausalLM
    if not gguf:
        architecture, *_ = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True
        ).architectures
        kind = getattr(transformers, architecture)
    model, notes = kind.from_pretrained(
        folder.parent if gguf else folder,
        dtype="float32",
        output_loading_info=True,
        local_files_only=True,
        **gguf,
    )
    known = network.hugging_face.left_out if isinstance(network, HasHuggingFaceForm) else ()
    odd = [*notes["missing_keys"], *notes["unexpected_keys"], *notes["mismatched_keys"]]
    if odd := [name for name in odd if not str(name).startswith(known)]:
        raise ConfigError(f"{folder}: transformers does not find, or does not know, {odd[0]}.")
    return compare(network.float(), model)


def compare(network: Any, model: Any, length: int = 32) -> str:
    """Returns how far two models are apart on random tokens; see :func:`report`.

    Args:
        network: Ours, in float32.
        model: Of transformers, in float32.
        length: Tokens in a sequence; two are compared.
    """
    import torch

    length = min(length, network.max_sequence_length or length)
    ids = torch.randint(network.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    blocks = [block for stack in _stacks(model) for block in stack]
    given = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(ids)

    def ours_at_the_end() -> Any:
        hidden = network({"input_ids": ids})
        return (
            hidden if network.output_weight is not None and not _has_head(model) else network.logits(hidden)
        )

    def theirs_at_the_end() -> Any:
        found = model.eval()(**given, use_cache=False)
        return found.logits if _has_head(model) else found.last_hidden_state

    with torch.no_grad():
        ours = _states(network.eval().blocks, ours_at_the_end)
        others = _states(blocks, theirs_at_the_end)
    last = 0.0
    for index, (one, other) in enumerate(zip(ours, others, strict=True)):
        last = float((one - other).abs().max())
        if not last <= TOLERANCE * max(1.0, float(other.abs().max())):
            where = f"block {index}" if index < len(blocks) else "the logits, after the last block"
            raise ConfigError(
                f"The weights do not compute the same as in transformers: {where} is the first to differ, by {last:.2g} "
                f"(largest value {float(other.abs().max()):.2g})."
            )
    what = "logits" if _has_head(model) else "hidden states"
    return f"The {what} are those of transformers: {'bitwise' if last == 0 else f'within {last:.2g}'}."


def _has_head(model: Any) -> bool:
    return model.get_output_embeddings() is not None


def _stacks(model: Any) -> list[Any]:
    """Returns the lists of blocks of a model of transformers, in order: those that are in no other list."""
    from torch.nn import ModuleList

    found: dict[str, Any] = {}
    for name, module in model.base_model.named_modules():
        if isinstance(module, ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return list(found.values())


def _states(blocks: Sequence[Any], call: Callable[[], Any]) -> list[Any]:
    """Returns what each block gives while `call()` runs, and what that returns."""
    found: list[Any] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        return [*found, last] if (last := call()) is not None else found
    finally:
        for handle in handles:
            handle.remove()
