"""Sharded checkpoints as earlier versions wrote them, and as a forger would: with the right checksums."""

import hashlib
import json
import warnings

import torch
from torch.distributed import checkpoint as dcp

from plugins.checkpoints import sharded, sharded_form
from plugins.checkpoints.checked_files import MANIFEST, checksum


def sign(folder):
    """Writes manifest and marker of the files of a folder."""
    names = [path.name for path in folder.iterdir() if path.name not in (MANIFEST, sharded.MARKER)]
    manifest = json.dumps({"files": {name: checksum(folder / name) for name in names}}).encode()
    (folder / MANIFEST).write_bytes(manifest)
    (folder / sharded.MARKER).write_text(hashlib.sha256(manifest).hexdigest())


class _FormerWriter(dcp.FileSystemWriter):
    def storage_meta(self):
        return dcp.metadata.StorageMeta()


def write_former(folder, content):
    """Writes a checkpoint of one process in the form of earlier versions, whose `.metadata` DCP wrote."""
    tensors, rest = sharded_form.split(content)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(tensors, storage_writer=_FormerWriter(folder), planner=planner, no_dist=True)
    torch.save(rest, folder / sharded.STATE)
    sign(folder)
    return folder
