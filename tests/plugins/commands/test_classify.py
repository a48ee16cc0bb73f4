"""`classify` finds what the objective of a checkpoint finds, whatever the texts' lengths; mistakes are one message."""

import json

import pytest
import torch
import yaml

from conformance.runs import run
from plugins.checkpoints.stored_objective import load_objective
from tests.support.records import tokenizer, write_lines
from tests.support.small_networks import DENSE

OBJECTIVES = {
    "classes": ("SequenceClassification", [{"text": "ab" * (n % 9 + 1), "label": f"c{n % 3}"} for n in range(40)]),
    "values": ("Regression", [{"text": "ab" * (n % 9 + 1), "label": n / 40} for n in range(40)]),
    "several": ("SequenceClassification", [{"text": "ab" * (n % 9 + 1), "label": ["x", "y"][: n % 3]} for n in range(40)]),
    "words": ("TokenClassification", [{"text": ["a", "bcd"] * (n % 9 + 1), "label": ["n", "v"] * (n % 9 + 1)} for n in range(40)]),
}  # fmt: skip


def trained(tmp_path, task):
    """Trains two steps; returns the checkpoint."""
    objective, records = OBJECTIVES[task]
    options = {"labels": ["x", "y"]} if task == "several" else {}
    values = {
        "seed_everything": 0,
        "trainer": {"accelerator": "cpu", "devices": 1, "default_root_dir": str(tmp_path / "run"), "logger": False, "max_steps": 2,
                    "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
                    "use_distributed_sampler": False, "plugins": [{"class_path": "AtomicCheckpoint"}],
                    "callbacks": [{"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": 2}}]},
        "model": {"network": {"class_path": "Llama", "init_args": {**DENSE, "vocab_size": 320, "max_sequence_length": 32}},
                  "objective": {"class_path": objective, "init_args": {"several": True} if task == "several" else {}},
                  "optimizer": {"class_path": "AdamW", "init_args": {"lr": 3e-3}}},
        "data": {"class_path": "LabelledDataModule",
                 "init_args": {"source": write_lines(tmp_path / "texts.jsonl", records), "cache_dir": str(tmp_path / "cache"),
                               "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"path": tokenizer(tmp_path).path}},
                               "task": task, "sequence_length": 32, "batch_size": 8, "too_long": "cut", **options}},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    done = run(["fit", f"--config={path}"], tmp_path)
    assert done.code == 0, done.error_text
    return tmp_path / "run" / "checkpoints" / "step-00000002.ckpt"


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=[pytest.mark.ci] * (task != "words")) for task in OBJECTIVES]
)
def test_each_text_gets_what_the_objective_finds_in_it_alone(task, tmp_path):
    checkpoint = trained(tmp_path, task)
    texts = ["a", "abab", "ab" * 12, "ab" * 30]
    words = [["a"], ["bcd", "a"], ["bcd"] * 3, ["abcd"] * 20]
    records = [{"text": one, "id": n} for n, one in enumerate(words if task == "words" else texts)]
    source = write_lines(tmp_path / "new.jsonl", records)
    output = tmp_path / "out.jsonl"
    done = run(["classify", "--ckpt_path", str(checkpoint), source, f"--output={output}", "--batch_size=3"], tmp_path)  # fmt: skip
    assert done.code == 0, done.error_text
    assert "1 are cut to 32 tokens" in done.stderr
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [{"text": one["text"], "id": one["id"]} for one in found] == records
    stored = load_objective(checkpoint)
    from tokenizers import Tokenizer

    for record, one in zip(records[:3], found, strict=False):
        given = record["text"]
        encoding = Tokenizer.from_str(stored.tokenizer_json).encode(
            " ".join(given) if task == "words" else given
        )
        ids = torch.tensor([[*encoding.ids, stored.end_of_text_id]])
        labels = torch.full_like(ids, -100)
        if task == "words":
            at = 0
            for word in given:
                labels[0, at] = 0
                at += len(word) + 1
        else:
            labels[0, -1] = 0
        alone = stored.objective.predict(stored.network, {"input_ids": ids, "labels": labels})
        if task == "words":
            assert one["prediction"] == [part["prediction"] for part in alone]
            assert one["probability"] == pytest.approx([part["probability"] for part in alone], rel=1e-4)
        else:
            for name, value in alone[0].items():
                assert one[name] == (
                    value if name == "prediction" and task != "values" else pytest.approx(value, rel=1e-4)
                )
    if task == "words":
        assert None in found[3]["prediction"]  # those that do not fit into the network
        assert len(found[3]["prediction"]) == 20
    if task != "words":
        return
    for line, said in (("{", "it is no JSON"), ('{"txt": ["a"]}', 'no field "text"'), ('{"text": "a"}', "no list of words"), ("[]", "no object")):  # fmt: skip
        (tmp_path / "bad.jsonl").write_text(f'{{"text": ["a"]}}\n{line}\n', encoding="utf-8")
        done = run(["classify", "--ckpt_path", str(checkpoint), str(tmp_path / "bad.jsonl"), f"--output={tmp_path / 'no.jsonl'}"], tmp_path)  # fmt: skip
        assert done.code == 2
        assert "bad.jsonl:2" in done.error_text
        assert said in done.error_text
        assert not (tmp_path / "no.jsonl").exists()
