"""Source code: which files of a repository are read, their license, archives, and archives made to do harm."""

import gzip
import io
import os
import random
import stat
import tarfile
import tracemalloc
import zipfile
from importlib.metadata import files

import pytest
import zstandard

from core.errors import ConfigError
from datamodules.preparation.readers import archived_files, licenses, source_code, source_files
from datamodules.preparation.readers.programming_languages import LANGUAGES, language_of
from datamodules.preparation.readers.source_code import SourceCode
from tests.benchmarks import license_accuracy
from tests.support.corpus import rows_of, texts_of
from tests.support.license_texts import COMMONS_CLAUSE, GPL_NOTICE, MIT
from tests.support.restarts_of_preparation import ends_in_the_same_bytes

pytest.importorskip("licenseclassifier")

REPOSITORIES = {
    "mit-main/LICENSE": MIT,
    "mit-main/src/a.py": "print('a')\n",
    "mit-main/src/b.CPP": "int b;\n",
    "mit-main/src/gnu/COPYING": GPL_NOTICE,
    "mit-main/src/gnu/deep/c.py": "print('c')\n",
    "mit-main/src/gnu/own.py": "# SPDX-License-Identifier: (MIT OR GPL-3.0-only)\nprint('own')\n",
    "mit-main/vendor/d.py": "print('d')\n",
    "mit-main/Makefile": "all:\n\techo\n",
    "mit-main/notes.txt": "no code",
    "mit-main/app.min.js": "a()",
    "mit-main/other.c": "// SPDX-License-Identifier: GPL-2.0-only\nint other;\n",
    "mit-main/odd.c": "/* SPDX-License-Identifier: Mine */\nint odd;\n",
    "mit-main/empty.py": "",
    "none-main/e.py": "print('e')\n",
    "none-main/LICENSE.py": "print('no license file')\n",
    "both-main/LICENSE-MIT": MIT,
    "both-main/COPYING": GPL_NOTICE,
    "both-main/f.py": "print('f')\n",
    "sold-main/LICENSE.md": MIT + COMMONS_CLAUSE,
    "sold-main/g.py": "print('g')\n",
}
KEPT = {
    "mit-main/src/a.py": ("Python", "MIT"),
    "mit-main/src/b.CPP": ("C++", "MIT"),
    "mit-main/src/gnu/own.py": ("Python", "(MIT OR GPL-3.0-only)"),
    "mit-main/Makefile": ("Makefile", "MIT"),
}
REJECTED = {
    "mit-main/src/gnu/deep/c.py": source_code.NOT_ALLOWED,
    "mit-main/other.c": source_code.NOT_ALLOWED,
    "mit-main/odd.c": source_code.NOT_KNOWN,
    "none-main/e.py": source_code.NO_LICENSE,
    "none-main/LICENSE.py": source_code.NO_LICENSE,
    "both-main/f.py": source_code.NOT_ALLOWED,
    "sold-main/g.py": source_code.NOT_KNOWN,
}


def folder(path, files):
    for name, text in files.items():
        place = path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def zipped(files):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return held.getvalue()


def tarred(files, mode="w", change=lambda member: member):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode=mode) as archive:
        for name, text in files.items():
            data = text if isinstance(text, bytes) else text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(change(member), io.BytesIO(data))
    return held.getvalue()


PACK = {
    ".zip": zipped,
    ".tar": tarred,
    ".tar.gz": lambda files: tarred(files, "w:gz"),
    ".tgz": lambda files: tarred(files, "w:gz"),
    ".tar.bz2": lambda files: tarred(files, "w:bz2"),
    ".tar.zst": lambda files: zstandard.compress(tarred(files)),
}


def read(path, **options):
    rejects = []
    rows, _ = rows_of(SourceCode(str(path), **options), rejects)
    return rows, rejects


def test_which_files_of_folders_are_read_by_language_and_license(tmp_path):
    rows, rejects = read(folder(tmp_path, REPOSITORIES))
    assert {row["id"]: row["source"] for row in rows} == {
        name: language for name, (language, _) in KEPT.items()
    }
    assert {row["id"]: row["text"] for row in rows} == {name: REPOSITORIES[name] for name in KEPT}
    assert {os.path.relpath(reject[1], tmp_path): reject[2] for reject in rejects} == REJECTED


