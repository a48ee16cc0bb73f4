"""Documents are read once, however many transforms see all of them; what is kept in between changes no byte."""

import json
import resource

import pyarrow
import pytest

from core.contracts import Transform
from core.errors import ConfigError
from datamodules.preparation import token_preparation
from datamodules.preparation.kept_documents import KeptDocuments, kept_in, places
from datamodules.preparation.readers import source_files
from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from datamodules.preparation.transforms.gopher_quality import GopherQuality
from datamodules.preparation.transforms.normalise import Normalise
from datamodules.preparation.transforms.personal_data import PersonalData
from datamodules.preparation.transforms.repeated_lines import RepeatedLines
from tests.support.corpus import contents, prepare, texts, write_lines
from tests.support.duplicates import Backwards

READ = []


class NotedReader(JSONLinesDocuments):
    """Notes the tasks that it reads."""

    def read(self, task, reject):
        READ.append(task["number"])
        return super().read(task, reject)


def transforms():
    quality = GopherQuality(
        min_words=8, min_stop_words=None, min_alphabetic_words=None, max_mean_word_length=None
    )
    return [
        Normalise(),
        PersonalData(),
        ExactDuplicates(),
        quality,
        RepeatedLines(min_characters=5),
        PersonalData(),
    ]


def options():
    return {
        "reader": lambda source: NotedReader(source, metadata=["date"]),
        "transforms": transforms(),
        "max_reject_fraction": 0.5,
        "test_fraction": 0.1,
    }


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 5000)
    READ.clear()
    some = [
        f"{text}\nWrite to anna.{number % 7}@mail.org\n\n{text[::-1]}"
        for number, text in enumerate(texts(200))
    ]
    for number in range(4):
        path = write_lines(
            tmp_path / "source" / f"{number}.jsonl", [*some, *some[:50], " "][number::4], date="2026-11-24"
        )
        with path.open("a") as file:
            file.write('{"text": broken\n')
    return tmp_path / "source"


@pytest.mark.ci
def test_each_piece_is_read_once_and_no_byte_changes(source, tmp_path, monkeypatch):
    once = contents(prepare(source, tmp_path / "once", **options()))
    assert sorted(READ) == [*range(len(set(READ)))]
    assert len(READ) > 3
    monkeypatch.setattr(token_preparation, "places", lambda transforms: ())
    assert contents(prepare(source, tmp_path / "again", **options())) == once
    manifest = json.loads(once["manifest.json"])
    assert [
        stage["name"] for stage in manifest["transforms"] if stage["dropped"] or stage.get("counted")
    ] == [
        "PersonalData",
        "ExactDuplicates",
        "GopherQuality",
        "RepeatedLines",
    ]
    assert manifest["rejected"]
    assert manifest["blank"]


class Forgets(Backwards):
    """Removes some of what is kept before each run over the tasks."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, work, tasks):
        for path in self.folder.glob("parts/documents-*/*1"):
            path.unlink()
        yield from super().run(work, tasks)


@pytest.mark.ci
def test_what_is_not_kept_is_read_again(source, tmp_path):
    whole = contents(prepare(source, tmp_path / "whole", **options()))
    READ.clear()
    assert contents(prepare(source, tmp_path / "out", engine=Forgets(tmp_path / "out"), **options())) == whole
    assert READ.count(1) > READ.count(0) == 1


class NoRoom(Backwards):
    """Limits files to 1,000 bytes while it runs."""

    def run(self, work, tasks):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            yield from super().run(work, tasks)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.ci
def test_no_room_is_a_message_and_the_same_again_goes_on(source, tmp_path):
    whole = contents(prepare(source, tmp_path / "whole", **options()))
    with pytest.raises(ConfigError, match=r"documents-2/.*\n.*make room"):
        prepare(source, tmp_path / "out", engine=NoRoom(), **options())
    assert contents(prepare(source, tmp_path / "out", **options())) == whole


# One file ---------------------------------------------------------------------------------------------------


def batch(kind, *documents, **columns):
    names = ["text", *columns]
    return pyarrow.record_batch(
        [pyarrow.array(column, kind) for column in (documents, *columns.values())], names
    )


def test_batches_come_back_with_their_types_and_the_counts(tmp_path):
    kept, counts = KeptDocuments(tmp_path, (1, 3)), []
    found = [
        batch(pyarrow.string(), "a", "b"),
        batch(pyarrow.large_string(), "c", "d\ud7ff\U0010ffff").slice(1),
        batch(pyarrow.large_string(), "e", None, date=["x", None]),
    ]
    assert list(kept.writing(iter(found), lambda: {"é": [1]}, 7, 1)) == found
    index, file = kept.open(7, until=2)
    back = list(kept_in(file, counts.append))
    assert (index, back, counts) == (1, found, [{"é": [1]}])
    assert [one.schema for one in back] == [one.schema for one in found]
    assert kept.open(7, until=0) is None
    assert kept.open(6, until=2) is None


def test_a_task_without_documents_is_kept(tmp_path):
    kept, counts = KeptDocuments(tmp_path, (0,)), []
    assert list(kept.writing(iter([]), lambda: {"blank": 3}, 0, 0)) == []
    assert list(kept_in(kept.open(0, 0)[1], counts.append)) == []
    assert counts == [{"blank": 3}]


def test_a_later_place_replaces_an_earlier_one(tmp_path):
    kept = KeptDocuments(tmp_path, (0, 2))
    for index in (0, 2):
        list(kept.writing(iter([batch(pyarrow.string(), "a")]), dict, 5, index))
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*5")] == [
            f"documents-{index}/000005"
        ]
    kept.remove(5)
    assert kept.size() == 0


def test_nothing_is_kept_of_documents_that_are_not_all_taken(tmp_path):
    kept = KeptDocuments(tmp_path, (0,))
    writing = kept.writing(iter([batch(pyarrow.string(), "a")] * 3), dict, 0, 0)
    next(writing)
    writing.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_documents_are_kept_where_other_transforms_are_in_between():
    class SeesAll(Transform):
        needs_all_documents = True

        def fingerprint(self):
            return {}

        def apply(self, batch, drop):
            return batch

    all_, one = SeesAll(), Normalise()
    assert places([one, one]) == ()
    assert places([one, all_, all_, one, one, all_]) == (1, 5)
    assert places([all_, all_, one]) == (0,)
