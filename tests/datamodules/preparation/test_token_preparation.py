"""What identifies a preparation: other tests, of `prepare` and of the data module, hold what it writes."""

from tests.support.corpus import corpus, preparation


def test_a_class_is_named_without_the_subfolder_of_its_file(tmp_path):
    """Digests of folders that were prepared when all files lay in one folder stay what they are."""
    options = preparation(corpus(tmp_path)).options()
    named = [options["reader"], options["tokenizer"], options["writer"], *options["stages"]]
    assert [part["class"] for part in named] == [
        "datamodules.preparation.json_lines_documents.JSONLinesDocuments",
        "datamodules.preparation.bpe_tokenizer.BPETokenizer",
        "datamodules.preparation.token_shards.TokenShards",
        "datamodules.preparation.normalise.Normalise",
    ]
