"""Tokens that one rank cannot read in the middle of training: no rank waits, the file and the rank are named, checkpoints stay."""

import os
import shutil
from copy import deepcopy
from glob import glob

import pytest
from lightning.pytorch import Callback

from conformance.runs import run
from conformance.workshop import workshop, write_config
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.cli.configuration.config_files import merge
from tests.support.corpus import corpus, prepare
from tests.support.killed_jobs import DDP, FSDP
from tests.support.records import tokenizer, write_lines
from tests.support.same_run import CONFIG

BLOCK, ROW, SHARD = 16_384, 1024, 1 << 15
"""Bytes of a block and tokens of a row, of 2 bytes: a step on 2 ranks x 4 rows reads about one block, the end of it on rank 1."""


class Cuts(Callback):
    """Cuts a file while it is read.

    Args:
        path: The file, or a pattern of its path.
        size: Bytes that are left.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size

    def on_train_batch_start(self, trainer, *_):
        if trainer.is_global_zero and trainer.global_step == 3:
            [path] = glob(self.path, recursive=True)
            os.truncate(path, self.size)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    return prepare(corpus(folder / "source", documents=2500), folder / "out", writer=TokenShards(1 << 20))


def flip(path):
    content = bytearray(path.read_bytes())
    content[5 * BLOCK + BLOCK // 2] ^= 1
    path.write_bytes(content)


def fit(name, source, strategy, *callbacks, **data):
    """Trains on tokens on two ranks, or goes on."""
    stages = {"reader": "JSONLinesDocuments", "tokenizer": "BPETokenizer", "writer": "TokenShards"}
    read = {"packing": "Concatenate", "sequence_length": ROW, "batch_size": 4, "shuffle": False}
    options = {"source": str(source), "cache_dir": cache(name)}
    return trained(
        name, strategy, callbacks, class_path="PretrainDataModule", init_args=stages | read | options | data
    )


def cache(name):
    return f"{workshop() / name}-cache"


def trained(name, strategy, callbacks, **data):
    trainer = {
        "devices": 2, "strategy": strategy, "default_root_dir": str(workshop() / name), "accumulate_grad_batches": 1,
        "callbacks": [{"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": 2}}, *callbacks],
        "max_steps": 8, "val_check_interval": 100,
    }  # fmt: skip
    sizes = {"max_sequence_length": ROW, "vocab_size": 320}
    values = merge(deepcopy(CONFIG), {"trainer": trainer, "model": {"network": {"init_args": sizes}}})
    values["data"] = data
    return run(["fit", f"--config={write_config(name, values)}"], workshop() / name, ranks=2)


def cuts(path, size):
    return {"class_path": f"{__name__}.Cuts", "init_args": {"path": str(path), "size": size}}


def assert_told(done, name, path):
    """Both ranks are over by themselves, name the file, and left a checkpoint that can be read."""
    assert 2 in done.codes, done.error_text
    assert None not in done.codes, "a rank waited"
    for rank, code in enumerate(done.codes):
        said = (workshop() / f"output.{rank}.err").read_text(encoding="utf-8")
        assert path in said
        assert code == 2 or f"rank {1 - rank} failed with ConfigError: {path}" in said
    saved = sorted((workshop() / name / "checkpoints").glob("*.ckpt"))
    assert saved
    for each in saved:
        assert read_checkpoint(each)["global_step"] > 0


@pytest.mark.ci
@pytest.mark.parametrize("strategy", [DDP, pytest.param(FSDP, marks=pytest.mark.slow)], ids=["DDP", "FSDP"])
def test_a_flipped_bit_that_one_rank_finds_ends_all_and_a_good_copy_goes_on(whole, strategy, tmp_path):
    copy, name = shutil.copytree(whole, tmp_path / "copy"), f"flipped {strategy['class_path']}"
    path = copy / "train" / "chunk-0-0.bin"
    flip(path)
    done = fit(name, copy, strategy)
    assert done.codes == (1, 2), done.error_text
    assert_told(done, name, str(path))
    flip(path)
    again = fit(name, copy, strategy)
    assert again.code == 0, again.error_text
    assert "step-00000004.ckpt" in again.stdout


@pytest.mark.ci
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_file_that_is_cut_while_it_is_read_is_named(whole, workers, tmp_path):
    """Without a look before bytes are touched the system kills the rank, or its worker, by SIGBUS."""
    copy, name = shutil.copytree(whole, tmp_path / "copy"), f"cut {workers}"
    path = copy / "train" / "chunk-0-0.bin"
    assert_told(fit(name, copy, DDP, cuts(path, 5 * BLOCK), num_workers=workers), name, str(path))


@pytest.mark.slow  # the same look as at a local file
def test_a_copy_of_storage_that_is_cut_while_it_is_read_is_named(whole, storage):
    name = "cut copy"
    path = f"{cache(name)}/remote/*/train/chunk-0-0.bin"
    url = storage.upload(whole, "cut")
    done = fit(name, url, DDP, cuts(path, 5 * BLOCK), storage_options=storage.options)
    assert_told(done, name, glob(path)[0])


@pytest.mark.slow  # the same look as at a file of tokens
def test_encoded_records_that_are_cut_while_they_are_read_are_named(tmp_path):
    name = "cut records"
    path = f"{cache(name)}/*/train/labels.bin"
    records = [{"prompt": f"Question {number}", "completion": "answer " * 100} for number in range(80)]
    options = {
        "source": write_lines(tmp_path / "records.jsonl", records), "cache_dir": cache(name), "template": "plain",
        "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"path": tokenizer(tmp_path).path}},
        "sequence_length": ROW, "batch_size": 4,
    }  # fmt: skip
    done = trained(name, DDP, [cuts(path, BLOCK)], class_path="InstructionDataModule", init_args=options)
    assert_told(done, name, glob(path)[0])


@pytest.mark.slow  # as one process is told by test_remote_batches.py
def test_an_object_that_storage_does_not_give_is_named(storage, tmp_path):
    folder = prepare(corpus(tmp_path / "source", documents=2500), tmp_path / "out", writer=TokenShards(SHARD))
    url, name = storage.upload(folder, "gone"), "gone from storage"
    storage.client.delete_object(Bucket=storage.bucket, Key="gone/train/chunk-0-2.bin")
    done = fit(name, url, DDP, storage_options=storage.options)
    assert_told(done, name, f"{url}/train/chunk-0-2.bin")
