"""SQuAD's files and WMT's, as they are published, as prompts with their answers."""

import gzip
import json

import pytest
from tokenizers import Tokenizer

from core.errors import ConfigError
from datamodules.instruction_datamodule import InstructionDataModule
from tests.support.records import tokenizer, write_lines

GERMAN = {"de": "German", "en": "English"}


def read(folder, source, template="plain", **options):
    """Returns prompt and answer of each record, in the order of the files."""
    data = InstructionDataModule(
        str(source),
        tokenizer(folder),
        validation_source=str(source),
        template=template,
        cache_dir=str(folder / "cache"),
        sequence_length=999,
        **options,
    )
    data.setup()
    store, found = data._stores["validation"], []
    decoder = Tokenizer.from_str(data.tokenizer_json)
    for number in range(store.number_of_documents):
        ids, labels = (part.tolist() for part in store.sequence(number, 0, 10**6))
        trained = [at + 1 for at, label in enumerate(labels[:-1]) if label >= 0]
        sides = ids[: trained[0]], ids[trained[0] :]
        found.append(tuple(decoder.decode(side, skip_special_tokens=False) for side in sides))
    return data, found


SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Ants",
            "paragraphs": [
                {
                    "context": "Ants are small.",
                    "qas": [
                        {"id": "1", "question": "How are ants?", "is_impossible": False,
                         "answers": [{"text": "small", "answer_start": 9}, {"text": "are small", "answer_start": 5}]},
                        {"id": "2", "question": "Why?", "is_impossible": True, "answers": [],
                         "plausible_answers": [{"text": "Ants", "answer_start": 0}]},
                    ],
                },
            ],
        },
        {"title": "Bees", "paragraphs": [{"context": "Bees fly.", "qas": [
            {"id": "3", "question": "Who flies?", "answers": [{"text": "Bees", "answer_start": 0}]}]}]},
    ],
}  # fmt: skip

EXPECTED = [
    ("Title: Ants\n\nBackground: Ants are small.\n\nQuestion: How are ants?\n\nAnswer:", " small"),
    ("Title: Ants\n\nBackground: Ants are small.\n\nQuestion: Why?\n\nAnswer:", " unanswerable"),
    ("Title: Bees\n\nBackground: Bees fly.\n\nQuestion: Who flies?\n\nAnswer:", " Bees"),
]


def without_end(data, found):
    end = Tokenizer.from_str(data.tokenizer_json).id_to_token(data.end_of_text_id)
    return [(prompt, answer.removesuffix(end)) for prompt, answer in found]


def test_squads_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "train-v2.0.json"
    path.write_text(json.dumps(SQUAD))
    data, found = read(tmp_path, path)
    assert without_end(data, found) == EXPECTED


def test_a_question_a_line_as_hugging_face_has_them_gives_the_same(tmp_path):
    lines = [
        {"id": one["id"], "title": article["title"], "context": paragraph["context"], "question": one["question"],
         "answers": {"text": [answer["text"] for answer in one["answers"]], "answer_start": []}}
        for article in SQUAD["data"] for paragraph in article["paragraphs"] for one in paragraph["qas"]
    ]  # fmt: skip
    data, found = read(tmp_path, write_lines(tmp_path / "squad.jsonl", lines))
    assert without_end(data, found) == EXPECTED


def test_with_a_chat_template_no_space_is_before_the_answer(tmp_path):
    path = tmp_path / "dev-v2.0.json"
    path.write_text(json.dumps(SQUAD))
    _, found = read(tmp_path, path, template="chatml")
    assert found[0][0] == f"<|im_start|>user\n{EXPECTED[0][0]}<|im_end|>\n<|im_start|>assistant\n"
    assert found[0][1] == "small<|im_end|>\n"


def test_articles_are_kept_together(tmp_path):
    path = tmp_path / "train.json"
    articles = [SQUAD["data"][0] | {"title": f"Ants {number}"} for number in range(20)]
    path.write_text(json.dumps({"data": articles}))
    data = InstructionDataModule(
        str(path), tokenizer(tmp_path), template="plain", group_by="title", validation_fraction=0.3,
        cache_dir=str(tmp_path / "cache"), sequence_length=200,
    )  # fmt: skip
    data.setup()
    decoder, titles = Tokenizer.from_str(data.tokenizer_json), []
    for store in (data._stores["train"], data._stores["validation"]):
        texts = [
            decoder.decode(store.sequence(n, 0, 999)[0].tolist()) for n in range(store.number_of_documents)
        ]
        titles.append({text.partition("\n")[0] for text in texts})
    assert titles[0]
    assert titles[1]
    assert not titles[0] & titles[1]


