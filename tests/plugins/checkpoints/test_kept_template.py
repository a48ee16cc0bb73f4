"""A run on conversations keeps its chat template: `chat` and an exported folder render as the run did, and end answers."""

import json

import pytest
from transformers import AutoTokenizer

from conformance.runs import run
from core.__main__ import main
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.checkpoints.kept_files import GENERATION, KEPT
from tests.support import tuning_files
from tests.support.chat_checkpoint import SPECIAL, bytes_tokenizer
from toolkit.chat_template import TEMPLATE

OWN = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run from weights with a template, on conversations under another one."""
    folder = tmp_path_factory.mktemp("trained")
    tuning_files.base_folder(folder)
    tuning_files.chats(folder)
    (folder / "own.jinja").write_text(OWN, encoding="utf-8")
    words = ["fit", "--config=recipes/sft", "--config=recipes/shrunken/sft", "--data.template=own.jinja"]
    done = run(
        [*words, "--trainer.default_root_dir=run"],
        folder,
        cwd=folder,
        environments=[{"XDG_CACHE_HOME": str(folder / "cache")}],
    )
    assert done.code == 0, done.error_text
    return folder


@pytest.mark.ci
def test_checkpoints_have_the_template_of_the_data_and_what_ends_an_answer(trained):
    [path] = (trained / "run" / "checkpoints").glob("step-*")
    kept = read_checkpoint(path)[KEPT]
    assert kept[TEMPLATE] == OWN
    ids = [SPECIAL.index("<|endoftext|>"), SPECIAL.index("<|im_end|>")]
    assert json.loads(kept[GENERATION])["eos_token_id"] == ids


def test_an_exported_folder_renders_as_the_run_did(trained):
    assert main(["export", f"--ckpt_path={trained / 'run'}", f"--output={trained / 'out'}"]) == 0
    theirs = AutoTokenizer.from_pretrained(trained / "out")
    messages = [{"role": "user", "content": "a"}]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user: a<|im_end|><|im_start|>assistant: "
    assert json.loads((trained / "out" / GENERATION).read_text())["eos_token_id"] == [0, 2]


def test_chat_needs_no_template(trained):
    done = run(["chat", f"--ckpt_path={trained / 'run'}", "--max_new_tokens=4"], trained)
    assert done.code == 0, done.error_text


def test_the_tokenizer_of_the_tests_has_these_ids():
    vocabulary = json.loads(bytes_tokenizer())["model"]["vocab"]
    assert [vocabulary[token] for token in SPECIAL] == [0, 1, 2]
