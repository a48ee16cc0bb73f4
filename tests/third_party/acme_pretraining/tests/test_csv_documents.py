"""What CsvDocuments reads."""

import pytest
from acme_pretraining.csv_documents import CsvDocuments

from core.errors import ConfigError


@pytest.fixture
def table(tmp_path):
    """Writes a table; returns its path."""

    def write(content):
        path = tmp_path / "table.csv"
        path.write_bytes(content)
        return str(path)

    return write


def test_cells_are_documents_in_their_order(table):
    path = table(b'\xef\xbb\xbftext,id\r\n"one, ""two""\r\nthree",1\r\n \t,2\r\n,3\r\nf\xc3\xbcnf,4\r\n')
    assert list(CsvDocuments(path).documents()) == ['one, "two"\r\nthree', "fünf"]
    assert list(CsvDocuments(path, column="id").documents()) == ["1", "2", "3", "4"]


def test_a_long_document_is_one_document(table):
    assert [len(text) for text in CsvDocuments(table(b"text\n" + b"x" * 300_000)).documents()] == [300_000]


def test_the_fingerprint_changes_with_text_and_column(table):
    seen = [CsvDocuments(table(b"text,body\na,b\n"), column).fingerprint() for column in ("text", "body")]
    seen.append(CsvDocuments(table(b"text,body\na,c\n"), "body").fingerprint())
    assert len({str(each) for each in seen}) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Its columns: none"),
        (b"texts,id\na,1\n", "no column 'text'. Did you mean texts?"),
        (b"text\n\xe4\n", "near line"),
        (b'text\n"a"b\n', "near line 2"),
    ],
)
def test_what_is_no_such_table_is_said(content, message, table):
    with pytest.raises(ConfigError, match=r"table\.csv") as caught:
        list(CsvDocuments(table(content)).documents())
    assert message in str(caught.value)


def test_a_missing_file_is_said():
    with pytest.raises(ConfigError, match="no such file"):
        CsvDocuments("gone.csv")
