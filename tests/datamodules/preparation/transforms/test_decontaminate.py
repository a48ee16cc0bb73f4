import json
import pickle
import warnings

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from core.errors import ConfigError
from datamodules.preparation.transforms.compared_words import word_pattern, words_of
from datamodules.preparation.transforms.decontaminate import Decontaminate, without
from tests.benchmarks.decontamination import built, made, score

QUESTION = "Which chemist isolated polonium and radium in Paris?"  # 8 words
LONG = (
    "Marie carries seven baskets of ripe apricots to the market at dawn and sells four of them before noon; how many "
    "baskets does she carry home if a neighbour hands her two more on the way?"
)


@pytest.fixture
def items(tmp_path):
    def write(*records, name="items"):
        path = tmp_path / f"{name}.jsonl"
        records = [{"question": one} if isinstance(one, str) else one for one in records]
        path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
        return str(path)

    return write


def around(text):
    return f"A page about many things. {text} And it goes on, as pages do."


def batch_of(*texts):
    numbers = [str(n) for n in range(len(texts))]
    return pyarrow.record_batch({"text": list(texts), "source": ["s"] * len(texts), "id": numbers})


@pytest.mark.parametrize("item", [QUESTION, LONG])
def test_an_item_is_found_however_it_is_written(items, item):
    transform = Decontaminate([items(item)], ["question"])
    words = item.replace("?", "").split()
    for form in (
        item,
        item.upper(),
        "\n".join(words),
        " \u2013 ".join(words),
        item.replace(" ", "\u00a0"),
        "_".join(words),
    ):
        text = around(form)
        [match] = transform.matches(text)
        assert (match.set, match.item, match.share) == ("items", 0, 1.0)
        assert words_of(text[match.start : match.end]) == words_of(item)
    assert not transform.matches(around(""))


def test_a_short_item_has_to_be_there_as_a_whole_and_a_long_one_by_its_share(items):
    short = Decontaminate([items(QUESTION)], ["question"])
    assert not short.matches(around(QUESTION.replace("Paris", "London")))
    long = Decontaminate([items(LONG)], ["question"])
    words = LONG.split()
    for share in (0.5, 0.9):
        part = " ".join(words[: int(share * len(words))])
        assert bool(long.matches(around(part))) == (share > 0.7)
        assert Decontaminate([items(LONG)], ["question"], min_share=0.4).matches(around(part))
    assert not long.matches(" ".join(sorted(words)))


def test_common_wording_does_not_count(items):
    template = "Read the following passage with care and then choose the best of the four answers below it:"
    records = [f"{template} planet {n} orbits star {n * 7} with moons {n + 90}" for n in range(20)]
    transform = Decontaminate([items(*records)], ["question"])
    assert not transform.matches(around(template))
    assert {match.item for match in transform.matches(around(records[3]))} == {3}


def test_short_items_without_distinctive_words_are_not_looked_for(items):
    with pytest.warns(UserWarning, match="2 of the 3 texts of items are not looked for"):
        transform = Decontaminate([items("Which of these is it?", "True", QUESTION)], ["question"])
    assert not transform.matches(around("Which of these is it?"))
    with pytest.raises(ConfigError, match="none of the 1 texts of items can be looked for"):
        Decontaminate([items("Which of these is it?")], ["question"])


def test_fields_joined_or_alone_nested_and_in_lists(items):
    record = {"q": {"stem": QUESTION}, "choices": [LONG, "no"], "number": 3}
    path = items(record)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = Decontaminate([path], ["q.stem", "choices"])
    joined = Decontaminate([path], ["q.stem", "choices"], joined=True)
    assert alone.matches(around(QUESTION))
    assert alone.matches(around(LONG))
    assert not joined.matches(around(QUESTION))
    assert joined.matches(f"{QUESTION} {LONG} no")
    assert alone.fingerprint() != joined.fingerprint()
    with pytest.raises(ConfigError, match=r"Name those that do in `fields`. It has: choices, number, q"):
        Decontaminate([path], ["stem"])


def test_documents_are_dropped_or_the_items_cut_out_and_both_counted(items):
    paths = [items(QUESTION, name="first"), items(LONG, QUESTION.upper(), name="second")]
    texts = [around(""), around(LONG), around(QUESTION), QUESTION]
    drop, cut = (Decontaminate(paths, ["question"], action=action) for action in ("drop", "cut"))
    dropped = []
    left = drop.apply(batch_of(*texts), lambda *what: dropped.append(what))
    assert left["id"].to_pylist() == ["0"]
    assert [what[:2] for what in dropped] == [("has items of second", [1]), ("has items of first", [2, 3])]
    assert dropped[1][2] == [f"item 0 (100%): {QUESTION[:-1]}"] * 2
    counts = {
        "first: documents": 2,
        "first: items in them": 2,
        "second: documents": 3,
        "second: items in them": 3,
    }
    assert (drop.take_counts(), drop.take_counts()) == (counts, {})
    dropped.clear()
    left = pickle.loads(pickle.dumps(cut)).apply(batch_of(*texts), lambda *what: dropped.append(what))
    rest = "A page about many things. And it goes on, as pages do."
    assert left["text"].to_pylist() == [texts[0], rest, rest]
    assert [what[:2] for what in dropped] == [("has items of first", [3])]


