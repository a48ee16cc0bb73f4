"""Dumps of Stack Exchange: which answers stand where, their text, pieces of a file, broken rows and rows made to do harm."""

import bz2
import gzip
import random
import tempfile
import tracemalloc

import pytest
import zstandard

from core.errors import ConfigError
from datamodules.preparation.readers import source_files, spilled_lines, stack_exchange_dump, web_pages
from datamodules.preparation.readers.spilled_lines import SpilledLines
from datamodules.preparation.readers.stack_exchange_dump import StackExchangeDump
from tests.support.corpus import rows_of, texts, texts_of
from tests.support.restarts_of_preparation import ends_in_the_same_bytes
from tests.support.stack_exchange import answer, post, posts, question

pytest.importorskip("resiliparse")

PACK = {"xml": bytes, "bz2": bz2.compress, "gz": gzip.compress, "zst": zstandard.compress}
FEW = [
    question(1, "Why <b>?", "<p>I ask.</p>", AcceptedAnswerId=5),
    answer(2, 1, "<p>No.</p>", score=-1),
    answer(3, 1, "<p>Maybe.</p>", score=7),
    question(4, "Alone", "<p>Nobody answers.</p>"),
    answer(5, 1, "<p>Yes.</p>", score=2),
    answer(6, 1, "<p>Later, as good.</p>", score=7),
]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACK[path.suffix[1:]](posts(rows)))
    return path


def read(path, **options):
    rejects = []
    found = texts_of(StackExchangeDump(str(path), **options), rejects)
    named = [(reject[1].removeprefix(f"{path}, "), reject[2]) for reject in rejects]
    return found, [one for one in named if one[1] not in StackExchangeDump.skipped]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["Yes.", "Maybe.", "Later, as good.", "No."]),
        ({"min_score": 3}, ["Yes.", "Maybe.", "Later, as good."]),
        ({"max_answers": 2}, ["Yes.", "Maybe."]),
    ],
)
def test_the_accepted_answer_is_first_and_others_follow_by_score(tmp_path, options, expected):
    found, rejects = read(write(tmp_path / "Posts.xml", FEW), **options)
    assert found == ["\n\n".join(["Q:", "Why <b>?", "I ask.", *(f"A:\n\n{one}" for one in expected)])]
    assert rejects == []


def test_how_many_answers_a_question_needs(tmp_path):
    path = write(tmp_path / "Posts.xml", FEW)
    assert read(path, min_answers=0)[0][1] == "Q:\n\nAlone\n\nNobody answers."
    assert read(path, min_answers=5)[0] == []
    assert len(read(path, min_answers=4)[0]) == 1
    skipped = []
    rows_of(StackExchangeDump(str(path)), skipped)
    assert [reject[1:3] for reject in skipped] == [(f"{path}, post 4", stack_exchange_dump.FEW_ANSWERS)]


def test_html_becomes_text_and_code_keeps_its_lines(tmp_path):
    body = (
        "<p>Use <code>map()</code> &amp; see <a href='http://a.b'>this</a>:<br>now</p>\n\n<pre class='lang-py'><code>def f(x):\n"
        "    if x &lt; 3:\n\n        return  x\n</code></pre>\n\n<ul>\n<li>one</li>\n<li>two</li>\n</ul><blockquote><p>said</p></blockquote>"
    )
    path = write(tmp_path / "Posts.xml", [question(1, "T", body), answer(2, 1, body)])
    text = "Use map() & see this:\nnow\n\ndef f(x):\n    if x < 3:\n\n        return  x\n  • one\n  • two\n\nsaid"
    assert read(path)[0] == [f"Q:\n\nT\n\n{text}\n\nA:\n\n{text}"]