@pytest.mark.parametrize("suffix", PACK)
def test_archives_are_read_as_folders_are(tmp_path, suffix):
    path = tmp_path / f"all{suffix}"
    path.write_bytes(PACK[suffix](dict(sorted(REPOSITORIES.items(), reverse=True))))
    rows, rejects = read(tmp_path, count_by="license")
    assert {row["id"].removeprefix(f"all{suffix}:"): row["source"] for row in rows} == {
        name: license for name, (_, license) in KEPT.items()
    }
    assert {reject[1].removeprefix(f"{path}, "): reject[2] for reject in rejects} == REJECTED


def test_languages_and_licenses_are_chosen(tmp_path):
    folder(tmp_path, REPOSITORIES)
    assert [row["id"] for row in read(tmp_path, languages=["C++"])[0]] == ["mit-main/src/b.CPP"]
    rows, rejects = read(
        tmp_path, licenses=["gpl-3.0-or-later", "MIT"], languages=["Python"], count_by="repository"
    )
    found = {row["id"].partition("/")[2]: row["source"] for row in rows}
    assert found == {
        "src/a.py": "mit-main",
        "src/gnu/deep/c.py": "mit-main",
        "src/gnu/own.py": "mit-main",
        "f.py": "both-main",
    }
    assert len(rejects) == 3
    rows, rejects = read(tmp_path, licenses=None, count_by="license")
    assert len(rows) == len(KEPT) + len(REJECTED)
    assert rejects == []
    assert {row["source"] for row in rows} >= {"none", "GPL-3.0-or-later AND MIT", "unknown"}


def test_a_single_checkout_and_a_license_above_the_source(tmp_path):
    folder(tmp_path, {"LICENSE": MIT, "repo/a.py": "a = 1\n"})
    assert len(read(tmp_path)[0]) == 1
    assert read(tmp_path / "repo")[0] == []


BAD = {
    "a.py": (b"x = 1\0", source_code.BINARY),
    "b.py": (b"x = '\xff'", "not UTF-8"),
    "c.py": (b"x" * 2000, source_code.TOO_LONG),
}


@pytest.mark.parametrize("suffix", ["", *PACK])
def test_files_that_are_no_text_or_too_long_are_rejected(tmp_path, suffix):
    files = {"r/LICENSE": MIT, **{f"r/{name}": data for name, (data, _) in BAD.items()}}
    files["r/d.py"] = b"\xef\xbb\xbfx = 1\n"
    if suffix:
        (tmp_path / f"r{suffix}").write_bytes(PACK[suffix](files))
    else:
        folder(tmp_path, files)
    rows, rejects = read(tmp_path, max_file_bytes=1500)
    assert [row["text"] for row in rows] == ["x = 1\n"]
    assert [reject[2] for reject in rejects] == [reason for _, reason in BAD.values()]


def test_links_are_not_followed(tmp_path):
    folder(tmp_path / "out", {"secret.py": "key = 1\n", "LICENSE": MIT})
    folder(tmp_path / "in", {"r/LICENSE": MIT, "r/a.py": "a = 1\n", "s/b.py": "b = 1\n"})
    (tmp_path / "in/r/link.py").symlink_to(tmp_path / "out/secret.py")
    (tmp_path / "in/r/folder").symlink_to(tmp_path / "out")
    (tmp_path / "in/s/LICENSE").symlink_to(tmp_path / "out/LICENSE")
    rows, rejects = read(tmp_path / "in")
    assert [row["id"] for row in rows] == ["r/a.py"]
    assert [reject[2] for reject in rejects] == [source_code.LINK, source_code.NO_LICENSE]


