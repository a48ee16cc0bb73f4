"""`generate` on checkpoints that are not whole: exit code 2 and a few lines."""

import copy
import json
import shutil

import pytest
import torch
import yaml

from conformance.runs import run
from core.__main__ import main
from tests.conftest import TINY


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which a tiny network has been trained on text; its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"hello world number {number}. " * 20)
    config = copy.deepcopy(TINY)
    stages = {"reader": "TextDocuments", "writer": "TokenShards", "packing": "Concatenate"}
    tokenizer = {"class_path": "BPETokenizer", "init_args": {"vocab_size": 300}}
    sizes = {"sequence_length": 16, "batch_size": 2}
    paths = {"source": str(texts), "cache_dir": str(folder / "cache")}
    config["data"] = {
        "class_path": "PretrainDataModule",
        "init_args": {**stages, "tokenizer": tokenizer, **sizes, **paths},
    }
    config["model"]["network"]["init_args"]["vocab_size"] = 512
    config["trainer"] |= {"max_steps": 4, "default_root_dir": str(folder / "run")}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    done = run(["fit", f"--config={folder / 'config.yaml'}"], folder)
    assert done.code == 0, done.error_text
    return max((folder / "run" / "checkpoints").glob("*.ckpt"))


def generate(capsys, path, *words):
    code = main(["generate", "--ckpt_path", str(path), "--prompt", "hello", "--max_new_tokens", "2", *words])
    return code, capsys.readouterr().err


def part(content, key):
    return next(value for value in content.values() if isinstance(value, dict) and key in value)


def other_network(**arguments):
    def change(content):
        record = part(content, "config")
        config = yaml.safe_load(record["config"])
        config["model"]["network"]["init_args"] |= arguments
        record["config"] = yaml.safe_dump(config)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda content: part(content, "tokenizer").update(tokenizer='{"model"'),
            "tokenizer is damaged: EOF",
        ),
        (lambda content: part(content, "tokenizer").update(tokenizer=""), "tokenizer"),
        (lambda content: part(content, "tokenizer").update(end_of_text_id="x"), "end"),
        (lambda content: part(content, "tokenizer").update(end_of_text_id=512), "512"),
        (lambda content: part(content, "tokenizer").update(end_of_text_id=-1), "-1"),
        (other_network(n_layer=2), "Missing key(s) in state_dict"),
        (other_network(n_embd=32), "size mismatch"),
        (other_network(n_head=3), "n_head"),
        (lambda content: content.update(state_dict={}), ""),
        (lambda content: content.update(state_dict=None), ""),
    ],
)
def test_a_checkpoint_that_is_not_whole(change, said, trained, tmp_path, capsys):
    path = shutil.copy(trained, tmp_path / "changed.ckpt")
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    code, error = generate(capsys, path)
    assert code == 2, error
    assert said in error
    assert "changed.ckpt" in error
    assert len(error.splitlines()) <= 10
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "gpu"], "--device gpu cannot be used"),
        (["--device", "meta"], "--device meta cannot be used"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
        (["--seed", "9" * 30], "--seed is out of range"),
        (["--top_k", "0"], "top_k"),
        (["--temperature", "nan"], "temperature"),
    ],
)
def test_options_that_cannot_be(words, said, trained, capsys):
    code, error = generate(capsys, trained, *words)
    assert code == 2, error
    assert said in error


@pytest.mark.parametrize("words", [[], ["--top_k", "9" * 30], ["--temperature", "1e-300"], ["--seed", "-1"]])
def test_options_that_may_be(words, trained, capsys):
    code, error = generate(capsys, trained, *words)
    assert code == 0, error


def lines(capsys, path, *words):
    """Returns what `generate` writes as JSON lines to the terminal."""
    code = main(["generate", "--ckpt_path", str(path), "--max_new_tokens", "12", *words])
    written = capsys.readouterr()
    assert code == 0, written.err
    return [json.loads(line) for line in written.out.splitlines()]


PROMPTS = ["hello", "number 3. hello world number", "w", "zoë 🙂", "world number 17. hello"]


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join([json.dumps(PROMPTS[0]), *(json.dumps({"prompt": one, "id": 1}) for one in PROMPTS[1:])])
    )
    return tmp_path / "prompts.txt"


FILTERS = ["--temperature", "1.3", "--top_k", "100", "--top_p", "0.9", "--min_p", "0.01"]
FILTERS += ["--repetition_penalty", "1.1"]


def same(some, others):
    """Asserts that lines differ in the last digits of their log-probabilities at most."""
    for one, other in zip(some, others, strict=True):
        assert {**one, "logprobs": 0} == {**other, "logprobs": 0}
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)


