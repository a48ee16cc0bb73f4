"""The command `export`: writes a checkpoint for others to read."""

from __future__ import annotations

import errno
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, take_option, trusting
from plugins.commands.new_output import check_new, interruptible, new_output

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.hugging_face import StoredTensor
    from toolkit.safetensors_files import LazyTensor

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k")
"""Types of the matrices in a GGUF file."""


@technique(paper="safetensors, config.json and tokenizer.json of transformers; GGUF of llama.cpp")
def export(arguments: list[str]) -> int:
    """Writes a checkpoint for transformers, torch or llama.cpp, tensor by tensor.

    hf: config.json, safetensors, generation_config.json, tokenizer; for `AutoModelForCausalLM.from_pretrained(DIR)`.
    gguf: one file for llama.cpp and what builds on it, with the tokenizer in it; `--type` is that of its matrices.
    peft: adapter_config.json and adapter_model.safetensors of a checkpoint with an adapter, for peft on the base.
    torch: weights.pt, the network's `state_dict` for `torch.load(..., weights_only=True)`; network.yaml, tokenizer.json.

    Example:
        python -m core export --ckpt_path runs/big --format hf --output big-hf
    """
    trusted, arguments = take_option(arguments)
    options = _parser().parse_args(arguments)
    from plugins.checkpoints.finding import resolve
    from plugins.checkpoints.remote_copies import shown
    from plugins.commands import drift

    output = Path(options.output)
    _check(options, output)
    path = resolve(options.ckpt_path, Path(options.root))
    with trusting(Trust(trusted)), interruptible():
        if options.format == "hf":
            _to_hugging_face(path, output, int((options.shard_gb or 5.0) * 1e9), options.template)
        elif options.format == "gguf":
            _to_gguf(path, output, options.type or "f16")
        elif options.format == "peft":
            _to_peft(path, output)
        else:
            _to_torch(path, output)
        files = list(output.iterdir()) if output.is_dir() else [output]
        size = sum(file.stat().st_size for file in files)
        print(f"{shown(path)} -> {output} ({len(files)} files, {size:,} bytes)")
        if options.check:
            print(drift.report(path, output))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m core export", description=export.__doc__)
    parser.add_argument(
        "--ckpt_path", required=True, help="a checkpoint, a run folder, a URL, or `last` (newest in --root)"
    )
    parser.add_argument(
        "--format", choices=("hf", "gguf", "peft", "torch"), default="hf", help="who reads it"
    )
    parser.add_argument("--output", required=True, metavar="PATH", help="the folder, or .gguf file, to write")
    parser.add_argument("--type", choices=TYPES, help="of the matrices in a GGUF file; default: f16")
    parser.add_argument("--shard_gb", type=float, help="most gigabytes of a safetensors file; default: 5")
    parser.add_argument(
        "--template", metavar="FILE", help="chat template in Jinja2; default: what an import kept"
    )
    parser.add_argument("--root", default="runs", help="where `last` looks for runs")
    parser.add_argument(
        "--check", action="store_true", help="compare with transformers on random tokens, block by block"
    )
    parser.add_argument(
        "--trust", metavar="MODULE", help="let the checkpoint's config import from a module; may be repeated"
    )
    return parser


def _check(options: Namespace, output: Path) -> None:
    """Raises a ConfigError if options do not belong together, or what they need is not there."""
    from plugins.commands import drift
    from toolkit.gguf_files import require_gguf

    check_new(output)
    if options.shard_gb is not None and not 0 < options.shard_gb < float("inf"):
        raise ConfigError(f"--shard_gb is {options.shard_gb}; it must be a number above 0.")
    if options.template and options.format != "hf":
        raise ConfigError("--template is written to a Hugging Face folder: it takes --format hf.")
    if options.shard_gb is not None and options.format != "hf":
        raise ConfigError("--shard_gb is of safetensors files: it takes --format hf.")
    if options.type is not None and options.format != "gguf":
        raise ConfigError(
            "--type is of GGUF files: it takes --format gguf. Other formats keep the data types of the weights."
        )
    if options.check and options.format in ("torch", "peft"):
        raise ConfigError("--check compares with transformers: it takes --format hf or gguf.")
    if options.format == "gguf":
        require_gguf("--format gguf")
    if (output.suffix == ".gguf") != (options.format == "gguf"):
        raise ConfigError(f"--output {output}: a name that ends in .gguf and --format gguf belong together.")
    if options.check:
        drift.require_transformers(options.format == "gguf")


class _Opened:
    """A checkpoint, its tensors not yet read.

    Args:
        path: A file or a folder.

    Attributes:
        config: Its `model.network`.
        network: The network, on the meta device.
        tensors: Name -> tensor of the network.
        tokenizer: JSON of the tokenizer; None: it has none.
        end: The id that ends a text.
        kept: What is kept of a Hugging Face folder.
    """

    def __init__(self, path: Path) -> None:
        from plugins.checkpoints import hf_folder, sharded
        from plugins.checkpoints.checkpoint import read_checkpoint, stored_config
        from plugins.checkpoints.kept_files import KEPT
        from plugins.checkpoints.matching import stored_data
        from plugins.checkpoints.stored_network import own_tensors

        model = stored_config(path).get("model")
        if not isinstance(model, Mapping) or "network" not in model:
            raise ConfigError(
                f"{path} was not written by `python -m core`: it does not say which network it holds."
            )
        self.config: dict[str, Any] = dict(model["network"])
        self.network, self.tensors = hf_folder.on_meta(self.config), own_tensors(path)
        own = {name: tuple(value.shape) for name, value in self.network.state_dict().items()}
        if odd := [name for name in {**own, **self.tensors} if own.get(name) != _shape(self.tensors, name)]:
            raise ConfigError(
                f"{path}: {odd[0]} is {_shape(self.tensors, odd[0]) or 'absent'} there and "
                f"{own.get(odd[0], 'absent')} in the network of its config: it is damaged, or its weights are quantised."
            )
        content = sharded.state(path) if sharded.is_sharded(path) else read_checkpoint(path)
        data = stored_data(path)
        self.tokenizer, self.end = data.get("tokenizer"), data.get("end_of_text_id")
        self.kept: dict[str, str] = dict(content.get(KEPT, {}))


