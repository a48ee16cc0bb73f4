"""Each task gives its share of the rows, as it would alone; what does not fit is refused."""

import pytest
import torch

from core.errors import ConfigError
from datamodules.instruction_datamodule import InstructionDataModule
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.task_mixture_datamodule import TaskMixtureDataModule
from tests.support.records import rows_of, tokenizer, write_lines


def task(folder, name, letter, **options):
    """Returns records whose answers are one letter."""
    records = [
        {"prompt": f"{name} {number}", "completion": letter * (1 + number % 7)} for number in range(60)
    ]
    options = {"tokenizer": tokenizer(folder), "template": "plain"} | options
    options |= {"cache_dir": str(folder / "cache"), "validation_fraction": 0.2}
    return InstructionDataModule(write_lines(folder / f"{name}.jsonl", records), **options)


def mixture(folder, weights, tasks=None, **options):
    options = {"sequence_length": 32, "batch_size": 4} | options
    data = TaskMixtureDataModule(
        tasks or {"one": task(folder, "one", "x"), "two": task(folder, "two", "y")}, weights, **options
    )
    data.prepare_data()
    data.setup()
    return data


def trained_letters(data, batch):
    """Returns how many positions of a batch are trained on each letter."""
    from tokenizers import Tokenizer

    known = Tokenizer.from_str(data.tokenizer_json)
    return [int((batch["labels"] == known.token_to_id(letter)).sum()) for letter in "xy"]


def test_each_task_gives_its_share_of_the_rows_in_its_own_order(tmp_path):
    data = mixture(tmp_path, {"one": 3, "two": 1})
    batches = [batch for batch, _ in zip(data.train_dataloader(), range(4), strict=False)]
    alone = {name: data.tasks[name].packed("train", sequence_length=32, batch_size=16, rank=0, world_size=1,
             shuffle=True, seed=0) for name in data.tasks}  # fmt: skip
    expected = {name: next(iter(part))[1] for name, part in alone.items()}
    found = {name: [] for name in data.tasks}
    for batch in batches:
        for row in range(4):
            letters = trained_letters(data, {"labels": batch["labels"][row]})
            assert min(letters) == 0, "a row has records of one task"
            found["one" if letters[0] else "two"].append(batch["input_ids"][row])
    assert [len(rows) for rows in found.values()] == [12, 4]
    for name, rows in found.items():
        assert torch.equal(torch.stack(rows), expected[name]["input_ids"][: len(rows)])


def test_rows_say_which_task_they_are_from(tmp_path):
    data = mixture(tmp_path, {"one": 3, "two": 1})
    data.mark_sources()  # as LossBreakdown does
    assert list(data.source_tokens) == ["one", "two"]
    found = set()
    for batch, _ in zip(data.train_dataloader(), range(2), strict=False):
        for labels, sources in zip(batch["labels"], batch["source_ids"], strict=True):
            [source] = set(sources.tolist())
            assert source == int(not trained_letters(data, {"labels": labels})[0])
            found.add(source)
    assert found == {0, 1}


def test_shares_may_change_over_the_run(tmp_path):
    data = mixture(tmp_path, {"one": [(0, 1.0), (1, 0.0)], "two": [(0, 0.0), (1, 1.0)]})
    first, second = (batch for batch, _ in zip(data.train_dataloader(), range(2), strict=False))
    assert [bool(count) for count in trained_letters(data, first)] == [True, True]
    assert [bool(count) for count in trained_letters(data, second)] == [False, True]


def test_it_resumes_at_the_next_batch(tmp_path):
    whole = rows_of(mixture(tmp_path, {"one": 2, "two": 1}).train_dataloader(), 6)
    begun = mixture(tmp_path, {"one": 2, "two": 1})
    loader = iter(begun.train_dataloader())
    for _ in range(2):
        next(loader)
    state = begun.state_dict()
    resumed = mixture(tmp_path, {"one": 2, "two": 1})
    resumed.load_state_dict(state)
    assert rows_of(resumed.train_dataloader(), 4) == whole[2:]


def test_validation_reads_the_held_out_records_of_all_tasks(tmp_path):
    data = mixture(tmp_path, {"one": 1, "two": 1})
    together = [trained_letters(data, batch) for batch in data.val_dataloader()]
    alone = []
    for which, name in enumerate(data.tasks):
        part = data.tasks[name].packed(
            "validation", sequence_length=32, batch_size=4, rank=0, world_size=1, pad=True
        )
        alone.append(sum(trained_letters(data, batch)[which] for _, batch in part))
    assert [sum(counts) for counts in zip(*together, strict=True)] == alone
    assert min(alone) > 0


def test_different_tokenizers_are_refused(tmp_path):
    other = BPETokenizer(vocab_size=300)
    tasks = {"one": task(tmp_path, "one", "x"), "two": task(tmp_path, "two", "y", tokenizer=other)}
    with pytest.raises(ConfigError, match=r"one and two have different tokenizers"):
        mixture(tmp_path, {"one": 1, "two": 1}, tasks)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ({"one": 1}, {}, r"data.weights has one for the tasks one, two\."),
        ({"one": 1, "two": 1}, {"pack": False}, r"data.tasks.one: pack is false"),
        ({"one": 0, "two": 0}, {}, r"No source of the mixture has a positive weight"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, weights, options, message):
    tasks = {name: task(tmp_path, name, "x", **options) for name in ("one", "two")}
    with pytest.raises(ConfigError, match=message):
        mixture(tmp_path, weights, tasks).train_dataloader()


def test_no_task_is_refused():
    with pytest.raises(ConfigError, match=r"data.tasks is empty"):
        TaskMixtureDataModule({}, {})
