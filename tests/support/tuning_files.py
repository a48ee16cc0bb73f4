"""What recipes for fine-tuning read, by the names that they have there: small weights and a few records."""

import json

from core.__main__ import main
from tests.support.chat_checkpoint import store_chat
from tests.support.records import write_lines

BASE = "SmolLM2-135M"


def base_folder(folder):
    """Writes weights of a small network with its tokenizer of bytes and chat template, as a Hugging Face folder."""
    checkpoint = store_chat(folder / "base.ckpt")
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={folder / BASE}"]) == 0
    checkpoint.unlink()


def chats(folder):
    """Writes chats.jsonl."""
    turns = [
        [{"role": "user", "content": f"{n}+{n}="}, {"role": "assistant", "content": f"{2 * n}"}]
        for n in range(80)
    ]
    write_lines(folder / "chats.jsonl", [{"messages": both} for both in turns])


def pairs(folder):
    """Writes pairs.jsonl."""
    records = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{3 * n}?"} for n in range(1, 80)]
    write_lines(folder / "pairs.jsonl", records)


def tasks(folder):
    """Writes chats.jsonl and questions.jsonl."""
    chats(folder)
    write_lines(
        folder / "questions.jsonl",
        [{"prompt": f"{n} even?", "completion": "no" if n % 2 else "yes"} for n in range(80)],
    )


def problems(folder):
    """Writes gsm8k.jsonl."""
    records = [{"question": f"{n}+{n}?", "answer": f"{n}+{n} is {2 * n}.\n#### {2 * n}"} for n in range(80)]
    write_lines(folder / "gsm8k.jsonl", records)


def corpora(folder):
    """Prepares two folders with the tokenizer of the weights."""
    for name in ("old", "new"):
        text = [json.dumps({"text": f"{name} {n} " * 40}) for n in range(30)]
        (folder / f"{name}.jsonl").write_text("\n".join(text), encoding="utf-8")
        words = [
            "prepare",
            "--config=data/text",
            f"--data.source={folder / f'{name}.jsonl'}",
            "--data.reader=JSONLinesDocuments",
        ]
        words += ["--data.tokenizer=PretrainedTokenizer", f"--data.tokenizer.path={folder / BASE}"]
        assert main([*words, f"--output={folder / 'prepared' / name}"]) == 0
