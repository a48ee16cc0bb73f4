"""What may lie in a folder of text besides text: links, pipes, odd names, broken and oversized files."""

import gzip
import json
import os
import random
import socket

import pytest
import zstandard

from core.errors import ConfigError
from datamodules.preparation.readers import compressed_files, json_lines_documents, text_documents
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.readers.parquet_documents import ParquetDocuments
from datamodules.preparation.readers.text_documents import TextDocuments
from tests.support.corpus import (
    contents,
    prepare,
    rows_of,
    texts,
    texts_of,
    write_lines,
    write_parquet,
)

PACK = {"gz": gzip.compress, "zst": zstandard.compress}


def noisy(count):
    """Documents that hardly compress, as their letters are drawn evenly."""
    draw = random.Random(5)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=150)) for _ in range(count)]


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "corpus" / "a.jsonl", texts(200))
    return tmp_path / "corpus"


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def rejects_of(folder):
    lines = [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]
    return {os.path.basename(line["place"]): (line["reason"], line["details"]) for line in lines}


# Compressed files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", PACK)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_of_a_cut_file_all_whole_lines_are_kept(tmp_path, codec, share):
    documents = noisy(9000)
    whole = PACK[codec](write_lines(tmp_path / "plain", documents).read_bytes())
    path = tmp_path / f"a.jsonl.{codec}"
    path.write_bytes(whole[: int(len(whole) * share)])
    rejects = []
    found = texts_of(JSONLinesDocuments(str(path)), rejects)
    assert found == documents[: len(found)]
    assert len(found) > (share - 0.1) * len(documents)  # zstd gives whole blocks of 128 kB
    [(_, _, reason, _, lost)] = rejects
    assert reason.startswith("broken")
    assert lost == path.stat().st_size  # nobody knows how much is missing


@pytest.mark.ci
def test_a_cut_file_counts_by_its_bytes(tmp_path):
    whole = gzip.compress(write_lines(tmp_path / "plain", texts(3000)).read_bytes())
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "cut.jsonl.gz").write_bytes(whole[: len(whole) * 9 // 10])
    write_lines(tmp_path / "in" / "whole.jsonl", texts(300, seed=1))
    with pytest.raises(
        ConfigError, match=r"bytes cannot be used, more than data.max_reject_fraction=0.01: broken gzip"
    ):
        prepare(tmp_path / "in", tmp_path / "out", max_reject_fraction=0.01)
    folder = prepare(tmp_path / "in", tmp_path / "more", max_reject_fraction=0.95)
    manifest = manifest_of(folder)
    assert manifest["train_documents"] + manifest["validation_documents"] > 2600 + 300
    assert manifest["rejected"] == {"broken gzip file": 1}


def test_a_damaged_byte_loses_what_is_behind_it(tmp_path):
    whole = bytearray(gzip.compress(write_lines(tmp_path / "plain", noisy(20_000)).read_bytes()))
    whole[len(whole) // 2] ^= 255
    (tmp_path / "a.jsonl.gz").write_bytes(whole)
    rejects = []
    texts_of(JSONLinesDocuments(str(tmp_path / "a.jsonl.gz")), rejects)
    assert all(reject[4] < len(whole) for reject in rejects if reject[2] == "broken gzip file")


@pytest.mark.parametrize("codec", PACK)
def test_compressed_text_files_are_documents(tmp_path, codec):
    (tmp_path / f"a.txt.{codec}").write_bytes(PACK[codec]("naïve".encode()))
    (tmp_path / f"b.MD.{codec}").write_bytes(PACK[codec](b"# b"))
    (tmp_path / f"c.txt.{codec}").write_bytes(PACK[codec](b"cut off" * 99)[:-5])
    rejects = []
    rows, _ = rows_of(TextDocuments(str(tmp_path)), rejects)
    assert [(row["text"], row["source"]) for row in rows] == [
        ("naïve", tmp_path.name),
        ("# b", tmp_path.name),
    ]
    assert [os.path.basename(reject[1]) for reject in rejects] == [f"c.txt.{codec}"]


@pytest.mark.ci
@pytest.mark.parametrize("name", ["a.txt.zst", "a.jsonl.zst", "a.jsonl.gz"])
@pytest.mark.parametrize("line", [b"x" * (1 << 20), b'{"text": ""}\n' * 80_000], ids=["endless", "many"])
def test_a_bomb_is_left_after_64_mib(tmp_path, monkeypatch, name, line):
    data = PACK[name.rpartition(".")[2]](line * 20)
    (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(compressed_files, "_SMALL", 2 << 20)
    monkeypatch.setattr(compressed_files, "_RATIO", 100)  # gzip makes 1,032 bytes of one at most
    rejects = []
    assert set(texts_of(TextDocuments(str(tmp_path)), rejects)) <= {""}
    [reject] = rejects
    assert "bomb" in reject[2]
    assert reject[4] == len(data)


# Long documents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["", *PACK])
def test_documents_that_are_too_long_are_rejected_alone(tmp_path, monkeypatch, codec):
    for module in (text_documents, json_lines_documents):
        monkeypatch.setattr(module, "LONGEST", 3 << 20)
    pack, suffix = PACK.get(codec, bytes), f".{codec}" if codec else ""
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(os.urandom(2 << 20).hex().encode()))
    (tmp_path / f"b.txt{suffix}").write_bytes(pack(b"short"))
    lines = [{"text": "first"}, {"text": os.urandom(2 << 20).hex()}, {"text": "last"}]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / f"c.jsonl{suffix}").write_bytes(pack(data))
    rejects = []
    assert texts_of(TextDocuments(str(tmp_path)), rejects) == ["short", "first", "last"]
    assert [reject[2] for reject in rejects] == [text_documents.TOO_LONG, json_lines_documents.TOO_LONG]
    assert rejects[1][1].endswith("byte 18")


# What is no file --------------------------------------------------------------------------------------------


def test_links_pipes_and_the_like_are_rejected_with_the_reason(folder, tmp_path):
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "gone.jsonl").symlink_to("nowhere")
    (folder / "device.jsonl").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "s.jsonl"))
    with pytest.raises(ConfigError, match=r"device.jsonl: cannot be read: a device"):
        prepare(folder, tmp_path / "strict")
    out = prepare(folder, tmp_path / "out", max_reject_fraction=0.05)
    assert manifest_of(out)["rejected"] == {"cannot be read": 5}
    assert rejects_of(out) == {
        "pipe.jsonl": ("cannot be read", "a named pipe"),
        "loop.jsonl": ("cannot be read", "a symbolic link to itself"),
        "gone.jsonl": ("cannot be read", "a broken symbolic link"),
        "device.jsonl": ("cannot be read", "a device"),
        "s.jsonl": ("cannot be read", "a socket"),
    }
    assert manifest_of(out)["train_documents"] + manifest_of(out)["validation_documents"] == 200


