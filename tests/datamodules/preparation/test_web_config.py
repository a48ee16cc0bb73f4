"""configs/data/web.yaml on a small crawl: each stage does its part, and the figures of the report are those planted."""

import json
import random

import pytest

from core.__main__ import main
from datamodules.preparation.readers.warc_documents import REDIRECT
from tests.support.archives import page, response, write_archive
from tests.support.corpus import contents, documents_of
from tests.support.quality_corpus import prose

pytestmark = pytest.mark.ci

FRENCH = (
    "Le chat dort sur la chaise pendant que les enfants jouent dans le jardin avec leurs amis. Il fait beau aujourd'hui et nous "
    "irons au marché pour acheter du pain, du fromage et des pommes. "
) * 3


def text(seed):
    draw = random.Random(seed)
    return "\n".join(prose(draw, words=120, odd=0.0) for _ in range(3))


@pytest.fixture(scope="module")
def crawl(tmp_path_factory):
    """60 pages of prose; of some of them copies, one with a word changed, and what has to go."""
    folder = tmp_path_factory.mktemp("crawl")
    good = [text(seed) for seed in range(60)]
    good[0] += (
        "\nWrite to anna.smith@mail-provider.com before the end of the week, or there will be no place."
    )
    changed = good[2].replace(" the ", " one ", 1)
    repeated = "\n".join([prose(random.Random(99), words=60, odd=0.0)] * 6)
    pages = [*good, good[1], good[1], changed, repeated, FRENCH, "Too short.", "buy now " * 200]
    records = [
        response(page(one), url=f"http://site-{number % 3}.example.org/{number}")
        for number, one in enumerate(pages)
    ]
    records.insert(5, response(page("moved"), status="301 Moved Permanently"))
    for part in range(2):
        write_archive(folder / f"{part}.warc.gz", records[part::2])
    return folder


def prepared(crawl, folder, *words):
    command = ["prepare", "--config", "data/web", f"--data.source={crawl}", f"--output={folder}"]
    assert main([*command, "--data.tokenizer.vocab_size=400", *words]) == 0
    return folder


def test_each_stage_does_its_part_whoever_does_the_work(crawl, tmp_path):
    folder = prepared(crawl, tmp_path / "a")
    report = json.loads((folder / "report.json").read_text())
    dropped = {name.partition(". ")[2]: sum(counts.values()) for name, counts in report["dropped"].items()}
    assert (dropped["LanguageFilter"], dropped["GopherRepetition"]) == (3, 1)
    assert (dropped["ExactDuplicates"], dropped["NearDuplicates"]) == (2, 1)
    assert (report["rejected"], report["skipped"]) == ({}, {REDIRECT: 1})
    assert f"| skipped | {REDIRECT} | 1 |" in (folder / "report.md").read_text()
    assert f"skipped: {REDIRECT}" in (folder / "report.html").read_text()
    splits = {split: documents_of(folder, split) for split in ("train", "validation", "test")}
    assert all(splits.values())
    kept = "\n".join(one for documents in splits.values() for one in documents)
    assert "Write to <EMAIL> before" in kept
    assert "chat dort" not in kept
    assert sum(report[f"{split}_documents"] for split in splits) >= 60  # tails of long documents count apart
    assert contents(folder) == contents(prepared(crawl, tmp_path / "b", "--data.engine.workers=1"))
