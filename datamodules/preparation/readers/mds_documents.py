"""Reads documents from MDS folders, the format of MosaicML's streaming."""

from __future__ import annotations

from typing import Any

from core.technique import technique
from datamodules.preparation.readers.item_chunks import Chunk, ChunkedDocuments, Layout, checked, field_of

_CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2"}


@technique(paper="MosaicML's Mosaic Data Shards, version 2, docs.mosaicml.com/projects/streaming")
class MDSDocuments(ChunkedDocuments):
    """Reads folders that MosaicML's `MDSWriter` wrote: one document per sample.

    The folder has an index.json and shards, plain or compressed as zstd, gz or bz2, possibly in subfolders that `merge_index` has
    joined. Of each sample one column is read, a string; others, such as pickled ones, are passed over as bytes. A
    broken shard is rejected with the samples behind the damage. A plain shard is mapped; a compressed one is
    in memory while it is read, 64 MiB by default of the writer.

    Args:
        source: The folder that has the index.json, such as that of a split.
        text_field: Column of the text.

    Raises:
        ConfigError: If there is no index, it is damaged, or has no such column of strings.

    Example:
        data:
          init_args:
            source: mds/train
            reader: {class_path: MDSDocuments, init_args: {text_field: text}}
    """

    writer, suffix = "MosaicML's MDSWriter", ".mds"

    def chunks_of(self, index: Any) -> list[Chunk]:
        """Returns the shards that have samples."""
        return [found for shard in index["shards"] if (found := self._shard(shard)).items]

    def _shard(self, shard: Any) -> Chunk:
        if (kind := (shard["format"], shard["version"])) != ("mds", 2):
            raise ValueError(f"it lists a shard of the kind {ascii(kind)[:60]}; mds, version 2, is read")
        field = field_of(shard["column_names"], self.text_field)
        encodings, sizes = shard["column_encodings"], shard["column_sizes"]
        if not len(encodings) == len(sizes) == len(shard["column_names"]) or encodings[field] != "str":
            raise ValueError(f"the column {self.text_field!r} is {ascii(encodings[field])[:40]}, not str")
        if not all(size is None or (isinstance(size, int) and 0 <= size < 1 << 32) for size in sizes):
            raise ValueError("a column has a size that cannot be")
        codec = None
        if shard["compression"] is not None:
            codec = _CODECS.get(str(shard["compression"]).partition(":")[0])
            if codec is None:
                known = ", ".join(_CODECS)
                raise ValueError(
                    f"its shards are compressed as {ascii(shard['compression'])[:40]}; {known} are read"
                )
        stored = shard["raw_data"] if codec is None else shard["zip_data"]
        name, size, items = checked(stored["basename"], shard["raw_data"]["bytes"], shard["samples"])
        return Chunk(name, size, items, codec, Layout(sizes, field))
