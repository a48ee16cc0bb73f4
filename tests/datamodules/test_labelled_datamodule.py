"""Labels are at the token that they belong to, as transformers aligns them; classes are balanced exactly."""

import json
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from core.errors import ConfigError
from datamodules.labelled_datamodule import LabelledDataModule
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from tests.support.records import build, rows_of, write_lines

WORDS = [["Zoë", "lives", "in", "New", "York", "!"], ["unlivable"], ["we", "livein", "x"]]
TAGS = [["B", "O", "O", "B", "I", "O"], ["O"], ["O", "B", "O"]]


@pytest.fixture
def bert(tmp_path):
    """A tokenizer of word pieces with [CLS] and [SEP], as BERT's; its file."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "live", "##s", "##in", "in", "new", "york", "un", "##liv", "##able", "we", "!", "zoe", "?"]  # fmt: skip
    made = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(pieces[:4])
    single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    (tmp_path / "bert").mkdir()
    made.save(str(tmp_path / "bert" / "tokenizer.json"))
    return str(tmp_path / "bert" / "tokenizer.json")


def made(tmp_path, bert, records, **options):
    path = write_lines(tmp_path / "own.jsonl", records)
    options = {
        "sequence_length": 32,
        "batch_size": 4,
        "cache_dir": str(tmp_path / "cache"),
        "validation_source": path,
    } | options
    data = LabelledDataModule(path, PretrainedTokenizer(bert), **options)
    data.setup()
    return data


def read(data, split="train", **more):
    return [
        batch
        for _, batch in data.packed(
            split, **{"sequence_length": data.sequence_length, "batch_size": 4, "pad": True} | more
        )
    ]


def at_labels(batches, name="labels"):
    """Returns ids of a row -> what it has at its labels, of rows with one record."""
    found = {}
    for batch in batches:
        for row in range(len(batch["labels"])):
            inside, here = batch["document_ids"][row] == 0, batch["labels"][row] >= 0
            if inside.any():
                found[tuple(batch["input_ids"][row][inside].tolist())] = batch[name][row][here].tolist()
    return found


def test_words_are_aligned_as_transformers_aligns_them(tmp_path, bert):
    theirs = PreTrainedTokenizerFast(tokenizer_file=bert)
    records = [{"tokens": words, "tags": tags} for words, tags in zip(WORDS, TAGS, strict=True)]
    data = made(tmp_path, bert, records, task="words", text_field="tokens", label_field="tags")
    assert data.label_names == ["B", "I", "O"]
    found = at_labels(read(data))
    for words, tags in zip(WORDS, TAGS, strict=True):
        encoded = theirs(words, is_split_into_words=True)
        ids = [data.label_names.index(tag) for tag in tags]
        assert found[tuple(encoded.input_ids)] == ids
        store = data._stores["train"]
        labels = next(
            store.sequence(n, 0, 99)[1].tolist()
            for n in range(3)
            if store.sequence(n, 0, 99)[0].tolist() == encoded.input_ids
        )
        firsts, before = [], None
        for word in encoded.word_ids():
            firsts.append(ids[word] if word is not None and word != before else -100)
            before = word
        assert labels == firsts


@pytest.mark.parametrize("position", ["first", "last"])
def test_a_pair_is_encoded_as_transformers_does_with_its_label_at_one_end(position, tmp_path, bert):
    theirs = PreTrainedTokenizerFast(tokenizer_file=bert)
    records = [
        {"a": "We live in York", "b": "unlivable [SEP]", "label": 1},
        {"a": "Zoë", "b": "we live in new York!", "label": 0},
    ]
    data = made(tmp_path, bert, records, text_field="a", pair_field="b", position=position)
    found = at_labels(read(data))
    for record in records:
        ids = theirs(record["a"], record["b"].replace("[SEP]", "[ SEP ]")).input_ids
        same = next(row for row in found if list(row[:4]) == ids[:4])
        assert found[same] == [record["label"]]
        assert same.count(2) == 2  # [SEP] spelt in a text is text
        if "[SEP]" not in record["b"]:
            assert list(same) == ids
    for batch in read(data):
        ends = (batch["document_ids"] == 0).sum(1) - 1
        rows = torch.arange(len(ends))[ends >= 0]
        assert (batch["labels"][rows, 0 if position == "first" else ends[rows]] >= 0).all()


def test_a_text_without_a_post_processor_ends_with_the_end_of_text(tmp_path):
    data = build(
        LabelledDataModule,
        tmp_path,
        [{"text": f"{n}", "p": "q", "label": n % 2 > 0} for n in range(9)],
        pair_field="p",
    )
    assert data.label_names == ["false", "true"]
    for ids, [label] in at_labels(read(data)).items():
        assert ids[-1] == data.end_of_text_id
        text = Tokenizer.from_str(data.tokenizer_json).decode(ids[:-1])
        assert text == f"{text[0]}\nq"
        assert label == int(text[0]) % 2


def test_numbers_and_several_classes_are_at_their_token(tmp_path):
    numbers = [{"text": f"{n}", "label": n / 3} for n in range(9)]
    data = build(LabelledDataModule, tmp_path, numbers, task="values")
    decoder = Tokenizer.from_str(data.tokenizer_json)
    for ids, [value] in at_labels(read(data), "targets").items():
        assert value == pytest.approx(int(decoder.decode(ids[:-1])) / 3, rel=1e-6)
    names = ["a", "b", "c"]
    several = [
        {"text": f"{n}", "label": [name for k, name in enumerate(names) if n >> k & 1]} for n in range(8)
    ]
    data = build(LabelledDataModule, tmp_path, several, task="several", labels=names, pack=True)
    [batch, *_] = read(data, batch_size=1)
    assert batch["targets"].shape == (*batch["labels"].shape, 3)
    texts = decoder.decode(
        batch["input_ids"][0][batch["document_ids"][0] >= 0].tolist(), skip_special_tokens=False
    )
    expected = [[float(int(text) >> k & 1) for k in range(3)] for text in texts.split("<|endoftext|>")[:-1]]
    assert batch["targets"][0][batch["labels"][0] == 0].tolist() == expected
    assert not batch["targets"][0][batch["labels"][0] < 0].any()


def unequal(count=300):
    return [
        {"text": f"{n}", "label": "rare" if n % 10 == 0 else "some" if n % 3 == 0 else "many"}
        for n in range(count)
    ]


def test_balanced_samples_have_all_classes_alike_and_continue_anywhere(tmp_path):
    data = build(LabelledDataModule, tmp_path, unequal(), balance="sample")

    def batches(cursor=None, rank=0, size=1):
        found = data.packed(
            "train",
            sequence_length=64,
            batch_size=4 // size,
            shuffle=True,
            seed=1,
            rank=rank,
            world_size=size,
        )
        found.cursor = found.cursor if cursor is None else json.loads(json.dumps(cursor))
        return found

    records, count = data.manifest["records"]["train"], 4 * len(batches())
    pairs = [pair for _, pair in zip(range(count), batches(), strict=False)]
    labels, texts = Counter(), {0: Counter(), 1: Counter(), 2: Counter()}
    for _, batch in pairs[: records // 4 * 3]:
        for ids, [label] in at_labels([batch]).items():
            labels[label] += 1
            texts[label][ids] += 1
    assert max(labels.values()) - min(labels.values()) <= 3 + records % 3 + 8
    kept = Counter(data.label_names[int(label)] for label in data._stores["train"].label_of_each())
    assert kept["many"] > 4 * kept["rare"]
    for number, name in enumerate(
        data.label_names
    ):  # each record of a class as often as the others, to within one
        assert len(texts[number]) == kept[name] or name == "many"
        assert max(texts[number].values()) - min(texts[number].values()) <= 2
    whole = rows_of([batch for _, batch in pairs])
    assert rows_of(batches(json.loads(json.dumps(pairs[7][0]))), count - 8) == whole[8:]
    halves = [rows_of(batches(pairs[7][0], rank, 2), count - 8) for rank in (0, 1)]
    assert [one + other for one, other in zip(*halves, strict=True)] == whole[8:]


def test_weights_make_all_classes_weigh_alike(tmp_path):
    data = build(LabelledDataModule, tmp_path, unequal(), balance="weights", pack=True)
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in read(data):
        here = batch["labels"] >= 0
        assert not batch["weights"][~here].any()
        sums.scatter_add_(0, batch["labels"][here], batch["weights"][here].double())
    assert sums.sum() == pytest.approx(data.manifest["records"]["train"], rel=1e-5)
    assert sums.tolist() == pytest.approx([float(sums.mean())] * 3, rel=1e-5)
    assert "weights" not in read(data, "validation")[0]


def test_a_text_that_is_cut_keeps_its_end_and_label(tmp_path):
    records = [{"text": "a" * (5 + n), "label": n % 2} for n in range(12)]
    data = build(LabelledDataModule, tmp_path, records, too_long="cut", sequence_length=8)
    found = [
        row
        for batch in read(data)
        for row in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    ]
    used = [(ids, labels) for ids, labels in found if any(ids)]
    assert len(used) == data.manifest["records"]["train"]
    assert all(
        ids[sum(label < 0 for label in labels[: labels.index(max(labels))])] == data.end_of_text_id
        for ids, labels in used
    )


GLUE = {
    "cola": ("gj04\t1\t\tA good one.\ngj04\t0\t*\tOne bad.\n" * 3, "A good one.", 1),
    "sst2": ("sentence\tlabel\n" + "fine film \t1\ndull \"film\t0\n" * 3, "fine film ", 1),
    "mrpc": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + "1\t1\t2\tA \"b\tC\n0\t3\t4\tD\tE\n" * 3, "A \"b\nC", 1),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n" + "0\t1\t2\tA?\tB?\t0\n1\t3\t4\tC?\tD?\t1\n" * 3, "A?\nB?", 0),
    "stsb": ("index\tsentence1\tsentence2\tscore\n" + "0\tA\tB\t4.500\n1\tC\tD\t0.0\n" * 3, "A\nB", 4.5),
    "mnli": ("index\tsentence1\tsentence2\tlabel1\tgold_label\n" + "0\tA\tB\tx\tneutral\n1\tC\tD\tx\tentailment\n" * 3, "A\nB", 1),
    "qnli": ("index\tquestion\tsentence\tlabel\n" + "0\tA?\tB\tentailment\n1\tC?\tD\tnot_entailment\n" * 3, "A?\nB", 0),
    "rte": ("index\tsentence1\tsentence2\tlabel\n" + "0\tA\tB\tnot_entailment\n1\tC\tD\tentailment\n" * 3, "A\nB", 1),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n" + "0\tA\tB\t1\n1\tC\tD\t0\n" * 3, "A\nB", 1),
    "boolq": ([{"question": "q", "passage": "p", "label": True}, {"question": "r", "passage": "s", "label": False}] * 3, "q\np", 1),
    "cb": ([{"premise": "p", "hypothesis": "h", "label": "neutral"}, {"premise": "q", "hypothesis": "i", "label": "entailment"}] * 3, "p\nh", 2),
    "copa": ([{"premise": "p", "choice1": "a", "choice2": "b", "question": "effect", "label": 1}, {"premise": "q", "choice1": "c", "choice2": "d", "question": "cause", "label": 0}] * 3, "choice1: a choice2: b premise: p question: effect", 1),
    "multirc": ([{"passage": {"text": "p", "questions": [{"question": "q?", "answers": [{"text": "a", "label": 1}, {"text": "b", "label": 0}]}]}}] * 3, "p\nq? a", 1),
    "record": ([{"passage": {"text": "Al met Bo", "entities": [{"start": 0, "end": 1}, {"start": 7, "end": 8}, {"start": 0, "end": 1}]}, "qas": [{"query": "@placeholder came", "answers": [{"start": 7, "end": 8, "text": "Bo"}]}]}] * 3, "Al met Bo\nBo came", 1),
    "super_rte": ([{"premise": "p", "hypothesis": "h", "label": "entailment"}, {"premise": "q", "hypothesis": "i", "label": "not_entailment"}] * 3, "p\nh", 0),
    "wic": ([{"word": "w", "sentence1": "a", "sentence2": "b", "label": False}, {"word": "v", "sentence1": "c", "sentence2": "d", "label": True}] * 3, "w: a\nb", 0),
    "wsc": ([{"text": "Al met Bo as he left.", "target": {"span1_text": "Al", "span1_index": 0, "span2_text": "he", "span2_index": 4}, "label": True}, {"text": "She came", "target": {"span1_text": "x", "span1_index": 1, "span2_text": "She", "span2_index": 0}, "label": False}] * 3, "Al met Bo as *he* left.\nAl", 1),
}  # fmt: skip


@pytest.mark.parametrize("form", GLUE)
def test_files_of_glue_and_superglue_are_read(form, tmp_path):
    content, text, label = GLUE[form]
    path = tmp_path / ("train.tsv" if isinstance(content, str) else "train.jsonl")
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        write_lines(path, content)
    from tests.support.records import tokenizer

    data = LabelledDataModule(
        str(path), tokenizer(tmp_path), form=form, validation_source=str(path), cache_dir=str(tmp_path / "c")
    )
    data.setup()
    decoder = Tokenizer.from_str(data.tokenizer_json)
    found = at_labels(read(data), "targets" if form == "stsb" else "labels")
    texts = {decoder.decode(ids[:-1]): labels for ids, labels in found.items()}
    assert len(texts) == 2
    assert texts[text] == [label]


@pytest.mark.parametrize(
    ("form", "record", "said"),
    [
        ("multirc", {"passage": {"text": "p", "questions": ["q?"]}}, "\"questions\" is not a list of objects: it has 'q"),
        ("record", {"passage": {"text": "p", "entities": [{"start": 0, "end": 1}]}}, "an entity is beyond the text"),
        ("wsc", {"text": "a", "target": {"span1_text": "a", "span2_text": "b", "span2_index": 1}}, "beyond the text: it is 1"),
        ("copa", {"premise": "p", "choice1": "a"}, 'no field "choice2"'),
    ],
)  # fmt: skip
def test_a_set_that_is_not_as_published_is_named_with_its_line(form, record, said, tmp_path):
    with pytest.raises(ConfigError, match=rf"records.jsonl:1: .*{said}"):
        build(LabelledDataModule, tmp_path, [record], form=form)


@pytest.mark.parametrize(
    ("records", "options", "said"),
    [
        (
            [{"text": "a", "label": "x"}],
            {"labels": ["xs", "y"]},
            r"records.jsonl:1: an unknown label: 'x'; known are xs, y. Did you mean xs\?",
        ),
        (
            [{"text": f"{n}", "label": n / 3} for n in range(1, 3)],
            {},
            "has 0 different labels; classes are 2 to",
        ),
        ([{"txt": "a", "label": 1}], {"labels": ["0", "1"]}, r'no field "text".*Did you mean txt\?'),
        ([{"text": "a", "label": "high"}], {"task": "values"}, 'the field "label" is no number'),
        (
            [{"text": ["a"], "label": [1, 0]}],
            {"task": "words", "labels": ["a", "b"]},
            "words and labels do not fit",
        ),
        ([], {"task": "class"}, r"it is one of classes, values, several, words. Did you mean classes\?"),
        ([], {"form": "sst3"}, r"Did you mean sst2\?"),
        ([], {"task": "values", "balance": "sample"}, "is for task=classes"),
        ([], {"task": "several"}, "needs the names of all classes"),
        ([], {"balance": "sample", "shuffle": False}, "set data.shuffle=true"),
    ],
)
def test_what_is_wrong_is_explained(records, options, said, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        build(
            LabelledDataModule,
            tmp_path,
            [*records, *({"text": "x", "id": n, "label": "y"} for n in range(3 * (options != {})))],
            **options,
        )


def test_other_classes_than_the_checkpoints_are_refused(tmp_path):
    data = build(LabelledDataModule, tmp_path, unequal(30))
    state = data.state_dict()
    data.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"data.labels=\[...\]"):
        data.load_state_dict(state | {"label_names": ["other", "names"]})
