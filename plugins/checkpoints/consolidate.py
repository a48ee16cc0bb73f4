"""The command `consolidate`: converts a sharded checkpoint (a folder) to a single file."""

from __future__ import annotations

from pathlib import Path

from core.technique import technique
from plugins.cli.configuration.command_parser import Parser


@technique(paper="torch.distributed.checkpoint, read by a single process")
def consolidate(arguments: list[str]) -> int:
    """Writes a sharded checkpoint as the single file that one process would have written.

    Example:
        python -m core consolidate runs/big/checkpoints/step-00001000.ckpt big.ckpt
    """
    parser = Parser(prog="python -m core consolidate", description=consolidate.__doc__)
    parser.add_argument(
        "folder", help="a sharded checkpoint, or a run folder: its newest checkpoint; a URL of either"
    )
    parser.add_argument("output", help="the file to write, such as full.ckpt")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if there is one")
    options = parser.parse_args(arguments)
    from core.errors import ConfigError
    from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
    from plugins.checkpoints.checkpoint import read_checkpoint
    from plugins.checkpoints.finding import resolve
    from plugins.checkpoints.remote_copies import shown
    from toolkit.local_paths import require_local_path

    output = Path(require_local_path(options.output, "output"))
    if output.is_dir() or (output.exists() and not options.overwrite):
        raise ConfigError(f"{output} exists already: give another name, or --overwrite for a file.")
    source = resolve(options.folder, Path(options.folder))
    AtomicCheckpoint().save_checkpoint(read_checkpoint(source), output)
    print(f"{shown(source)} -> {output} ({output.stat().st_size:,} bytes)")
    return 0
