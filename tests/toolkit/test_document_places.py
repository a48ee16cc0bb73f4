"""Which documents are in a batch: the tokens at each place are those of the document that is named."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from datamodules.packing.best_fit import BestFit
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.padded_documents import PaddedDocuments
from datamodules.preparation.writers.token_shards import TokenShards
from toolkit.document_places import TABLE, LocatesDocuments, sources_of

random = np.random.default_rng(0)
DOCUMENTS = [random.integers(1, 500, random.integers(1, 40)).tolist() for _ in range(200)]


@pytest.mark.parametrize(
    "packing", [Concatenate(), Concatenate(mask_documents=True), BestFit(), PaddedDocuments()]
)
def test_the_tokens_at_each_place_are_those_of_the_document(packing, tmp_path):
    TokenShards(1000).write(DOCUMENTS, tmp_path / "train", vocab_size=500)  # some lie in other chunks
    batches = packing.batches(
        tmp_path / "train", sequence_length=24, batch_size=4, rank=1, world_size=2, shuffle=True, seed=3
    )
    assert isinstance(batches, LocatesDocuments)
    rows, _ = batches.take(batches.cursor, 8)
    ids = batches.read(rows, slice(4, 8))["input_ids"].numpy()
    covered = np.zeros(ids.shape, int)
    for row, column, tokens, document, offset in batches.places(rows, slice(4, 8)):
        expected = DOCUMENTS[document][offset : offset + tokens]
        assert ids[row, column : column + tokens].tolist() == expected
        covered[row, column : column + tokens] += 1
    assert covered.max() == 1
    if isinstance(packing, Concatenate):
        assert covered.all()


def test_source_and_id_of_documents_of_a_split(tmp_path):
    assert sources_of(tmp_path, "train", [0]) == {}
    splits = ["train", "validation", "train", "train"]
    table = pyarrow.table({"split": splits, "source": [*"abcd"], "id": [*"wxyz"]})
    parquet.write_table(table, tmp_path / TABLE, row_group_size=2)
    assert sources_of(tmp_path, "train", [2, 0, 7]) == {0: ("a", "w"), 2: ("d", "z")}
