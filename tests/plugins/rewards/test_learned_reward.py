"""A reward model that is trained by `fit`, stored, and then scores answers as training saw them."""

import json

import pytest
import torch

from conformance.runs import run
from core.contracts import IGNORED_LABEL
from core.errors import ConfigError
from plugins.checkpoints.stored_objective import load_objective
from plugins.rewards.learned_reward import LearnedReward
from tests.conformance.conftest import bytes_tokenizer
from toolkit.rewards import Sample

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
PAIRS = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{3 * n}? Or {n}"} for n in range(1, 41)]


def train(folder, template, *words):
    """Returns the checkpoint of a tiny run with RewardModel."""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    (folder / "chat.jinja").write_text(TEMPLATE)
    network = {"vocab_size": 320, "max_sequence_length": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}
    config = {
        "trainer": {"max_steps": 2, "default_root_dir": str(folder / "run"), "logger": False, "enable_checkpointing": True,
                    "callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                                   "init_args": {"dirpath": str(folder), "filename": "reward", "every_n_train_steps": 2}}]},
        "model": {"network": {"class_path": "GPT", "init_args": network}, "objective": {"class_path": "RewardModel"},
                  "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}}},
        "data": {"class_path": "PreferenceDataModule",
                 "init_args": {"source": str(folder / "pairs.jsonl"), "template": template, "sequence_length": 64, "batch_size": 8,
                               "validation_fraction": 0.1, "cache_dir": str(folder / "cache"),
                               "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"path": bytes_tokenizer()}}}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    done = run(["fit", "--config", str(folder / "config.json"), *words], folder)
    assert done.code == 0, done.error_text
    return folder / "reward.ckpt"


@pytest.fixture(scope="module", params=["plain", "chat"])
def stored(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    return train(folder, "plain" if request.param == "plain" else str(folder / "chat.jinja"))


def samples():
    answers = [(pair["prompt"], pair[side]) for pair in PAIRS for side in ("chosen", "rejected")]
    return [Sample(prompt, answer, [1], True, {}) for prompt, answer in answers]


def test_it_scores_the_rows_of_training(stored, tmp_path):
    """Rows and values are those that the data module and the objective make of the same pairs."""
    from lightning.pytorch import LightningDataModule

    from plugins.checkpoints.stored_network import build

    reward = LearnedReward(str(stored), batch_size=7)
    loaded = load_objective(stored)
    data = build(LightningDataModule, loaded.config["data"], ("data",))
    data.prepare_data()
    data.setup("fit")
    expected = {}
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for batch in loader:
            labels = batch["labels"]
            ends = (torch.arange(labels.shape[1]) * (labels != IGNORED_LABEL)).amax(1) + 1
            with torch.no_grad():
                values = loaded.objective.rewards(loaded.network, batch, ends)
            for ids, end, value in zip(
                batch["input_ids"].tolist(), ends.tolist(), values.tolist(), strict=True
            ):
                expected[tuple(ids[: end + 1])] = value
    expected = {row: value for row, value in expected.items() if len(row) > 2}  # without padding
    given = samples()
    rows = [tuple(reward.row(sample)) for sample in given]
    rows_of_training = [row for row in rows if row in expected]
    assert len(rows_of_training) == len(expected) >= 64  # an unfinished batch is left out
    found = reward.score(given)
    by_row = dict(zip(rows, found, strict=True))
    assert by_row == pytest.approx(by_row | expected, abs=1e-5)  # rows are padded to other lengths
    assert len({round(value, 6) for value in found}) > 40


def test_texts_of_messages_and_long_ones(stored):
    reward = LearnedReward(str(stored))
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "1+1="},
    ]
    sample = Sample("1+1=", "2", [1], True, {"prompt": turns})
    row = reward.row(sample)
    assert row[-10:] == reward.row(sample._replace(record={}))[-10:]
    assert len(reward.row(sample._replace(answer="2" * 500))) == 64
    assert reward.score([]) == []


def test_a_special_token_in_an_answer_is_text(stored):
    reward = LearnedReward(str(stored))
    row = reward.row(Sample("p", "<|endoftext|>", [1], True, {}))
    assert row.count(0) == reward.row(Sample("p", "a", [1], True, {})).count(0)


def test_mistakes(tmp_path):
    with pytest.raises(ConfigError, match=r"LearnedReward.path: .*none.ckpt"):
        LearnedReward(str(tmp_path / "none.ckpt"))
    (tmp_path / "some.ckpt").write_text("no checkpoint")
    with pytest.raises(ConfigError, match=r"LearnedReward.path: "):
        LearnedReward(str(tmp_path / "some.ckpt"))
    with pytest.raises(ConfigError, match="batch_size is 0"):
        LearnedReward(str(tmp_path / "some.ckpt"), batch_size=0)


def test_another_objective_is_refused(tmp_path):
    words = ["--model.objective=CausalLM", "--data.source", str(tmp_path / "pairs.jsonl")]
    path = train(tmp_path, "plain", *words)
    with pytest.raises(ConfigError, match="was trained with CausalLM"):
        LearnedReward(str(path))  # before a run writes anything
