"""A token store in which every token equals its own position, for the tests of packings."""

import numpy as np

from datamodules.packing.token_store import TokenStore
from datamodules.preparation.writers.token_shards import TokenShards

LENGTHS = [1, 40, 3, 17, 90, 2, 5, 61, 8, 30, 44, 12, 77, 1, 1, 25, 10, 50, 33, 91]  # 601 tokens


def write_positions(folder, lengths=LENGTHS, shard_bytes=400):
    """Writes documents of these lengths, in which every token equals its own position."""
    ends = np.cumsum(lengths)
    documents = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    TokenShards(shard_bytes).write(documents, folder, vocab_size=1 << 17)
    return TokenStore(folder)