PAIRS = [("Guten Tag.", "Good day."), ("Er\u2028sagte: & <b>", "He said: & <b>"), ("Ja", "Yes")]


def expected(pairs, first="German", second="English"):
    return [(f"{first} phrase: {one}\n{second} phrase:", f" {other}") for one, other in pairs]


def written(folder, form):
    """Writes the sentences as WMT's files have them; returns the source."""
    sides = {code: [pair[n] for pair in PAIRS] for n, code in enumerate(GERMAN)}
    if form == "sgm":
        for code, name in (("de", "src"), ("en", "ref")):
            lines = [f'<seg id="{n}">{text.replace("&", "&amp;").replace("<", "&lt;")}</seg>' for n, text in enumerate(sides[code], 1)]  # fmt: skip
            text = f'<{name}set setid="news">\n<doc docid="1">\n<p>\n' + "\n".join(lines) + "\n</p></doc>"
            (folder / f"news-deen-{name}.{code}.sgm").write_text(text, encoding="utf-8")
        return folder / "news-deen-src.de.sgm"
    if form in ("de-en.tsv", "en-de.tsv"):
        order = form.removesuffix(".tsv").split("-")
        rows = zip(*(sides[code] for code in order), strict=True)
        (folder / f"europarl.{form}").write_text(
            "".join("\t".join(row) + "\t0.9\n" for row in rows), encoding="utf-8"
        )
        return folder / f"europarl.{form}"
    if form == "jsonl":
        return write_lines(
            folder / "wmt.jsonl", [{"translation": dict(zip(GERMAN, pair, strict=True))} for pair in PAIRS]
        )
    if form == "tsv":
        lines = ["de\ten", *("\t".join(pair) for pair in PAIRS)]
        (folder / "with-names.tsv").write_text("\n".join(lines), encoding="utf-8")
        return folder / "with-names.tsv"
    for code, texts in sides.items():
        content = "".join(
            f"{text}\n" for text in [texts[0], "", *texts[1:]]
        ).encode()  # a blank line on both sides
        (folder / f"train.{code}{form}").write_bytes(gzip.compress(content) if form else content)
    return folder / f"train.de{form}"


@pytest.mark.parametrize("form", ["", ".gz", "sgm", "de-en.tsv", "en-de.tsv", "tsv", "jsonl"])
def test_wmts_files_are_read_as_they_are(tmp_path, form):
    data, found = read(tmp_path, written(tmp_path, form), translate=GERMAN)
    assert without_end(data, found) == expected(PAIRS)


def test_the_other_direction_begins_at_the_other_file(tmp_path):
    written(tmp_path, "")
    english = {code: GERMAN[code] for code in ("en", "de")}
    data, found = read(tmp_path, tmp_path / "train.en", translate=english)
    turned = [(english, german) for german, english in PAIRS]
    assert without_end(data, found) == expected(turned, "English", "German")


def test_what_does_not_fit_is_named(tmp_path):
    source = written(tmp_path, "")
    with (tmp_path / "train.en").open("a") as file:
        file.write("One more.\n")
    with pytest.raises(
        ConfigError, match=r"train.de:5: the two files have another number of lines: .*train.en"
    ):
        read(tmp_path, source, translate=GERMAN)
    lines = (tmp_path / "train.en").read_text().split("\n")
    (tmp_path / "train.en").write_text("\n".join([*lines[:2], "", *lines[3:4]]))
    with pytest.raises(ConfigError, match=r"train.de:3: one side of a translation is blank"):
        read(tmp_path, source, translate=GERMAN)
    (tmp_path / "train.en").unlink()
    with pytest.raises(ConfigError, match=r"there is no train.en beside it"):
        read(tmp_path, source, translate=GERMAN)
    with pytest.raises(ConfigError, match="it has two languages, from and to"):
        read(tmp_path, source, translate={"de": "German"})
    with pytest.raises(ConfigError, match=r"no such file.*\n.*\.de"):
        read(tmp_path, tmp_path / "missing.de", translate=GERMAN)