@pytest.mark.parametrize("words", [["--temperature", "0"], FILTERS], ids=["greedy", "sampled"])
def test_many_prompts_give_the_lines_of_each_alone(words, trained, prompts, capsys):
    words = [*words, "--logprobs"]
    together = lines(capsys, trained, "--prompts", str(prompts), *words)
    assert [line["prompt"] for line in together] == PROMPTS
    same(together, lines(capsys, trained, "--prompts", str(prompts), "--batch_size", "2", *words))
    same(together, lines(capsys, trained, "--prompts", str(prompts.with_suffix(".jsonl")), *words))
    for line in together:
        assert list(line) == ["prompt", "text", "ids", "finish_reason", "seed", "logprobs"]
        [alone] = lines(
            capsys, trained, "--prompt", line["prompt"], "--json", "--seed", str(line["seed"]), *words
        )
        logprobs = line["logprobs"]
        same([alone], [line])
        assert len(logprobs) == len(line["ids"]) <= 12
        assert all(value < 0 for value in logprobs)


def test_the_text_of_a_line_is_what_is_printed_for_its_prompt_and_seed(trained, prompts, capsys):
    for line in lines(capsys, trained, "--prompts", str(prompts), "--n", "3", *FILTERS)[4:8]:
        words = ["--prompt", line["prompt"], "--seed", str(line["seed"]), "--max_new_tokens", "12", *FILTERS]
        assert main(["generate", "--ckpt_path", str(trained), *words]) == 0
        assert capsys.readouterr().out == line["prompt"] + line["text"]


def test_several_texts_of_a_prompt_have_seeds_of_their_own(trained, capsys):
    found = lines(capsys, trained, "--prompt", "hello", "--n", "4", "--seed", "7")
    assert [line["seed"] for line in found] == [7, 8, 9, 10]
    assert len({line["text"] for line in found}) == 4


def test_a_stop_string_ends_a_text(trained, capsys):
    words = ["--prompt", "hello", "--json", "--temperature", "0"]
    [whole] = lines(capsys, trained, *words)
    stop = whole["text"].split()[-1]
    place = whole["text"].index(stop)
    assert 0 < place < len(whole["text"]) - 10
    [cut] = lines(capsys, trained, *words, "--stop", stop, "--stop", "no such text")
    assert cut["text"] == whole["text"][:place]
    assert cut["finish_reason"] == "stop"
    assert len(cut["ids"]) < len(whole["ids"]) == 12
    assert whole["finish_reason"] == "length"


def test_beam_search_gives_the_best_texts(trained, prompts, capsys):
    words = ["--num_beams", "4", "--length_penalty", "0"]
    together = lines(capsys, trained, "--prompts", str(prompts), "--n", "2", *words)
    assert [line["prompt"] for line in together] == [one for one in PROMPTS for _ in range(2)]
    greedy = lines(capsys, trained, "--prompts", str(prompts), "--temperature", "0", "--logprobs")
    for best, second, one in zip(together[::2], together[1::2], greedy, strict=True):
        assert best["score"] > second["score"]
        assert best["score"] >= sum(one["logprobs"]) - 1e-4
    assert (
        main(["generate", "--ckpt_path", str(trained), "--prompt", "w", "--max_new_tokens", "12", *words])
        == 0
    )
    assert capsys.readouterr().out == "w" + together[4]["text"] + "\n"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_data_type_changes_weights_and_not_what_may_be_computed(dtype, trained, prompts, capsys):
    words = ["--prompts", str(prompts), "--temperature", "0", "--logprobs"]
    found = lines(capsys, trained, *words, "--dtype", dtype)
    exact = lines(capsys, trained, *words)
    assert [line["logprobs"][0] for line in found] == pytest.approx(
        [line["logprobs"][0] for line in exact], abs=0.0 if dtype == "float32" else 0.1
    )
    assert (found == exact) == (dtype == "float32")


def test_an_output_file_is_written_whole(trained, prompts, tmp_path, capsys):
    output = tmp_path / "new" / "texts.jsonl"
    words = ["--prompts", str(prompts), "--output", str(output), "--max_new_tokens", "12"]
    assert main(["generate", "--ckpt_path", str(trained), *words]) == 0
    assert capsys.readouterr().out == ""
    expected = lines(capsys, trained, "--prompts", str(prompts))
    assert [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] == expected
    assert "zoë 🙂" in output.read_text(encoding="utf-8")


