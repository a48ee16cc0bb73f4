"""Pairs lie in successive rows with labels on their answers, on any ranks; single answers say whether they are desirable."""

import json
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from core.contracts import Objective, TokenSum
from core.errors import ConfigError
from datamodules.preference_datamodule import PreferenceDataModule
from tests.support.records import answers, build, chat, rows_of
from tests.support.tiny_training import Record, module, tiny_gpt, trainer

HUMAN = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Q?\n\nAssistant:"
HISTORY = chat("Hi", "Hello", "Q?")
GOOD, BAD = chat("", "good")[1:], chat("", "bad one")[1:]

FORMS = [
    {"chosen": f"{HUMAN} good", "rejected": f"{HUMAN} bad one"},
    {"chosen": [*HISTORY, *GOOD], "rejected": [*HISTORY, *BAD]},
    {"prompt": HISTORY, "chosen": GOOD, "rejected": BAD},
    {"prompt": "Q?", "chosen": [*HISTORY, *GOOD], "rejected": [*HISTORY, *BAD]},
]  # fmt: skip


def read(data, split="train", **more):
    return data.packed(
        split, **{"sequence_length": data.sequence_length, "batch_size": 1, "pad": True} | more
    )


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_all_forms_make_the_same_rows(form, tmp_path):
    records = [FORMS[form] | {"id": n} for n in range(4)]
    data = build(PreferenceDataModule, tmp_path, records, template="chatml", sequence_length=256)
    decoder = Tokenizer.from_str(data.tokenizer_json)
    for _, batch in read(data):
        assert answers(data, batch) == ["good<|im_end|>", "bad one<|im_end|>"]
        head = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in HISTORY)
        for row, answer in enumerate(("good", "bad one")):
            ids = batch["input_ids"][row][batch["document_ids"][row] == 0].tolist()
            text = decoder.decode(ids, skip_special_tokens=False)
            assert text == f"{head}<|im_start|>assistant\n{answer}<|im_end|>\n"
        assert {tuple(value.shape) for value in batch.values()} == {tuple(batch["labels"].shape)}


def test_texts_without_a_template(tmp_path):
    records = [{"prompt": f"{n} ", "chosen": "yes", "rejected": "no"} for n in range(4)]
    data = build(PreferenceDataModule, tmp_path, [*records, FORMS[0]], template="plain")
    found = {
        tuple(answers(data, batch)) for split in ("train", "validation") for _, batch in read(data, split)
    }
    end = "<|endoftext|>"
    assert found == {(f"yes{end}", f"no{end}"), (f" good{end}", f" bad one{end}")}


def pairs(count=60):
    return [{"prompt": f"{n}?", "chosen": "a" * (1 + n * 7 % 23), "rejected": "b" * (1 + n * 5 % 19) + f"{n}"} for n in range(count)]  # fmt: skip