def _shape(tensors: Mapping[str, LazyTensor], name: str) -> tuple[int, ...] | None:
    return tensors[name].shape if name in tensors else None


def _to_hugging_face(path: Path, output: Path, shard_bytes: int, template: str | None = None) -> None:
    from plugins.checkpoints import hf_folder
    from plugins.commands.chat_prompts import read_template
    from toolkit.chat_template import TEMPLATE
    from toolkit.safetensors_files import LazyTensor

    opened = _Opened(path)
    form, config = hf_folder.exported_form(opened.network, opened.config.get("init_args") or {})
    shapes = {name: tensor.shape for name, tensor in opened.tensors.items()}
    lazy: dict[str, LazyTensor] = {}
    for stored in form.tensors(shapes):
        parts = [opened.tensors[own] for own in stored.ours]
        rows = sum(part.shape[0] for part in parts)
        shape = parts[0].shape[1:] if stored.index is not None else (rows, *parts[0].shape[1:])
        shape = shape[::-1] if stored.transposed and len(shape) == 2 else shape
        lazy[stored.theirs] = LazyTensor(shape, parts[0].dtype, partial(_joined, stored, parts))
    dtype = str(max(lazy.values(), key=lambda tensor: tensor.nbytes).dtype).removeprefix("torch.")
    if template is not None:
        opened.kept[TEMPLATE] = read_template(template)
    files = hf_folder.files_beside(config, opened.tokenizer, opened.end, opened.kept, dtype)
    with new_output(output) as temporary:
        temporary.mkdir()
        _write_shards(temporary, lazy, shard_bytes)
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")


def _to_gguf(path: Path, output: Path, type_name: str) -> None:
    from plugins.commands import gguf_export

    opened = _Opened(path)
    gguf_export.write(
        output,
        opened.network,
        opened.config.get("init_args") or {},
        opened.tensors,
        opened.tokenizer,
        opened.end,
        opened.kept,
        type_name,
    )


def _to_peft(path: Path, output: Path) -> None:
    import json

    from plugins.checkpoints.matching import open_own
    from plugins.checkpoints.stored_network import adapted_on_meta
    from toolkit.adapters import HasPeftForm
    from toolkit.safetensors_files import write_safetensors

    network, adapters = adapted_on_meta(path)
    [first, *more] = adapters
    odd = next((one for one in (*more, first) if one is not first or not isinstance(one, HasPeftForm)), None)
    if odd is not None or not isinstance(first, HasPeftForm):
        raise ConfigError(
            f"{path}: peft's files have no place for what {type(odd).__name__} trained. "
            "--format hf merges adapters into the weights."
        )
    config, keys = first.peft_form(network)
    own = open_own(path)
    with new_output(output) as temporary:
        temporary.mkdir()
        write_safetensors(
            temporary / "adapter_model.safetensors", {key: own[name] for key, name in keys.items()}
        )
        text = json.dumps(config, indent=2)
        (temporary / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


def _joined(stored: StoredTensor, parts: list[LazyTensor]) -> Tensor:
    return stored.to_theirs([part.read() for part in parts]).contiguous()


def _write_shards(folder: Path, tensors: Mapping[str, LazyTensor], shard_bytes: int) -> None:
    """Writes one file, or several and their index."""
    import json

    from plugins.checkpoints.foreign import INDEX, SINGLE
    from toolkit.safetensors_files import write_safetensors

    shards: list[dict[str, LazyTensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(one.nbytes for one in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, shards[0])
        return
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        write_safetensors(folder / file, shard)
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _to_torch(path: Path, output: Path) -> None:
    import yaml

    opened = _Opened(path)
    with new_output(output) as temporary:
        temporary.mkdir()
        _write_state_dict(temporary / "weights.pt", opened.tensors)
        text = yaml.safe_dump(opened.config, sort_keys=False)
        (temporary / "network.yaml").write_text(text, encoding="utf-8")
        if opened.tokenizer is not None:
            (temporary / "tokenizer.json").write_text(opened.tokenizer, encoding="utf-8")


def _write_state_dict(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Writes a `state_dict` as torch.save does: first the places of its tensors, then one tensor after the other."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from toolkit.safetensors_files import as_bytes

    with FakeTensorMode():
        empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(empty, path)
    except RuntimeError as error:  # torch's writer does not say what the system said
        reason = "no space is left on the disk, or the file is too large for it"
        raise OSError(errno.EIO, f"{reason} ({str(error).partition(' (')[0][:80]})") from error
    with FakeTensorMode():
        placed = torch.load(path, weights_only=True)
    with open(path, "r+b") as file:
        for name, tensor in tensors.items():
            file.seek(placed[name].untyped_storage()._checkpoint_offset)
            file.write(as_bytes(tensor.read()))