@pytest.mark.timeout(20)
@pytest.mark.parametrize("reader", [TextDocuments, JSONLinesDocuments, ParquetDocuments])
def test_a_file_that_has_become_a_pipe_is_not_waited_for(tmp_path, reader):
    path = (
        write_parquet(tmp_path / "a.parquet", texts(300))
        if reader is ParquetDocuments
        else write_lines(tmp_path / "a.jsonl", ["x"])
    )
    made = reader(str(tmp_path))
    tasks = made.tasks()
    path.unlink()
    os.mkfifo(path)
    rejects = []
    assert [list(made.read(task, lambda *reject: rejects.append(reject))) for task in tasks] == [[]]
    assert [reject[2:4] for reject in rejects] == [("cannot be read", "a named pipe")]


@pytest.mark.timeout(20)
def test_a_pipe_or_device_as_the_source_is_a_mistake(tmp_path):
    os.mkfifo(tmp_path / "p.txt")
    with pytest.raises(ConfigError, match=r"p.txt is a named pipe, not a file"):
        TextDocuments(str(tmp_path / "p.txt"))
    with pytest.raises(ConfigError, match=r"/dev/zero is a device"):
        TextDocuments("/dev/zero")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_rejected(folder, tmp_path):
    write_lines(folder / "b.jsonl", ["secret"]).chmod(0)
    out = prepare(folder, tmp_path / "out", max_reject_fraction=0.05)
    assert rejects_of(out)["b.jsonl"] == ("cannot be read", "Permission denied")


def test_what_is_left_out_is_counted_in_the_report(folder, tmp_path, capsys):
    write_lines(folder / "elsewhere" / "b.jsonl", ["behind a link, and here"])
    (folder / "linked").symlink_to("elsewhere")
    (folder / "x.pdf").write_bytes(b"%PDF")
    (folder / "y.PDF").write_bytes(b"%PDF")
    (folder / "Makefile").write_text("all:")
    out = prepare(folder, tmp_path / "out")
    counts = {
        "a file of the kind .pdf": 2,
        "a file of the kind without a suffix": 1,
        "a symbolic link to a folder": 1,
    }
    assert manifest_of(out)["left_out"] == counts
    assert "| not read | a file of the kind .pdf | 2 |" in (out / "report.md").read_text()
    assert (
        "Not read: a file of the kind .pdf (2), a file of the kind without a suffix (1)"
        in capsys.readouterr().out
    )
    (folder / "z.pdf").write_bytes(b"%PDF")  # is no reason to prepare anything again
    before = contents(out)
    assert contents(prepare(folder, tmp_path / "out")) == before


def test_a_glob_takes_no_file_twice_through_a_link_to_a_folder_above(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "up").symlink_to(folder)
    assert texts_of(JSONLinesDocuments(str(folder / "**/*.jsonl"))) == texts(200)
    assert texts_of(JSONLinesDocuments(str(folder))) == texts(200)


# Names ------------------------------------------------------------------------------------------------------


def test_names_that_are_not_utf8(tmp_path):
    source = tmp_path / "in"
    for number, name in enumerate([b"caf\xe9.jsonl", b"d\xff/\xfe.jsonl", b"x\xe9.txt"]):
        path = os.path.join(os.fsencode(source), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(f'{{"text": "one {number}"}}\n{{"text": "two {number}"}}\nbroken {number}\n'.encode())
    out = prepare(source, tmp_path / "out", reader=TextDocuments, max_reject_fraction=0.5)
    assert set(manifest_of(out)["sources"]) == {"caf\\xe9", "d\\xff", "in"}
    assert set(rejects_of(out)) == {"caf\\xe9.jsonl:3", "\\xfe.jsonl:3"}
    before = contents(out)
    assert (
        contents(prepare(source, tmp_path / "out", reader=TextDocuments, max_reject_fraction=0.5)) == before
    )
    assert TextDocuments(str(source)).fingerprint()["files"][0][0] == "caf\\xe9.jsonl"


# Encodings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "advice"),
    [
        ("utf-16", "utf-16"),
        ("utf-16-le", "utf-16le"),
        ("utf-16-be", "utf-16be"),
        ("utf-32", "utf-32"),
        ("latin1", "latin1"),
    ],
)
def test_the_advice_names_the_encoding(tmp_path, encoding, advice):
    (tmp_path / "a.txt").write_bytes("caf\u00e9 \u00fcber alles, a text".encode(encoding))
    with pytest.raises(ConfigError, match=rf"not UTF-8.*iconv -f {advice} -t utf-8"):
        list(TextDocuments(str(tmp_path)).documents())