MISTAKES = {
    "missing": (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: No such file or directory"),
    "folder": (["--prompts", "."], "--prompts .: it is no file"),
    "no UTF-8": (["--prompts", "latin.txt"], "--prompts latin.txt:2: it is not UTF-8"),
    "empty file": (["--prompts", "empty.txt"], "--prompts empty.txt: it is empty"),
    "empty line": (["--prompts", "hole.txt"], "--prompts hole.txt:2: the prompt is empty"),
    "no JSON": (["--prompts", "bad.jsonl"], "--prompts bad.jsonl:2: it is no JSON"),
    "half a character": (
        ["--prompts", "half.jsonl"],
        "--prompts half.jsonl:1: the prompt has half of a surrogate pair",
    ),
    "other JSON": (["--prompts", "other.jsonl"], "--prompts other.jsonl:1: it is neither a string nor"),
    "too long": (["--prompts", "long.txt"], "Prompt 2 has 17 tokens, the network sees 16 at most"),
    "both": (["--prompt", "a", "--prompts", "long.txt"], "--prompt and --prompts"),
    "greedy and top-k": (["--temperature", "0", "--top_k", "5"], "--top_k would change nothing"),
    "greedy and min-p": (["--temperature", "0", "--min_p", "0.5"], "--min_p would change nothing"),
    "greedy samples": (["--temperature", "0", "--n", "2"], "--temperature 0 gives one text"),
    "sampling beams": (["--num_beams", "2", "--temperature", "0.5"], "it knows no --temperature"),
    "filtered beams": (["--num_beams", "2", "--top_p", "0.5"], "it knows no --top_p"),
    "stopped beams": (["--num_beams", "2", "--stop", "x"], "it knows no --stop"),
    "more texts than beams": (["--num_beams", "2", "--n", "3"], "2 beams find 2 texts"),
    "more beams than tokens": (["--num_beams", "300"], "num_beams=300 must be"),
    "length penalty": (["--length_penalty", "2"], "give --num_beams as well"),
    "no texts": (["--n", "0"], "--n 0 must be at least 1"),
    "empty stop": (["--stop", ""], "The stop string '' is empty"),
    "min-p": (["--min_p", "1.5"], "min_p=1.5 must be 0 to 1"),
    "penalty": (["--repetition_penalty", "0"], "repetition_penalty=0.0 must be above 0"),
    "data type": (["--dtype", "bfloat"], "Did you mean bfloat16?"),
    "output is a folder": (["--json", "--output", "."], "--output .: "),
    "output in a file": (["--output", "empty.txt/texts.jsonl"], "--output empty.txt/texts.jsonl cannot be"),
    "output has a long name": (["--output", "x" * 250], "cannot be written: File name too long"),
    "output is a device": (["--output", "/dev/null"], "--output /dev/null: it is no file"),
    "output is nowhere": (
        ["--output", "/proc/texts/a.jsonl"],
        "--output /proc/texts/a.jsonl cannot be written",
    ),
    "last seed": (["--n", "2", "--seed", str(2**64 - 1)], "--seed is out of range"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_nothing_is_written(name, trained, tmp_path, monkeypatch, capsys):
    words, said = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    files = {
        "latin.txt": "good\nZo\xeb".encode("latin-1"),
        "empty.txt": b"",
        "hole.txt": b"a\n  \nb\n",
        "bad.jsonl": b'"a"\n{"prompt": \n',
        "half.jsonl": b'"\\ud83d"\n',
        "other.jsonl": b'{"text": "a"}\n',
        "long.txt": b"a\n" + b"q" * 17 + b"\n",
    }
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    words = ["--max_new_tokens", "2", "--output", "texts.jsonl", *words]
    code = main(["generate", "--ckpt_path", str(trained), *words])
    written = capsys.readouterr()
    assert code == 2, written.err
    assert said in written.err
    assert len([line for line in written.err.splitlines() if not line.startswith("#")]) <= 3
    assert written.out == ""
    assert {path.name for path in tmp_path.iterdir()} == set(files)


@pytest.mark.parametrize("output", [".", "a.txt/texts.jsonl", "x" * 250, "/dev/null", "/proc/texts.jsonl"])
def test_whether_the_output_can_be_written_is_known_before_the_checkpoint_is_read(
    output, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    assert main(["generate", "--ckpt_path", "nowhere.ckpt", "--output", output]) == 2
    assert capsys.readouterr().err.startswith(f"--output {output[:200]}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("temperature", "nan", "--temperature=nan must be 0"),
        ("temperature", "-1", "--temperature=-1.0 must be 0"),
        ("top_k", "0", "--top_k=0 must be at least 1"),
        ("top_p", "nan", "--top_p=nan must be above 0"),
        ("min_p", "1.5", "--min_p=1.5 must be 0 to 1"),
        ("repetition_penalty", "inf", "--repetition_penalty=inf must be above 0"),
        ("max_new_tokens", "-3", "--max_new_tokens -3 must be at least 0"),
    ],
)
def test_a_number_out_of_range_is_known_before_the_checkpoint_is_read(option, value, said, capsys):
    assert main(["generate", "--ckpt_path", "nowhere.ckpt", f"--{option}={value}"]) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("name", ["hf", "hf/model.safetensors", "q.gguf"])
def test_weights_of_others_have_to_be_imported_first(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    for file in ("hf/config.json", "hf/model.safetensors", "q.gguf"):
        (tmp_path / file).touch()
    code, error = generate(capsys, name)
    assert code == 2
    assert f"\npython -m core import {name} --output " in error
    assert len(error.splitlines()) == 2


def test_without_an_end_token_a_prompt_is_needed(trained, tmp_path, capsys):
    path = shutil.copy(trained, tmp_path / "endless.ckpt")
    content = torch.load(path, weights_only=True)
    part(content, "tokenizer").update(end_of_text_id=None)
    torch.save(content, path)
    code = main(["generate", "--ckpt_path", str(path), "--max_new_tokens", "2"])
    error = capsys.readouterr().err
    assert code == 2
    assert "The prompt is empty, and the checkpoint's tokenizer has no end-of-text token" in error
    assert len(lines(capsys, path, "--prompt", "hello", "--json")[0]["ids"]) == 12
    assert len(lines(capsys, trained, "--json")) == 1  # with one, a text begins behind it
