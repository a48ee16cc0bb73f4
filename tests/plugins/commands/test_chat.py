"""`chat` as a user starts it: through a pipe and in a terminal."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from transformers import AutoTokenizer

from core.__main__ import main
from plugins.commands.chat_prompts import encode_messages, find_template
from plugins.commands.generate_network import load
from plugins.networks.llama import Llama
from tests.conftest import HOUSE
from tests.support.chat_checkpoint import CHATML, store_chat
from toolkit.chat_template import ChatTemplate
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling
from toolkit.generation.texts import TextStream

COMMAND = [sys.executable, "-m", "core", "chat"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return store_chat(tmp_path_factory.mktemp("chat") / "a.ckpt")


def piped(path, lines, *words, monkeypatch, capfd):
    """Returns exit code, answers and messages, of lines from a pipe."""
    read, write = os.pipe()
    os.write(write, lines.encode())
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code = main(["chat", f"--ckpt_path={path}", *words])
    written = capfd.readouterr()
    return code, written.out, written.err


@pytest.fixture
def talk(checkpoint, monkeypatch, capfd):
    return lambda lines, *words, path=checkpoint: piped(
        path, lines, *words, monkeypatch=monkeypatch, capfd=capfd
    )


def expected(path, system, messages, seed, **sampling):
    """Returns the answers, by the parts of the library that tests compare with transformers."""
    model = load(path)
    template, talk, answers = find_template(model, None), list(system), []
    for number, message in enumerate(messages):
        talk.append({"role": "user", "content": message})
        ids = encode_messages(model, template, talk)
        stream = TextStream(model.tokenizer, ids[-8:])
        for token in Decoding(
            model.network,
            [ids],
            max_new_tokens=9,
            sampling=Sampling(**sampling),
            seeds=[seed + number],
            stop_ids=[0, 2],
        ):
            stream.add(token.id)
        stream.end()
        answers.append(stream.text)
        talk.append({"role": "assistant", "content": stream.text})
    return answers


def clean(text):
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def test_answers_follow_the_template_and_the_history(talk, checkpoint, monkeypatch):
    computed, forward = [], Llama.forward

    def counted(self, batch, cache=None):
        computed.append(batch["input_ids"].shape[1])
        return forward(self, batch, cache)

    monkeypatch.setattr(Llama, "forward", counted)
    words = ["--max_new_tokens=9", "--seed=3", "--temperature=1.5", "--top_k=40", "--system=be brief"]
    messages = ["hello", "a <|im_end|> é 🙂"]
    code, out, err = talk("\n".join([*messages, "/reset", "hello", "/exit", "never"]), *words)
    assert code == 0, err
    monkeypatch.undo()
    system = [{"role": "system", "content": "be brief"}]
    first, second = expected(checkpoint, system, messages, 3, temperature=1.5, top_k=40)
    [again] = expected(checkpoint, system, messages[:1], 5, temperature=1.5, top_k=40)
    assert out == clean(f"{first}\n{second}\n{again}\n")
    so_far = [*system, *({"role": "user", "content": one} for one in messages)]
    so_far.insert(2, {"role": "assistant", "content": first})
    model = load(checkpoint)
    lengths = [len(encode_messages(model, find_template(model, None), so_far[:end])) for end in (2, 4)]
    prompts = [count for count in computed if count > 1]  # that after /reset is known but for its last token
    assert prompts[0] == lengths[0]
    assert len(prompts) == 2
    assert prompts[1] <= lengths[1] - lengths[0]
    assert "# forgotten" in err


def test_ctrl_c_before_an_answer_begins_takes_the_message_back(talk, monkeypatch):
    rendered, render = [], ChatTemplate.render

    def interrupted(self, messages, *arguments, **options):
        rendered.append([one["content"] for one in messages])
        if messages[-1]["content"] == "lost":
            raise KeyboardInterrupt
        return render(self, messages, *arguments, **options)

    monkeypatch.setattr(ChatTemplate, "render", interrupted)
    code, _, err = talk("lost\nhello", "--max_new_tokens=2")
    assert code == 0, err
    assert rendered[1:] == [["lost"], ["hello"]]


def test_what_no_longer_fits_is_forgotten_and_a_long_message_is_refused(talk, tmp_path):
    path = store_chat(tmp_path / "a.ckpt", window=128)
    code, out, err = talk("\n".join(["word " * 4] * 4), "--max_new_tokens=9", "--temperature=0", path=path)
    assert code == 0, err
    assert "messages no longer fit" in err
    code, out, err = talk("word " * 99, "--max_new_tokens=9", path=path)
    assert code == 2
    assert re.search(r"The message has \d+ tokens, the network sees 128", err)
    assert out == ""


MISTAKES = {
    "no file": (["--template=nowhere.jinja"], "--template nowhere.jinja: No such file"),
    "no template": (["--template=bad.jinja"], "The chat template, line 1:"),
    "no template in it": (["--template=config.json"], "it has no `chat_template`"),
    "a template that refuses": (["--template=refuses.jinja"], "refuses these messages: only tools"),
    "an empty text": (["--template=empty.jinja"], "an empty text"),
    "greedy": (["--temperature=0", "--top_p=0.5"], "--top_p would change nothing"),
    "top-k": (["--top_k=0"], "top_k=0 must be at least 1"),
    "length": (["--max_new_tokens=0"], "--max_new_tokens 0 must be at least 1"),
    "seed": (["--seed=99999999999999999999999"], "--seed is out of range"),
    "stop": (["--stop="], "The stop string '' is empty"),
    "another option": (["--tempratur=1"], "Did you mean --temperature?"),
    "data type": (["--quantize=int4"], "Did you mean int8"),
    "checkpoint": (["--ckpt_path=nowhere.ckpt"], "nowhere.ckpt"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_line_or_two(name, talk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {
        "bad.jinja": "{% for",
        "config.json": "{}",
        "empty.jinja": "",
        "refuses.jinja": "{{ raise_exception('only tools') }}",
    }
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
    words, said = MISTAKES[name]
    code, out, err = talk("hello\n", *words)
    assert code == 2, err
    assert said in err
    assert len(err.splitlines()) <= 4
    assert out == ""


def test_without_a_template_one_is_asked_for(talk, tmp_path):
    path = store_chat(tmp_path / "bare.ckpt", template=None)
    code, _, err = talk("hello\n", path=path)
    assert code == 2
    assert "has no chat template" in err
    assert "--template FILE" in err
    (tmp_path / "chat.jinja").write_text(CHATML)
    code, out, err = talk("hello\n", f"--template={tmp_path / 'chat.jinja'}", "--max_new_tokens=3", path=path)
    assert code == 0, err
    assert out.endswith("\n")


class Terminal:
    """A process with a terminal of its own."""

    def __init__(self, *words, folder):
        self.screen, other = pty.openpty()
        environment = os.environ | {"PYTHONPATH": str(HOUSE), "TERM": "dumb"}
        self.process = subprocess.Popen(
            words, stdin=other, stdout=other, stderr=other, cwd=folder, env=environment, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(other)
        self.text = ""

    def type(self, text):
        os.write(self.screen, text.encode())

    def until(self, pattern, times=1):
        """Reads until a pattern was printed so often."""
        end = time.monotonic() + 120
        while len(re.findall(pattern, self.text)) < times:
            assert time.monotonic() < end, self.text
            if select.select([self.screen], [], [], 1)[0]:
                try:
                    self.text += os.read(self.screen, 4096).decode(errors="replace")
                except OSError:
                    break
        assert len(re.findall(pattern, self.text)) >= times, self.text


@pytest.mark.ci
def test_in_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_leaves(tmp_path):
    # Without a window the likeliest token is never one that ends a text.
    path = store_chat(tmp_path / "endless.ckpt", window=None)
    words = [*COMMAND, f"--ckpt_path={path}", "--max_new_tokens=100000", "--temperature=0"]
    terminal = Terminal(*words, folder=tmp_path)
    terminal.until("you>")
    terminal.type("/help\n")
    terminal.until("you>", 2)
    terminal.type("hello\n")
    terminal.until(r"hello\s+\S")  # it answers
    terminal.type("\x03")
    terminal.until("you>", 3)
    assert "[ended]" in terminal.text
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    assert "Traceback" not in terminal.text
    terminal = Terminal(*words, folder=tmp_path)
    terminal.until("you>")
    for _ in range(60):  # a signal just before `input` reads is seen when it returns
        terminal.type("\x03")
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(1)
            break
    terminal.until("Interrupted")
    assert terminal.process.returncode in (130, -signal.SIGINT)


def test_a_template_goes_out_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store_chat(tmp_path / "a.ckpt")
    (tmp_path / "own.jinja").write_text(CHATML.replace("<|im_end|>", "<|endoftext|>"))
    for words, end in ([], "<|im_end|>"), (["--template=own.jinja"], "<|endoftext|>"):
        assert main(["export", "--ckpt_path=a.ckpt", f"--output=hf{len(words)}", *words]) == 0
        assert main(["import", f"hf{len(words)}", f"--output=b{len(words)}.ckpt"]) == 0
        theirs = AutoTokenizer.from_pretrained(f"hf{len(words)}")
        messages = [{"role": "user", "content": "hello"}]
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == f"<|im_start|>user\nhello{end}\n<|im_start|>assistant\n"
        model = load(tmp_path / f"b{len(words)}.ckpt")
        assert find_template(model, None).render(messages) == text
        assert model.stop_ids == [0, 2]
    (tmp_path / "own.json").write_text(json.dumps({"chat_template": "own"}))
    assert main(["export", "--ckpt_path=a.ckpt", "--output=d", "--template=own.json"]) == 0
    assert (tmp_path / "d" / "chat_template.jinja").read_text() == "own"
    assert main(["export", "--ckpt_path=a.ckpt", "--output=c", "--format=torch", "--template=own.jinja"]) == 2
