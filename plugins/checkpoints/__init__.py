"""Checkpoint formats, and everything that reads, checks and finds checkpoints.

Techniques: `atomic_checkpoint` (one file), `sharded_checkpoint` (a folder with the parts of all ranks), and the command
`consolidate` (a folder to a file).

What they are made of, each file only imports those above it:

- `schema`: which fields a checkpoint has, of which types; whether a file is complete.
- `remote_copies`: copies of what is on object storage, downloaded as they are read.
- `sharded`: the format of a folder of parts; whether it is complete; reading it.
- `checkpoint`: reads either form; the record of the run that wrote it.
- `finding`: which checkpoint to continue from.
- `stored_network`: builds the network of a checkpoint.
- `patience`: waits while the disk is full.
- `background`: the thread that writes while training continues.
- `uploads`: sends what was written to object storage.
- `shard_writing`: how the ranks write a folder together.
"""