def test_two_places_are_cut_and_what_is_between_stays(items):
    transform = Decontaminate([items(QUESTION)], ["question"])
    text = f"One. {QUESTION} Between. {QUESTION.lower()}\nTwo."
    assert without(text, transform.matches(text)) == "One. Between. \nTwo."


def test_a_task_folder_of_lm_evaluation_harness(tmp_path):
    folder = tmp_path / "tasks" / "chem"
    (folder / "data").mkdir(parents=True)
    rows = {"stem": [QUESTION, LONG], "options": [["a"], ["b"]]}
    parquet.write_table(pyarrow.table(rows), folder / "data" / "test.parquet")
    (folder / "data" / "train.jsonl").write_text(json.dumps({"stem": "never read " * 9}) + "\n")
    (folder / "_common.yaml").write_text(
        "dataset_path: parquet\ntest_split: test\ndataset_kwargs:\n"
        "  data_files: {train: data/train.jsonl, test: data/test.parquet}\n"
        "process_docs: !function utils.never_imported\n"
    )
    (folder / "chem.yaml").write_text(
        "include: _common.yaml\ntask: chemistry\ndoc_to_text: '{{stem.strip()}}\n{{options[0]}} {% if x %}{{ y }}{% endif %}'\n"
    )
    (folder / "group.yaml").write_text("group: all\ntask: [chemistry]\n")
    transform = Decontaminate([str(tmp_path / "tasks")])
    assert [match.set for match in transform.matches(around(LONG))] == ["chemistry"]
    assert not transform.matches("never read " * 9)
    (folder / "chem.yaml").write_text(
        "include: _common.yaml\ntask: chemistry\ndoc_to_text: !function utils.text\n"
    )
    with pytest.raises(ConfigError, match="names no field"):
        Decontaminate([str(folder)])
    assert Decontaminate([str(folder)], ["stem"]).matches(around(QUESTION))
    (folder / "data" / "test.parquet").unlink()
    with pytest.raises(ConfigError, match="has no data here"):
        Decontaminate([str(folder)], ["stem"])


def test_the_files_are_part_of_the_fingerprint(items):
    one = Decontaminate([items(QUESTION)], ["question"]).fingerprint()
    assert one == Decontaminate([items(QUESTION)], ["question"]).fingerprint()
    assert one != Decontaminate([items(QUESTION, LONG)], ["question"]).fingerprint()
    assert json.loads(json.dumps(one)) == one


def test_mistakes(tmp_path, items):
    path = items(QUESTION)
    for options, message in (
        ({"sets": []}, "is empty"),
        ({"sets": [path], "ngram": 4}, "3 <= min_words <= ngram"),
        ({"sets": [path], "min_share": 1.5}, "between 0 and 1"),
        ({"sets": [str(tmp_path / "none.jsonl")]}, "is not there"),
        ({"sets": [str(tmp_path)]}, "has no task of lm-evaluation-harness"),
        ({"sets": [path]}, "Name those that do in `fields`"),
    ):
        with pytest.raises(ConfigError, match=message):
            Decontaminate(**options)
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\n[1]\n')
    with pytest.raises(ConfigError, match="line 2: it is a list"):
        Decontaminate([str(tmp_path / "bad.jsonl")], ["question"])


@given(st.text("aZ9 '\u2019_-\u00e9\u0301\u00ad\u4e2d\u0e31\ufb01.\n", max_size=40))
def test_words_have_places(text):
    """As many words as places, in both forms of the pattern."""
    assert len(words_of(text)) == len(word_pattern(text.isascii()).findall(text))
    plain = text.encode("ascii", "ignore").decode()
    assert words_of(plain) == [word for word in words_of(f"{plain} \u4e2d") if word != "\u4e2d"]


def test_words():
    assert (
        words_of("Don't STOP, caf\u00e9 2nd")
        == words_of("don\u2019t stop cafe\u0301 2ND")
        == ["dont", "stop", "cafe", "2nd"]
    )
    assert words_of("\ufb01ne Stra\u00dfe \u4e2d\u6587") == ["fine", "strasse", "\u4e2d", "\u6587"]


@pytest.mark.ci
def test_bars_on_planted_items():
    found, documents = made(items=160, clean=400)
    result = score(built(found), documents)
    assert result.recall >= 0.95
    assert result.precision >= 0.95


@pytest.mark.ci
@pytest.mark.timeout(60)
def test_time_is_linear_in_hostile_text(items):
    transform = Decontaminate([items(LONG, QUESTION, "ab ac ad " * 300)], ["question"])
    for piece in ("ab ac ad ", "Which chemist isolated polonium ", "a'", "\u4e2d", "e\u0301", "_", "' "):
        transform.matches((piece * (1 << 18))[: 1 << 18])
