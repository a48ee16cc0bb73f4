"""Prompts are rendered up to where the answer begins, repeated as often as they are trained on, and keep their records."""

import json
from itertools import islice

import pytest
from tokenizers import Tokenizer

from core.errors import ConfigError
from datamodules.prompt_datamodule import PromptDataModule
from tests.support.records import build, chat, rows_of
from toolkit.rollouts import RECORDS, TURNS


def read(data, split="train", **more):
    return data.packed(
        split, **{"sequence_length": data.sequence_length, "batch_size": 1, "pad": True} | more
    )


def texts(data, batches):
    decoder = Tokenizer.from_str(data.tokenizer_json)
    found = {}
    for _, batch in batches:
        for ids, inside, record in zip(
            batch["input_ids"], batch["document_ids"] >= 0, batch[RECORDS], strict=True
        ):
            found[int(record)] = decoder.decode(ids[inside].tolist(), skip_special_tokens=False)
        assert (batch["labels"] == -100).all()
    return found


FORMS = {
    "text": {"question": "Q?", "answer": 4, "tests": ["a", {"b": None}]},
    "messages": {"question": [{"role": "system", "content": "Be kind."}, *chat("Hi", "Hello", "Q?")], "answer": "ü"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_ends_where_the_answer_begins(form, tmp_path):
    records = [FORMS[form] | {"n": n} for n in range(5)]
    data = build(
        PromptDataModule, tmp_path, records, template="chatml", prompt_field="question", sequence_length=256
    )
    said = FORMS[form]["question"] if form == "messages" else chat("Q?")
    head = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in said)
    for number, text in texts(data, read(data)).items():
        assert text == f"{head}<|im_start|>assistant\n"
        prompt, record = data.prompted("train", number)
        assert prompt == "Q?"
        assert record in records
    ends = Tokenizer.from_str(data.tokenizer_json)
    assert data.stop_ids == sorted(map(ends.token_to_id, ("<|endoftext|>", "<|im_end|>")))


def test_texts_without_a_template(tmp_path):
    records = [{"prompt": f"{n} <|im_end|> is"} for n in range(6)]
    data = build(PromptDataModule, tmp_path, records, template="plain")
    found = texts(data, read(data))
    assert {data.prompted("train", number).text for number in found} == set(found.values())
    assert data.stop_ids == [data.end_of_text_id]
    [(_, batch)] = read(data, "validation")
    assert 2 not in batch["input_ids"][0].tolist()  # what spells a special token is text
    assert len(set(found.values())) == 5


def records(count=60):
    return [{"prompt": f"{n}" + "?" * (n * 7 % 23)} for n in range(count)]


def batches(data, rank=0, size=1, cursor=None):
    found = read(data, batch_size=4 // size, rank=rank, world_size=size, shuffle=True, seed=3, pad=False)
    found.cursor = found.cursor if cursor is None else json.loads(json.dumps(cursor))
    return found


def test_batches_come_again_on_any_ranks_and_after_a_resume(tmp_path):
    data = build(PromptDataModule, tmp_path, records(), template="plain")
    once = len(batches(data))
    single = [batch for _, batch in islice(batches(data), 5)]
    data.repeat_batches(3)
    assert len(batches(data)) == 3 * once
    found = list(islice(batches(data), 15))
    for number, (_, batch) in enumerate(found):
        assert batch[TURNS].tolist() == [number % 3] * 4
        assert batch[RECORDS].tolist() == single[number // 3][RECORDS].tolist()
    halves = [rows_of(batches(data, rank, 2), 15) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == rows_of(batches(data), 15)
    for at in (0, 1, 2, 7):
        rest = rows_of(batches(data, cursor=found[at][0]), 3)
        assert rest == rows_of(batches(data), at + 4)[at + 1 :]
    assert data.packed("validation", sequence_length=64, batch_size=1).turns == 1


def test_batches_can_be_left_out(tmp_path):
    data = build(PromptDataModule, tmp_path, records(), template="plain")
    data.repeat_batches(2)
    cursors = [cursor for cursor, _ in islice(batches(data), 6)]
    for start, count in ((0, 1), (0, 3), (1, 4)):
        assert batches(data).take(cursors[start], 4 * count)[1] == cursors[start + count]


def test_validation_is_filled_up(tmp_path):
    data = build(PromptDataModule, tmp_path, records(), template="plain", validation_fraction=0.1)
    found = [batch[RECORDS].tolist() for _, batch in read(data, "validation", batch_size=4)]
    numbers = [number for batch in found for number in batch]
    count = len([number for number in numbers if number >= 0])
    assert sorted(numbers)[-count:] == list(range(count))
    assert {len(batch) for batch in found} == {4}
    assert set(numbers[count:]) <= {-1}


@pytest.mark.parametrize(
    ("record", "options", "said"),
    [
        ({"prompt": " "}, {}, 'the field "prompt" is empty'),
        ({"question": "Q?"}, {}, 'no field "prompt"'),
        ({"prompt": [{"role": "user"}]}, {"template": "chatml"}, 'no field "content"'),
        ({"prompt": chat("Q?")}, {}, 'the field "prompt" is not a text'),
        ({"prompt": "Q?"}, {"too_long": "cut"}, "Set data.too_long=drop"),
    ],
)  # fmt: skip
def test_bad_input(record, options, said, tmp_path):
    good = {"prompt": "1"} if isinstance(record.get("prompt"), str) else {**record, "prompt": chat("1")}
    with pytest.raises(ConfigError) as error:
        build(PromptDataModule, tmp_path, [record, good | {"n": 1}, good], **{"template": "plain"} | options)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) <= 10


def test_the_folder_without_its_notes_is_refused(tmp_path):
    data = build(PromptDataModule, tmp_path, records(), template="plain")
    (data.folder / "train" / "notes.bin").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"notes\.bin has 2 bytes"):
        data.setup()