def random_dump(seed, count):
    """Returns rows in a random order, as merged questions have it, and what an index of all posts makes of them."""
    draw = random.Random(seed)
    numbers = draw.sample(range(1, 10 * count), count)
    asked = numbers[: count // 3]
    accepted = {number: draw.choice(numbers) for number in asked}
    rows = [question(n, f"Title {n}", f"<p>Body {n}</p>", AcceptedAnswerId=accepted[n]) for n in asked]
    found = {number: [] for number in asked}
    for number in numbers[count // 3 :]:
        parent, score = draw.choice(asked), draw.randint(-3, 30)
        rows.append(answer(number, parent, f"<p>Answer {number}</p>", score))
        found[parent].append((number, score))
    rows += [post(Id=n, PostTypeId=draw.choice([4, 5, 7]), Score=0, Body="x") for n in range(5)]
    draw.shuffle(rows)
    expected = {}
    for number, answers in found.items():
        answers.sort(key=lambda one: (one[0] != accepted[number], -one[1], one[0]))
        parts = [f"Q:\n\nTitle {number}\n\nBody {number}", *(f"A:\n\nAnswer {one}" for one, _ in answers)]
        if answers:
            expected[number] = "\n\n".join(parts)
    return rows, expected


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_posts_any_pieces_and_a_spill_give_the_same_documents(tmp_path, monkeypatch, seed):
    rows, expected = random_dump(seed, 600)
    if seed % 2:
        monkeypatch.setattr(spilled_lines, "_HELD", 2000)
        monkeypatch.setattr(stack_exchange_dump, "_GROUP_BYTES", 5000)
    if seed > 1:
        monkeypatch.setattr(source_files, "LEAST", 1000)
    path = write(tmp_path / "ai.stackexchange.com" / "Posts.xml", rows)
    reader = StackExchangeDump(str(tmp_path))
    assert (len(reader.tasks()) > 3) == (seed > 1)
    documents, _ = rows_of(reader, [])
    assert sorted(row["text"] for row in documents) == sorted(expected.values())
    for row in documents:
        assert row["text"] == expected[int(row["id"].removeprefix("Posts.xml:"))]
        assert row["source"] == "ai.stackexchange.com"
    assert read(path)[1] == []


@pytest.mark.parametrize("name", ["Posts.xml.bz2", "posts.xml.gz", "Posts.xml.zst", "a.org-Posts.xml.gz"])
def test_compressed_dumps_are_read(tmp_path, name):
    path = write(tmp_path / name, FEW)
    assert len(read(path)[0]) == 1
    source = rows_of(StackExchangeDump(str(path)), [])[0][0]["source"]
    assert source == ("a.org" if name.startswith("a.org") else "posts" if name.startswith("p") else "Posts")


HARM = {
    "entity": '<row Id="3" PostTypeId="2" ParentId="1" Score="1" Body="&lol;" />\n',
    "document type": '<!DOCTYPE a [<!ENTITY b "aaa">]><row Id="3" PostTypeId="2" ParentId="1" Score="1" Body="&b;" />\n',
    "cut": '<row Id="3" PostTypeId="2" ParentId="1" Score="1" Body="half\n',
    "not UTF-8": b'<row Id="3" PostTypeId="2" ParentId="1" Score="1" Body="\xff" />\n',
    "control character": '<row Id="3" PostTypeId="2" ParentId="1" Score="1" Body="&#x0;" />\n',
    "surrogate": '<row Id="3" PostTypeId="2" ParentId="1" Score="1" Body="&#xD800;" />\n',
    "number": '<row Id="3" PostTypeId="2" ParentId="1" Score="many" Body="" />\n',
    "hidden": """<row Id="3" Score="1" Body=' PostTypeId="2" ParentId="1"' />\n""",
    "another element": '<post Id="3" PostTypeId="2" ParentId="1" Score="1" Body="" />\n',
    "two rows": '<row Id="3" PostTypeId="2" ParentId="1" Score="1" /><row Id="4" PostTypeId="2" ParentId="1" Score="1" />\n',
}


@pytest.mark.parametrize("name", HARM)
@pytest.mark.parametrize("pieces", [1, 3])
def test_what_no_dump_has_is_rejected_alone_and_once(tmp_path, monkeypatch, name, pieces):
    row = HARM[name] if isinstance(HARM[name], bytes) else HARM[name].encode()
    whole = posts([*FEW, *(question(n, "T", "<p>" + "x" * 99 + "</p>") for n in range(20, 40))])
    path = tmp_path / "Posts.xml"
    path.write_bytes(whole.replace(b"  <row Id=", row + b"  <row Id=", 1))
    if pieces > 1:
        monkeypatch.setattr(source_files, "LEAST", len(whole) // pieces)
    found, rejects = read(path)
    assert len(StackExchangeDump(str(path)).tasks()) == pieces
    assert len(found) == 1
    assert rejects == [("post 3", stack_exchange_dump.BROKEN)]


def test_what_is_no_row_is_rejected(tmp_path):
    lines = [
        "no XML at all\n",
        "<row/>\n",
        "\n",
        answer(9, 8, "<p>Whose?</p>"),
        question(7, "T", "x" * (1 << 20)),
    ]
    found, rejects = read(write(tmp_path / "Posts.xml", [*FEW, *lines]))
    assert len(found) == 1
    assert [reason for _, reason in rejects] == [
        stack_exchange_dump.BROKEN,
        stack_exchange_dump.BROKEN,
        stack_exchange_dump.TOO_LONG,
        stack_exchange_dump.ORPHAN,
    ]
    assert rejects[-1][0] == "post 9"


@pytest.mark.parametrize("name", ["Posts.xml", "Posts.xml.gz"])
def test_a_truncated_dump_is_kept_up_to_the_damage(tmp_path, name):
    rows, expected = random_dump(1, 600)
    path = write(tmp_path / name, sorted(rows))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 4 // 5])
    found, rejects = read(path)
    assert 20 < len(found) <= len(expected)
    reasons = {reason for _, reason in rejects}
    assert stack_exchange_dump.CUT in reasons
    assert ("broken gzip file" in reasons) == name.endswith("gz")


def test_markup_that_would_take_minutes_is_rejected(tmp_path):
    path = write(tmp_path / "Posts.xml", [question(1, "T", "<div>" * 40_000), answer(2, 1, "<p>A</p>")])
    assert read(path) == ([], [("post 1", web_pages.NESTED)])


@pytest.mark.slow  # a dump large enough to tell
def test_memory_does_not_grow_with_the_dump(tmp_path, monkeypatch):
    monkeypatch.setattr(spilled_lines, "_HELD", 1 << 20)
    monkeypatch.setattr(stack_exchange_dump, "_GROUP_BYTES", 1 << 19)
    body = f"<p>{'word ' * 400}</p>"
    rows = [row for n in range(1, 12_000, 2) for row in (question(n, "T", body), answer(n + 1, n, body))]
    path = write(tmp_path / "Posts.xml.gz", rows)
    assert len(posts(rows)) > 24 << 20
    del rows
    reader = StackExchangeDump(str(path))
    tracemalloc.start()
    found = sum(len(batch) for batch in reader.read(reader.tasks()[0], print))
    assert tracemalloc.get_traced_memory()[1] < 14 << 20  # 3 MiB; 67 in one group
    tracemalloc.stop()
    assert found == 6000


def test_lines_come_back_by_group_in_their_order(monkeypatch):
    monkeypatch.setattr(spilled_lines, "_HELD", 500)
    draw = random.Random(0)
    added = [(draw.randrange(7), str(number).encode()) for number in range(1000)]
    with SpilledLines(9) as spilled:
        for group, line in added:
            spilled.add(group, line)
        found = list(spilled.groups())
    assert found == [[line for place, line in added if place == group] for group in range(7)]


def test_no_room_for_the_spill_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(spilled_lines, "_HELD", 10)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        read(write(tmp_path / "Posts.xml", FEW))


def test_mistakes_are_named(tmp_path):
    (tmp_path / "ai.stackexchange.com.7z").write_bytes(b"7z\xbc\xaf\x27\x1c")
    with pytest.raises(ConfigError, match="7z x ai") as caught:
        StackExchangeDump(str(tmp_path))
    assert len(str(caught.value).splitlines()) <= 10
    write(tmp_path / "Posts.xml", FEW)
    for options in ({"min_answers": -1}, {"max_answers": 0}, {"min_answers": 3, "max_answers": 2}):
        with pytest.raises(ConfigError, match="min_answers"):
            StackExchangeDump(str(tmp_path), **options)


@pytest.mark.ci
def test_workers_and_kills_change_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 20_000)
    monkeypatch.setattr(spilled_lines, "_HELD", 5000)
    bodies = texts(600)
    rows = [question(n, f"T {n}", f"<p>{bodies[n]}</p>") for n in range(300)]
    rows += [answer(n, draw, f"<p>{bodies[n]}</p>") for n in range(300, 600) for draw in [n * 7 % 290]]
    write(tmp_path / "in" / "a.stackexchange.com" / "Posts.xml", rows)
    write(tmp_path / "in" / "b.stackexchange.com" / "Posts.xml.bz2", rows[::-1])
    assert len(StackExchangeDump(str(tmp_path / "in")).tasks()) > 3
    ends_in_the_same_bytes(tmp_path / "in", tmp_path / "out", reader=StackExchangeDump)
