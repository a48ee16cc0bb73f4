"""The command `consolidate`: makes the single file of a checkpoint that is a folder of parts."""

from __future__ import annotations

from pathlib import Path

from core.configuration.command_parser import Parser
from core.technique import technique


@technique(paper="torch.distributed.checkpoint, read by a single process")
def consolidate(arguments: list[str]) -> int:
    """Writes a sharded checkpoint as the single file that one process would have written.

    Example:
        python -m core consolidate runs/big/checkpoints/step-00001000.ckpt big.ckpt
    """
    parser = Parser(prog="python -m core consolidate", description=consolidate.__doc__)
    parser.add_argument("folder", help="a sharded checkpoint, or a run folder: its newest checkpoint")
    parser.add_argument("output", help="the file to write, such as whole.ckpt")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if there is one")
    options = parser.parse_args(arguments)
    from core.checkpoints.checkpoint import read, resolve
    from core.errors import ConfigError
    from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint

    output = Path(options.output)
    if output.is_dir() or (output.exists() and not options.overwrite):
        raise ConfigError(f"{output} is there already: give another name, or --overwrite for a file.")
    source = resolve(options.folder, Path(options.folder))
    AtomicCheckpoint().save_checkpoint(read(source), output)
    print(f"{source} -> {output} ({output.stat().st_size:,} bytes)")
    return 0
