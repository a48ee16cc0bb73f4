"""The page says what the manifest counts, is well-formed, loads nothing, and shows hostile documents as text."""

import json
import re
from html.parser import HTMLParser

import pytest

from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.preparation_report import as_markdown, write_report
from datamodules.preparation.report_page import as_page
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from datamodules.preparation.transforms.normalise import Normalise
from datamodules.preparation.transforms.personal_data import PersonalData
from plugins.commands.verify_data import verify_data
from tests.support.corpus import corpus, prepare, texts, write_lines
from tests.support.strange_folders import sign

HOSTILE = '</p></details><script>alert(1)</script><img src="https://evil.example/x.png" onerror=alert(1)>\u202eevil\x1b[2J'
VOID = {"meta", "rect"}
TAGS = VOID | {
    "html",
    "head",
    "title",
    "style",
    "body",
    "h1",
    "h2",
    "h3",
    "p",
    "dl",
    "dt",
    "dd",
    "div",
    "ol",
    "ul",
    "li",
    "b",
    "span",
    "small",
    "svg",
    "details",
    "summary",
}


class Page(HTMLParser):
    """Checks that each tag is one of ours and closed in order; collects the text and all attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.values = [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS | {"blockquote"}
        self.values += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID
        self.values += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    source = corpus(root / "source")
    again = [texts(120)[3], texts(120)[4], " ", f"{HOSTILE} anna@example.org {'word ' * 200}"]
    write_lines(source / "again.jsonl", again)
    (source / "bad.jsonl").write_text('{"text": \n')
    transforms = [Normalise(), ExactDuplicates(), PersonalData(["EMAIL"])]
    options = {"transforms": transforms, "max_reject_fraction": 0.5}
    folder = prepare(source, root / "out", **options)
    other = prepare(source, root / "other", engine=LocalEngine(2), **options)
    assert (folder / "report.html").read_bytes() == (other / "report.html").read_bytes()
    assert (folder / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()
    return folder


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def text_of(page):
    return " ".join(" ".join(Page(page).text).split())


def test_it_shows_what_becomes_of_the_documents(folder):
    manifest = manifest_of(folder)
    assert [place["documents"] for place in manifest["flow"]] == [123, 123, 121, 121]
    assert manifest["flow"][-1]["bytes"] == manifest["text_bytes"]
    assert manifest["train_bytes"] + manifest["validation_bytes"] == manifest["text_bytes"]
    shown = text_of((folder / "report.html").read_text())
    assert "Read 125 documents (100.0%)" in shown
    assert "\N{MINUS SIGN} blank 1 (0.80%) \N{MINUS SIGN} rejected: this line is not JSON 1 (0.80%)" in shown
    assert re.search(r"After 2\. ExactDuplicates 121 documents, [\d.]+ kB \(96\.8%\)", shown)
    assert "EMAIL replaced 1" in shown
    for title in ("As read", "Kept by 3. PersonalData", "Dropped by 2. ExactDuplicates: "):
        assert title in shown


def test_clusters_of_duplicates_by_size(folder):
    manifest = manifest_of(folder)
    section = "Duplicates by documents in a cluster (2. ExactDuplicates) clusters documents in them "
    assert section + "1 119 / 119 2 2 / 4" in text_of((folder / "report.html").read_text())
    assert "| 2. ExactDuplicates | clusters of 2 | 2 |" in (folder / "report.md").read_text()
    sizes = ["1,025 to 2,048", "17 to 32", "2", "3 to 4", "513 to 1,024"]
    counts = {f"clusters of {size}": 3 for size in sizes} | {
        f"documents in clusters of {size}": 7 for size in sizes
    }
    manifest["transforms"][1]["counted"] = counts
    ordered = ["2", "3 to 4", "17 to 32", "513 to 1,024", "1,025 to 2,048"]
    assert section + " ".join(f"{size} 3 / 7" for size in ordered) in text_of(as_page(manifest))
    rows = [f"| 2. ExactDuplicates | clusters of {size} | 3 |" for size in ordered]
    assert "\n".join(rows) in as_markdown(manifest)


def test_hostile_documents_are_text(folder):
    manifest = manifest_of(folder)
    samples = [["0", HOSTILE, HOSTILE]]
    manifest["source"] = HOSTILE
    manifest["sources"] = {HOSTILE: {"documents": 1, "tokens": 5, "bytes": 9}}
    manifest["rejected"] = {HOSTILE: 1}
    manifest["left_out"] = {HOSTILE: 1}
    for transform in manifest["transforms"]:
        transform |= {
            "name": HOSTILE,
            "dropped": {HOSTILE: 1},
            "counted": {HOSTILE: 1, f"clusters of 3{HOSTILE}": 1},
            "option": [HOSTILE],
        }
        transform["examples"] = {HOSTILE: samples}
    manifest["transforms"][0]["name"] = "LanguageFilter"
    for place in manifest["flow"]:
        place["samples"] = samples
    page = Page(as_page(manifest))
    assert "".join(page.text).count("<script>alert(1)</script>") > 15
    assert not {"\u202e", "\x1b"} & set("".join(page.text))
    assert not [name for name, _ in page.values if name in ("src", "href") or name.startswith("on")]


def test_it_needs_no_other_file(folder):
    page = (folder / "report.html").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"url\(|@import|<link|<script|<img|<iframe", page)
    assert "prefers-color-scheme:dark" in page
    assert 'name="viewport"' in page


def test_it_is_written_again_and_its_checksum_is_known(folder):
    before = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    write_report(folder)
    assert (folder / "report.html").read_bytes() == before
    assert verify_data([str(folder)]) == 0
    assert "report.html" in manifest_of(folder)["extras"]


def test_folders_of_earlier_versions_get_a_page_without_bytes(folder, tmp_path):
    """And nothing else in them changes."""
    manifest = manifest_of(folder)
    later = ("flow", "source_bytes", "lost_bytes", "train_bytes", "validation_bytes", "extras", "sha256")
    former = {name: value for name, value in manifest.items() if name not in later}
    shown = text_of(as_page(former))
    assert "Read 125 documents" in shown
    assert "After 2. ExactDuplicates 121 documents (96.8%)" in shown
    assert "bytes of text" not in shown
    assert "Kept by" not in shown
    (tmp_path / "report.md").write_text("as it was")
    sign(tmp_path, former)
    write_report(tmp_path)
    assert (tmp_path / "report.md").read_text() == "as it was"
    assert text_of((tmp_path / "report.html").read_text()) == shown


def test_joined_characters_stay_joined(folder):
    manifest = manifest_of(folder)
    manifest["flow"][0]["samples"] = [["0", "id", "\U0001f469\u200d\U0001f467\r\nनमस्ते"]]
    assert "\U0001f469\u200d\U0001f467\nनमस्ते" in as_page(manifest)
