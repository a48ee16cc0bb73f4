"""What passes each transform is counted exactly, and the samples do not depend on batches, tasks or their order."""

import json
import random

import pyarrow
import pytest

from datamodules.preparation.flow import EXAMPLES, SHOWN, Flow, text_bytes
from toolkit.arrow_columns import strings

TEXTS = [f"{'naïve 北京 ' * (number % 90)}{number}" for number in range(300)]


def batch_of(numbers, kind=None):
    texts = strings([TEXTS[number] for number in numbers])
    names = strings([f"file.jsonl:{number}" for number in numbers])
    return pyarrow.RecordBatch.from_arrays(
        [texts if kind is None else texts.cast(kind), names], ["text", "id"]
    )


def flow_of(batches):
    flow = Flow(1)
    for batch in batches:
        flow.count(0, batch)
        flow.count(1, batch.slice(0, 0))
    return flow


@pytest.mark.parametrize(
    "kind", [None, pyarrow.string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
)
def test_bytes_are_those_of_the_texts_as_utf8(kind):
    batch = batch_of(range(40), kind)
    assert text_bytes(batch["text"]) == sum(len(text.encode()) for text in TEXTS[:40])
    assert text_bytes(batch.slice(7, 20)["text"]) == sum(len(text.encode()) for text in TEXTS[7:27])


def test_counts_and_samples_are_the_same_however_the_documents_are_divided():
    numbers = list(range(300))
    expected = flow_of([batch_of(numbers)]).record()
    assert [place["documents"] for place in expected] == [300, 0]
    assert expected[0]["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert len(expected[0]["samples"]) == EXAMPLES
    for name, text in (sample[1:] for sample in expected[0]["samples"]):
        assert text == TEXTS[int(name.split(":")[1])][:SHOWN]
    for seed in range(3):
        random.Random(seed).shuffle(numbers)
        total = Flow(1)
        for begin in range(0, 300, 100):
            rows = numbers[begin : begin + 100]
            part = flow_of([batch_of(rows[at : at + 7]) for at in range(0, 100, 7)])
            total.add(json.loads(json.dumps(part.record())))
        assert total.record() == expected


def test_equal_ids_are_told_apart_by_their_texts():
    texts, names = strings(TEXTS), strings(["same"] * len(TEXTS))
    batch = pyarrow.RecordBatch.from_arrays([texts, names], ["text", "id"])
    halves = flow_of([batch.slice(150), batch.slice(0, 150)])
    assert halves.record() == flow_of([batch]).record()


def test_samples_are_not_the_first_documents():
    [place, _] = flow_of([batch_of(range(300))]).record()
    assert max(int(name.split(":")[1]) for _, name, _ in place["samples"]) > 50
