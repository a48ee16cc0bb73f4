"""Files of a stranger: what is opened, how much of it is read, and which JSON is taken."""

import os

import pytest

from toolkit import bounded
from toolkit.bounded import open_inside, parse_json, plain_path, read_error, read_inside, require_inside


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder" / "below").mkdir(parents=True)
    (tmp_path / "folder" / "below" / "file").write_bytes(b"inside")
    (tmp_path / "outside").write_bytes(b"outside")
    return tmp_path / "folder"


def test_a_path_is_of_plain_names_below_a_folder():
    for name in ("a", "a/b.c", "..a", "a" * 255, "ä" * 127, "/".join(["a"] * 512)):
        assert plain_path(name), name
    for name in (
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "a/..",
        "a\\b",
        "a\n",
        "a" * 256,
        "ä" * 128,
        "/".join(["a"] * 513),
        3,
    ):
        assert not plain_path(name), name


def test_links_are_followed_inside_the_folder_only(folder, tmp_path):
    (folder / "inner").symlink_to("below")
    (folder / "link").symlink_to("inner/file")
    (folder / "below" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "whole").symlink_to(folder)
    for name in ("below/file", "inner/file", "link"):
        assert read_inside(tmp_path / "whole", name) == b"inside"
    for name in ("below/out", "inner/out"):
        with pytest.raises(ValueError, match="a symbolic link leads out of the folder"):
            read_inside(folder, name)
    for name in ("../outside", str(tmp_path / "outside"), "a\x1b"):
        with pytest.raises(ValueError, match="is no path inside the folder") as error:
            require_inside(folder, name)
        assert str(error.value).isprintable()


def test_only_regular_files_are_opened(folder):
    os.mkfifo(folder / "pipe")
    for name, kind in (("pipe", "a named pipe"), ("below", "a folder")):
        with pytest.raises(ValueError, match=f"it is {kind}, not a regular file"):
            open_inside(folder, name)
    with open_inside(folder, "below/file") as stream:
        assert stream.read() == b"inside"


def test_a_file_is_read_up_to_the_bound(folder, monkeypatch):
    monkeypatch.setattr(bounded, "_PIECE_BYTES", 4)
    monkeypatch.setattr(bounded, "MOST_BYTES", 10)
    for size in (0, 3, 4, 9, 10):
        (folder / "file").write_bytes(b"0123456789"[:size])
        assert read_inside(folder, "file") == b"0123456789"[:size]
    (folder / "file").write_bytes(b"0123456789a")
    with pytest.raises(ValueError, match="it has more than 0 MiB"):
        read_inside(folder, "file")


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs files that say that they are empty")
def test_a_file_that_says_that_it_is_empty_is_read_up_to_the_bound(monkeypatch):
    folder = bounded.Path("/proc/self")
    assert os.stat("/proc/self/maps").st_size == 0
    assert b"\n" in read_inside(folder, "maps")
    monkeypatch.setattr(bounded, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="it has more than"):
        read_inside(folder, "maps")


def test_why_a_file_cannot_be_read_is_said_without_its_name(folder):
    with pytest.raises(FileNotFoundError) as error:
        read_inside(folder, "gone")
    assert read_error(error.value) == "No such file or directory"
    assert read_error(OSError()) == "OSError"
    assert read_error(ValueError("why")) == "why"


def test_json_is_strict():
    assert parse_json('{"a": [1, 2.5, null], "ä": {"a": 1}}'.encode()) == {"a": [1, 2.5, None], "ä": {"a": 1}}
    assert parse_json(b'{"a": 1, "a": 2}', unique=False) == {"a": 2}
    for content, reason in (
        (b'{"b": 0, "a": 1, "a": 2}', "it has the key 'a' twice"),
        (b'[{"\\u001b": 1, "\\u001b": 2}]', r"it has the key '\\x1b' twice"),
        (b"[NaN]", "NaN is no number in JSON"),
        (b"[-Infinity]", "-Infinity is no number in JSON"),
        (b"[1e999]", "1e999 is no number in JSON"),
        (b'{"a": "\xff"}', "it is no JSON in UTF-8"),
        (b"{", "it is no JSON in UTF-8"),
    ):
        with pytest.raises(ValueError, match=reason):
            parse_json(content)


def test_json_is_of_bounded_depth_and_size(monkeypatch):
    for depth, opening, closing in ((64, b"[", b"]"), (32, b'[{"a":', b"}]")):
        assert parse_json(opening * depth + b"1" + closing * depth)
    for depth, opening, closing in ((65, b"[", b"]"), (33, b'[{"a":', b"}]"), (200_000, b"[", b"]")):
        with pytest.raises(ValueError, match="it is nested too deeply"):
            parse_json(opening * depth + b"1" + closing * depth)
    monkeypatch.setattr(bounded, "MOST_VALUES", 3)
    assert parse_json(b'[{"a":1},2]') == [{"a": 1}, 2]
    for content in (b"[1,2,3,4]", b"[[[[]]]]", b'{"a":{"a":{"a":{}}}}'):
        with pytest.raises(ValueError, match="it is too large"):
            parse_json(content)
    monkeypatch.setattr(bounded, "MOST_VALUES", 99)
    monkeypatch.setattr(bounded, "MOST_BYTES", 5)
    assert parse_json(b"[1,2]") == [1, 2]
    with pytest.raises(ValueError, match="it is too large"):
        parse_json(b"[1,2] ")