def linked(member):
    if member.name.endswith("link.py"):
        member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
    return member


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_paths_that_lead_out_and_links_of_archives_are_left_out(tmp_path, suffix):
    files = {
        "r/LICENSE": MIT,
        "r/a.py": "a = 1\n",
        "../b.py": "b",
        "/etc/c.py": "c",
        "r\\..\\..\\d.py": "d",
        "r/link.py": "e",
    }
    if suffix == ".tar":
        data = tarred(files, change=linked)
    else:
        link = zipfile.ZipInfo("r/link2.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        data = zipped(
            {name: text for name, text in files.items() if name != "r/link.py"} | {link: "/etc/passwd"}
        )
    (tmp_path / f"r{suffix}").write_bytes(data)
    rows, rejects = read(tmp_path)
    assert [row["id"] for row in rows] == [f"r{suffix}:r/a.py"]
    assert rejects == []


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("seed", range(6))
def test_damaged_archives_are_rejected_and_never_raise(tmp_path, suffix, seed):
    draw = random.Random(seed)
    files = {"r/LICENSE": MIT, **{f"r/{n}.py": f"x = {draw.random()}\n" * 50 for n in range(40)}}
    data = bytearray(PACK[suffix](files))
    if seed % 2:
        del data[draw.randrange(len(data) * 9 // 10) :]
    else:
        for _ in range(40):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    (tmp_path / f"r{suffix}").write_bytes(data)
    rows, rejects = read(tmp_path)
    assert len(rows) < 40 or suffix in (".tar", ".zip")  # a bit in a text without a checksum
    assert rejects or not seed % 2


def pax(size, name="comment"):
    """Returns a tar's extended header that says it is of this size."""
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, size
    return member.tobuf(tarfile.USTAR_FORMAT)


HARM = {
    "long header.tar.gz": lambda: pax(60 << 20) + b"\0" * (60 << 20),
    "bomb.tar.gz": lambda: tarred({"r/a.py": b"\0" * (80 << 20)}),
    "many headers.tar.gz": lambda: (pax(16) + b"16 comment=abcde\n".ljust(512, b"\0")) * 5000,
    "no archive.tar": lambda: b"no archive at all" * 100,
    "no archive.zip": lambda: b"no archive at all" * 100,
    "empty.tar": lambda: b"",
}


@pytest.mark.parametrize("name", HARM)
def test_archives_made_to_do_harm_take_no_memory(tmp_path, name):
    data = HARM[name]()
    if name.endswith("gz"):
        data = gzip.compress(data, 9)
    (tmp_path / name).write_bytes(data)
    del data
    tracemalloc.start()
    rows, rejects = read(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 24 << 20
    tracemalloc.stop()
    assert rows == []
    assert len(rejects) == 1


def test_a_zip_bomb_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(archived_files, "_SMALL", 1 << 20)
    monkeypatch.setattr(archived_files, "_RATIO", 50)
    (tmp_path / "a.zip").write_bytes(zipped({f"r/{n}.py": b"#" * (1 << 19) for n in range(20)}))
    rows, rejects = read(tmp_path, licenses=None)
    assert len(rows) < 10
    assert [reject[2] for reject in rejects] == ["a zip bomb"]


def test_languages_by_name():
    names = [
        "a.py",
        "b.C",
        "Makefile",
        "x.unknown",
        "py",
        "CMakeLists.txt",
        "a.d.ts",
        "Dockerfile",
        "a.rs.in",
    ]
    found = [language_of(name) for name in names]
    assert found == ["Python", "C", "Makefile", None, None, "CMake", "TypeScript", "Dockerfile", None]
    assert len(LANGUAGES) == 91


def test_names_of_license_files():
    yes = [
        "LICENSE",
        "licence.txt",
        "COPYING",
        "COPYING3",
        "COPYING.LESSER",
        "LICENSE-MIT",
        "MIT-LICENSE.txt",
        "UNLICENSE",
    ]
    no = ["license.py", "licenses.h", "license_test.go", "README.md", "licensed", "copyright"]
    assert [name for name in [*yes, *no] if licenses.is_license_file(name)] == yes


def random_expression(draw, depth=0):
    """Returns an expression, and whether it is met where MIT and ISC are allowed."""
    if depth > 3 or draw.random() < 0.4:
        names = ["MIT", "ISC", "GPL-2.0-only", "MPL-2.0", "GPL-2.0-only WITH Classpath-exception-2.0"]
        name = draw.choice(names)
        return name, name in ("MIT", "ISC")
    every = draw.random() < 0.5
    parts = [random_expression(draw, depth + 1) for _ in range(draw.randint(2, 3))]
    words = [f"({text})" if " " in text else text for text, _ in parts]
    return (" AND " if every else " OR ").join(words), (all if every else any)(value for _, value in parts)


def test_expressions_are_met_as_logic_has_it():
    draw = random.Random(0)
    found = [random_expression(draw) for _ in range(500)]
    assert [licenses.is_allowed(text, ["MIT", "ISC"]) for text, _ in found] == [value for _, value in found]
    assert {value for _, value in found} == {True, False}
    assert licenses.is_allowed("GPL-2.0-only AND MPL-2.0 OR MIT", ["MIT"])  # AND binds closer
    assert not licenses.is_allowed("MIT AND MPL-2.0 OR GPL-2.0-only AND MIT", ["MIT"])


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("// SPDX-License-Identifier: MIT", "MIT"),
        ("/* SPDX-License-Identifier: mit or apache-2.0 */", "MIT OR Apache-2.0"),
        ("<!-- SPDX-License-Identifier: GPL-2.0-only -->x", "GPL-2.0-only"),
        ("(* SPDX-License-Identifier: GPL-2.0+ *)", "GPL-2.0+"),
        ("# SPDX-License-Identifier: Mine", licenses.UNKNOWN),
        ("# License: MIT", ""),
        ("x\n" * 5000 + "# SPDX-License-Identifier: MIT", ""),
    ],
)
def test_headers(header, expected):
    assert licenses.header_of(header) == expected


def test_terms_beside_a_long_license_are_noticed():
    file = next(f for f in files("packaging") or () if f.name == "LICENSE.APACHE")
    apache, llvm = file.locate().read_bytes(), "---- LLVM Exceptions to the Apache 2.0 License ----\n\n"
    assert licenses.licenses_in(apache) == ["Apache-2.0"]
    assert licenses.licenses_in(b"Copyright 2024 Ada Example and many others\n" + apache) == ["Apache-2.0"]
    for clause in (COMMONS_CLAUSE, llvm + "word " * 200):
        assert licenses.licenses_in(apache + clause.encode()) == ["Apache-2.0", licenses.UNKNOWN]
        assert licenses.licenses_in(clause.encode() + apache) == ["Apache-2.0", licenses.UNKNOWN]
    assert licenses.licenses_in(apache + f"{llvm}{'word ' * 130}".encode()) == ["Apache-2.0"]


@pytest.mark.ci
def test_license_files_of_installed_packages_are_what_their_metadata_say():
    found = list(license_accuracy.labelled())
    right = [one for one in found if license_accuracy.is_same(*one[1:])]
    assert len(found) > 50
    assert len(right) > 0.85 * len(found)
    for (
        name,
        label,
        names,
    ) in found:  # what differs has several licenses, or is not known; none is taken for another
        assert (name, label, names) in right or len(names) > 1 or names == [licenses.UNKNOWN], name


def test_mistakes_are_named(tmp_path):
    folder(tmp_path, REPOSITORIES)
    for options, message in [
        ({"languages": ["python"]}, "Did you mean Python"),
        ({"licenses": ["MITT"]}, "Did you mean MIT"),
        ({"licenses": ["MIT OR ISC"]}, "SPDX has no license"),
        ({"licenses": []}, "licenses is empty"),
        ({"count_by": "file"}, "count_by"),
        ({"max_file_bytes": 0}, "max_file_bytes"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            SourceCode(str(tmp_path), **options)
        assert len(str(caught.value).splitlines()) <= 10


def test_a_changed_license_changes_the_tasks(tmp_path):
    folder(tmp_path, REPOSITORIES)
    before, reader = SourceCode(str(tmp_path)).fingerprint(), SourceCode(str(tmp_path))
    tasks = reader.tasks()
    (tmp_path / "mit-main/LICENSE").write_text(GPL_NOTICE)
    assert SourceCode(str(tmp_path)).fingerprint() != before
    assert SourceCode(str(tmp_path)).tasks() != tasks


@pytest.mark.ci
def test_workers_and_kills_change_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 500)
    draw = random.Random(0)
    files = {f"r/{n}.py": f"value_{n} = {[draw.random() for _ in range(9)]}\n" for n in range(60)}
    folder(tmp_path / "in", {"r/LICENSE": MIT, **files})
    for number in range(4):
        some = {name.replace("r/", f"z{number}/"): text for name, text in list(files.items())[number::4]}
        (tmp_path / "in" / f"{number}.tar.gz").write_bytes(
            PACK[".tar.gz"]({f"z{number}/LICENSE": MIT, **some})
        )
    reader = SourceCode(str(tmp_path / "in"))
    assert len(reader.tasks()) > 3
    assert len(texts_of(reader)) == 120
    ends_in_the_same_bytes(tmp_path / "in", tmp_path / "out", reader=SourceCode)