def test_pairs_stay_together_on_any_ranks_and_after_a_resume(tmp_path):
    data = build(PreferenceDataModule, tmp_path, pairs(), template="plain")

    def batches(rank=0, size=1, cursor=None):
        found = read(data, batch_size=4 // size, rank=rank, world_size=size, shuffle=True, seed=3, pad=False)
        found.cursor = found.cursor if cursor is None else json.loads(json.dumps(cursor))
        return found

    count = 2 * len(batches())
    whole = rows_of(batches(), count)
    assert {len(batch) for batch in whole} == {8}
    cursors = [cursor for _, (cursor, _) in zip(range(count), batches(), strict=False)]
    for _, (_, batch) in zip(range(count), batches(), strict=False):
        texts = answers(data, batch)
        assert all(set(text) <= set("a<|endoftext>") for text in texts[::2])
        assert all(text[0] == "b" for text in texts[1::2])
        begins = batch["input_ids"][:, 0].view(-1, 2)
        assert torch.equal(begins[:, 0], begins[:, 1])  # the same prompt
    halves = [rows_of(batches(rank, 2), count) for rank in (0, 1)]
    assert [list(chain(*parts)) for parts in zip(*halves, strict=True)] == whole
    later = [rows_of(batches(rank, 4, cursors[3]), count - 4) for rank in range(4)]
    assert [list(chain(*parts)) for parts in zip(*later, strict=True)] == whole[4:]


@pytest.mark.parametrize("too_long", ["drop", "cut"])
def test_a_pair_is_left_out_or_cut_as_one(too_long, tmp_path):
    records = [{"prompt": "p" * 10, "chosen": "c" * long, "rejected": "r"} for long in (3, 40)]
    records += [{"prompt": "p" * 30, "chosen": "c", "rejected": "r" * 40}, *pairs(3)]
    data = build(
        PreferenceDataModule, tmp_path, records, template="plain", too_long=too_long, sequence_length=24
    )
    found = [answers(data, batch) for split in ("train", "validation") for _, batch in read(data, split)]
    assert len(found) == (4 if too_long == "drop" else 5)
    cut = [one for one, _ in found if one == "c" * 15]
    assert len(cut) == (too_long == "cut")


def test_single_answers_say_whether_they_are_desirable_and_have_an_answer_of_another_record_beside_them(
    tmp_path,
):
    records = [
        {"prompt": f"{n}:", "completion": f"good{n}" if n % 3 else "bad", "label": n % 3 > 0}
        for n in range(40)
    ]
    data = build(PreferenceDataModule, tmp_path, records, template="plain", paired=False)
    decoder, seen = Tokenizer.from_str(data.tokenizer_json), 0
    for _, batch in read(data, batch_size=4):
        inside = batch["document_ids"] == 0
        texts = answers(data, batch)
        begins = [
            decoder.decode(ids[mask].tolist()) for ids, mask in zip(batch["input_ids"], inside, strict=True)
        ]
        for row, text in enumerate(texts):
            seen += bool(text)
            expected = torch.full_like(inside[row], texts[row - row % 2].startswith("good")) & inside[row]
            assert torch.equal(batch["desirable"][row], expected)
        for row in range(0, len(texts), 2) if all(texts) else ():
            number = int(begins[row].partition(":")[0])
            other = (number - 1) % 40  # of the record before it in the file
            completion = f"good{other}" if other % 3 else "bad"
            assert begins[row + 1] == f"{number}:{completion}"
            assert texts[row + 1] == f"{completion}<|endoftext|>"
        assert batch["desirable"].shape == batch["input_ids"].shape
    assert seen == 2 * data.manifest["records"]["train"]


def test_batches_have_the_numbers_and_the_references_of_their_records(tmp_path):
    data = build(PreferenceDataModule, tmp_path, pairs(), template="plain")
    (split, shape, batches), *_ = data.every_record()
    seen = torch.cat([batch["records"][::2, 0] for batch in batches])
    assert split == "train"
    assert shape == (data.manifest["records"]["train"], 2)
    assert seen[seen >= 0].sort().values.tolist() == list(range(shape[0]))
    assert (seen < 0).sum() == -shape[0] % 4  # the last batch is filled up
    later = data.train_dataloader()
    data.references["train"] = torch.arange(2.0 * shape[0]).view(
        shape
    )  # loaders that are there already have them
    for batch in later:
        records = batch["records"]
        assert (records[::2] == records[1::2]).all()
        expected = 2.0 * records + torch.arange(len(records))[:, None] % 2
        assert torch.equal(batch["reference"], expected)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, 'no field "rejected"'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        (
            {"chosen": f"{HUMAN} a", "rejected": f"{HUMAN} a "},
            "chosen and rejected are the same.*once the chat template has rendered",
        ),
        ({"chosen": "b", "rejected": "c"}, 'no field "prompt".*no dialogue'),
        (
            {"chosen": f"{HUMAN} a", "rejected": "\n\nHuman: b\n\nAssistant: c"},
            "differ before the last answer",
        ),
        ({"chosen": chat("a", "b"), "rejected": chat("c", "d")}, "no prompt in common"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, 'the field "rejected" is not a text'),
    ],
)
def test_wrong_pairs_are_explained(record, said, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s)records.jsonl:4: .*{said}"):
        build(PreferenceDataModule, tmp_path, [*FORMS[:3], record], template="chatml")


def test_a_wrong_label_is_explained(tmp_path):
    records = [{"prompt": "a", "completion": "b", "label": label} for label in (True, "yes")]
    with pytest.raises(
        ConfigError, match=r'(?s)records.jsonl:2: the field "label" is not true or false: it is "yes"'
    ):
        build(PreferenceDataModule, tmp_path, records, template="plain", paired=False)


class Preference(Objective):
    """-log sigmoid of the difference of the answers' log-probabilities: DPO with a flat reference."""

    def loss(self, network, batch):
        logits = network.logits(network(batch)).float()
        logs = -F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").sum(1)
        return TokenSum(-F.logsigmoid(logs[::2] - logs[1::2]).sum(), torch.tensor(len(logs) // 2)), {}


@pytest.mark.ci
def test_an_objective_learns_to_prefer(tmp_path):
    records = [
        {"prompt": f"{n}", "chosen": "yes" * (1 + n % 2), "rejected": "no" * (1 + n % 3)} for n in range(100)
    ]
    data = build(PreferenceDataModule, tmp_path, records, template="plain", sequence_length=16)
    network = lambda: tiny_gpt(vocab_size=300, max_sequence_length=16)  # noqa: E731
    trained = module(
        network, objective=Preference(), optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2)
    )
    record = Record()
    trainer(tmp_path, callbacks=[record], max_steps=40, limit_val_batches=0).fit(trained, datamodule=data)
    losses = [figures["train/loss"] for figures in record.figures]
    assert sum(losses[-8:]) < 0.1 * sum(losses[:8]), losses
