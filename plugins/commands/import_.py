"""The command `import`: makes a checkpoint of a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.cli.configuration.trust import Trust, take_option, trusting
from plugins.commands.new_output import check_new, interruptible, new_output

if TYPE_CHECKING:
    from plugins.checkpoints.foreign import ForeignWeights
    from toolkit.safetensors_files import LazyTensor


@technique(paper="safetensors and config.json of transformers; torch.distributed.checkpoint")
def import_(arguments: list[str]) -> int:
    """Makes a sharded checkpoint of a Hugging Face folder, a safetensors or a GGUF file, tensor by tensor.

    Quantised tensors of GGUF become float32. `generate`, `validate`, `export` and `--model.weights` take it; `consolidate` makes it a file.

    Example:
        python -m core import SmolLM2-135M --output smollm2.ckpt
    """
    trusted, arguments = take_option(arguments)
    parser = Parser(prog="python -m core import", description=import_.__doc__)
    parser.add_argument(
        "source",
        metavar="DIR_OR_FILE",
        help="a folder with config.json, a .safetensors beside one, or a .gguf (of parts: any)",
    )
    parser.add_argument(
        "--output", required=True, metavar="CHECKPOINT", help="the folder to write, such as base.ckpt"
    )
    parser.add_argument(
        "--end_of_text", metavar="TOKEN", help="the token that ends a text; else as the folder says"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with transformers on random tokens, block by block"
    )
    parser.add_argument(
        "--trust", metavar="MODULE", help="let the network come from a module; may be repeated"
    )
    options = parser.parse_args(arguments)
    from plugins.checkpoints.foreign import is_foreign, open_foreign
    from plugins.commands import drift
    from toolkit.gguf_files import PART

    source, output = Path(options.source), Path(options.output)
    if not source.exists() or not is_foreign(source):
        raise ConfigError(f"{source} is no folder with config.json, and no .safetensors or .gguf file.")
    check_new(output)
    if options.check:
        if PART.fullmatch(source.name):
            raise ConfigError("--check compares with transformers, which reads no GGUF file in parts.")
        drift.require_transformers(source.suffix == ".gguf")
    with trusting(Trust(trusted)):
        found = open_foreign(source)
        state, tensors, unread = _converted(found, options.end_of_text)
        _write(output, state, tensors)
        print(
            f"{source} -> {output}: {len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()):,} bytes"
        )
        if unread:
            print(f"Not read, as the network has no place for them: {', '.join(unread)}")
        if not state.get("PretrainDataModule"):
            print(
                f"{found.path if found.files is not None else found.folder} holds no tokenizer: `generate` needs one."
            )
        if options.check:
            print(drift.report(output, found.folder if found.files is None else found.path))
    return 0


import_.__name__ = "import"  # the command's name, which is a keyword


def _converted(
    found: ForeignWeights, end_of_text: str | None
) -> tuple[dict[str, Any], dict[str, LazyTensor], list[str]]:
    """Returns all of the checkpoint but its tensors, these, and the names of those that are not read."""
    import lightning
    import yaml

    from core import __version__
    from plugins.checkpoints import hf_folder
    from plugins.checkpoints.checkpoint import RECORD
    from plugins.checkpoints.kept_files import KEPT, kept_files
    from plugins.checkpoints.matching import form_of, pieces_of
    from plugins.cli.configuration.validation_unit import UNIT

    config = hf_folder.network_config(found)
    network = hf_folder.on_meta(config)
    own = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    form = form_of(network, found.config)
    assert form is not None, "the network was chosen by it"
    tensors = pieces_of(found, form, own)
    for name, tensor in tensors.items():
        if tensor.shape != own[name]:
            raise ConfigError(
                f"{found.path}: {name} is {tensor.shape}; {'config.json' if found.files is None else 'its metadata'} makes it {own[name]}."
            )
    data = hf_folder.data_state(found, end_of_text)
    text = yaml.safe_dump({"model": {"network": config}, "trainer": {}}, sort_keys=False)
    state = {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        RECORD: {"config": text, "version": __version__, "ranks": 1, UNIT: "steps"},
        KEPT: kept_files(found),
    }
    unread = sorted(name for name in found.tensors if name.startswith(form.left_out))
    return state | ({"PretrainDataModule": data} if data else {}), tensors, unread


def _write(output: Path, state: dict[str, Any], tensors: dict[str, LazyTensor]) -> None:
    import torch

    from plugins.checkpoints import shard_writing, sharded_form
    from plugins.checkpoints.matching import PREFIX

    empty = {
        PREFIX + name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    keys, rest = sharded_form.split({**state, "state_dict": empty})
    section = f"state_dict.{PREFIX}"
    with interruptible(wait=True) as check, new_output(output) as temporary:

        def read(key: str) -> torch.Tensor:
            check()
            return tensors[key.removeprefix(section)].read()

        shard_writing.write_alone(temporary, keys, rest, read)
        check()
