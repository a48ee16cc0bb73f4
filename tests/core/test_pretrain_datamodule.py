import json
import math
import os
import random
import shutil
import time
from collections import Counter
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from tokenizers import Tokenizer

from conformance.runs import free_port, on_ranks
from core.errors import ConfigError
from core.pretrain_datamodule import PretrainDataModule
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.manifest import unigram_loss
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.corpus import PLAIN_WORDS


def texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(PLAIN_WORDS, k=rng.randint(3, 40))) for _ in range(count)]


def save(folder, documents):
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(documents):
        (folder / f"{number:03}.txt").write_text(text)
    return str(folder)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return save(tmp_path_factory.mktemp("corpus"), texts(60))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def build(source, cache_dir, **options):
    options = {"sequence_length": 36, "batch_size": 3, "validation_fraction": 0.2, **options}
    stages = (TextDocuments, BPETokenizer(300), TokenShards(500), Concatenate())
    return PretrainDataModule(*stages, source=source, cache_dir=str(cache_dir), **options)


def prepared(source, cache_dir, **options):
    data = build(source, cache_dir, **options)
    data.prepare_data()
    data.setup()
    return data


def documents_of(data, split):
    """The documents as they were stored, decoded."""
    store = TokenStore(data.folder / split)
    tokenizer = Tokenizer.from_str(data.tokenizer_json)
    starts = [*store.document_starts(), len(store)]
    ids = [store.read(a, b).tolist() for a, b in pairwise(starts)]
    assert all(document[-1] == 0 for document in ids)
    return [tokenizer.decode(document[:-1]) for document in ids]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Preparing ----------------------------------------------------------------------------------------------


def test_it_is_built_from_yaml_and_the_dump_builds_it_again(cache, corpus):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningDataModule, "data")
    config = parser.parse_string(
        f"""
        data:
          class_path: PretrainDataModule
          init_args:
            source: {corpus}
            reader: TextDocuments
            tokenizer: {{class_path: BPETokenizer, init_args: {{vocab_size: 2048}}}}
            writer: TokenShards
            packing: Concatenate
            cache_dir: {cache}
        """
    )
    for parsed in (config, parser.parse_string(parser.dump(config))):
        data = parser.instantiate_classes(parsed).data
        assert isinstance(data, PretrainDataModule)
        assert data.tokenizer.vocab_size == 2048
        assert len(list(data.reader(data.source).documents())) == 60
        assert data.writer.shard_bytes == 512 * 1024 * 1024


def test_every_document_lands_in_one_split_whole_and_in_order(corpus, cache):
    data = prepared(corpus, cache)
    train, validation = documents_of(data, "train"), documents_of(data, "validation")
    everything = texts(60)
    assert sorted(train + validation) == sorted(everything)
    assert [text for text in everything if text in train] == train
    assert 3 <= len(validation) <= 25
    manifest = json.loads((data.folder / "manifest.json").read_text())
    assert (manifest["train_documents"], manifest["validation_documents"]) == (len(train), len(validation))
    assert data.train_tokens == manifest["train_tokens"] == len(TokenStore(data.folder / "train"))
    assert data.vocab_size == Tokenizer.from_str(data.tokenizer_json).get_vocab_size() <= 300


def test_documents_that_are_added_move_no_other(tmp_path):
    before = prepared(save(tmp_path / "a", texts(40)), tmp_path)
    after = prepared(save(tmp_path / "a", texts(40) + texts(30, seed=1)), tmp_path)
    assert after.folder != before.folder
    for split in ("train", "validation"):
        assert set(documents_of(before, split)) <= set(documents_of(after, split))


def test_equal_documents_stay_together(tmp_path):
    data = prepared(save(tmp_path / "a", texts(20) * 3), tmp_path)
    assert not set(documents_of(data, "train")) & set(documents_of(data, "validation"))


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_two_documents_fill_both_splits(tmp_path, fraction):
    data = prepared(
        save(tmp_path / "a", ["one text", "another text"]), tmp_path, validation_fraction=fraction
    )
    assert {*documents_of(data, "train"), *documents_of(data, "validation")} == {"one text", "another text"}


def test_a_second_run_finds_the_data_and_an_option_that_changes_tokens_does_not(tmp_path, corpus, capfd):
    first = prepared(corpus, tmp_path / "cache")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert str(first.folder) in lines[0]
    assert "60 documents" in lines[1]
    assert "tokens in" in lines[1]
    stamps = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    assert (
        prepared(corpus, tmp_path / "cache", sequence_length=5, batch_size=2, seed=9).folder == first.folder
    )
    assert stamps == {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    assert capfd.readouterr().err == ""
    assert prepared(corpus, tmp_path / "cache", validation_fraction=0.3).folder != first.folder
    moved = save(tmp_path / "elsewhere", texts(60))
    assert prepared(moved, tmp_path / "cache").folder == first.folder


def test_the_unigram_loss_is_that_of_a_direct_computation(corpus, cache):
    data = prepared(corpus, cache)
    train, validation = (
        (store := TokenStore(data.folder / split)).read(0, len(store)).tolist()
        for split in ("train", "validation")
    )
    counts = Counter(train)
    total = len(train) + data.vocab_size
    expected = sum(-math.log((counts[token] + 1) / total) for token in validation) / len(validation)
    assert data.unigram_loss == pytest.approx(expected, rel=1e-12)


def test_the_unigram_loss_of_a_known_case():
    # p = (3+1)/(4+2), (1+1)/(4+2); one of each in validation
    assert unigram_loss(np.array([3, 1]), np.array([1, 1])) == pytest.approx(
        -(math.log(4 / 6) + math.log(2 / 6)) / 2
    )


def _prepare(source, cache_dir, barrier=None):
    if barrier:
        barrier.wait()
    build(source, cache_dir).prepare_data()


def test_two_processes_may_prepare_at_once(tmp_path, corpus):
    fork = get_context("fork")
    barrier = fork.Barrier(2)
    processes = [fork.Process(target=_prepare, args=(corpus, tmp_path, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    folder = build(corpus, tmp_path)
    folder.prepare_data()
    assert [path.name for path in tmp_path.iterdir()] == [folder.folder.name]


LANDMARKS = ["", "train", "train/chunk-0-1.bin", "train/index.json", "validation/index.json", "manifest.json"]


@pytest.mark.ci
def test_after_kills_the_data_is_the_same_as_without(tmp_path, corpus):
    undisturbed = contents(prepared(corpus, tmp_path / "whole").folder)
    cache_dir = tmp_path / "killed"
    while kill_at_landmarks(corpus, cache_dir, undisturbed) < 2:
        pass  # the kills came too late to test anything
    assert contents(prepared(corpus, cache_dir).folder) == undisturbed


def kill_at_landmarks(corpus, cache_dir, undisturbed):
    """Kills a preparation as soon as each of them is there; returns how many are cut off by now.

    The first kill may come when there is only the lock's file: it is no folder, and the next preparation takes the lock.
    """
    for landmark in LANDMARKS:
        before = set(cache_dir.glob("*"))
        process = get_context("fork").Process(target=_prepare, args=(corpus, cache_dir))
        process.start()
        while process.is_alive() and not any(
            (path / landmark).exists() for path in set(cache_dir.glob("*")) - before
        ):
            time.sleep(0.0005)
        process.kill()
        process.join(240)
        folders = {path for path in cache_dir.glob("*") if path.is_dir()}
        for finished in folders - set(cache_dir.glob("preparing-*")):
            assert contents(finished) == undisturbed
            shutil.rmtree(finished)  # the next one begins anew
    return len(list(cache_dir.glob("preparing-*")))


def test_a_half_written_folder_is_passed_over_and_removed_when_old(tmp_path, corpus):
    cache_dir = tmp_path / "cache"
    for name in ("preparing-old", "preparing-new"):
        (cache_dir / name / "train").mkdir(parents=True)
        (cache_dir / name / "train" / "chunk-0-0.bin").write_bytes(b"half")
    yesterday = time.time() - 25 * 3600
    for path in [cache_dir / "preparing-old", *(cache_dir / "preparing-old").rglob("*")]:
        os.utime(path, (yesterday, yesterday))
    data = prepared(corpus, cache_dir)
    assert {path.name for path in cache_dir.iterdir()} == {"preparing-new", data.folder.name}


def test_a_failure_leaves_nothing_behind(tmp_path):
    source = tmp_path / "corpus.jsonl"
    source.write_text('{"text": "fine"}\n{"text": "fine too"}\n{"txt": "not"}\n')
    with pytest.raises(ConfigError, match=r"corpus.jsonl:3.*'txt'"):
        prepared(str(source), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_default_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (
        PretrainDataModule(TextDocuments, BPETokenizer(), TokenShards(), Concatenate()).cache_dir
        == tmp_path / "leyden"
    )
    monkeypatch.delenv("XDG_CACHE_HOME")
    data = PretrainDataModule(TextDocuments, BPETokenizer(), TokenShards(), Concatenate())
    assert data.cache_dir == Path.home() / ".cache" / "leyden"


# What a user can get wrong ------------------------------------------------------------------------------


def test_one_document_cannot_be_split(tmp_path):
    with pytest.raises(ConfigError, match="single document"):
        prepared(save(tmp_path / "a", ["all the same"] * 3), tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, corpus):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Not a directory.\n.*data.cache_dir"):
        prepared(corpus, tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sequence_length", 0),
        ("batch_size", 0),
        ("seed", -1),
        ("num_workers", -1),
        ("validation_fraction", 1.0),
    ],
)
def test_numbers_out_of_range_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"data.{option} is {value}"):
        build("python-docs", "unused", **{option: value})


def test_too_few_rows_for_a_batch(corpus, cache):
    data = prepared(corpus, cache, sequence_length=500, batch_size=8)
    with pytest.raises(ConfigError, match=r"1 ranks x 8 rows x\n500 tokens") as caught:
        data.train_dataloader()
    assert "Lower data.sequence_length or data.batch_size" in str(caught.value)


def test_damaged_data_says_what_to_delete(corpus, tmp_path):
    data = prepared(corpus, tmp_path)
    chunk = data.folder / "train" / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=rf"{chunk}.*\nDelete {data.folder} and run again"):
        data.train_dataloader()
    (data.folder / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=f"If {data.folder} is there, delete it"):
        build(corpus, tmp_path).setup()


def test_data_of_another_tokenizer_is_refused(corpus, cache, tmp_path):
    state = prepared(corpus, cache).state_dict()
    prepared(corpus, tmp_path).load_state_dict(state)
    with pytest.raises(ConfigError, match="another tokenizer"):
        prepared(save(tmp_path / "other", texts(50, seed=2)), cache).load_state_dict(state)


# With Lightning -----------------------------------------------------------------------------------------


class Recorder(pl.LightningModule):
    """Keeps every batch that it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, _):
        assert set(batch) == {"input_ids", "labels"}
        self.seen.append((*batch["input_ids"].flatten().tolist(), *batch["labels"].flatten().tolist()))
        return self.weight.sum() * 0

    def validation_step(self, batch, _):
        assert batch["labels"].shape == (3, 36)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(data, checkpoint=None, callback=None, **options):
    module = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=callback is not None,
        callbacks=callback,
        **options,
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return module.seen


EACH_STEP = {"every_n_train_steps": 1}
AFTER_VALIDATION = {"save_on_train_epoch_end": False}
AFTER_EPOCH = {"save_on_train_epoch_end": True}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("save", "options", "workers"),
    [
        pytest.param(EACH_STEP, {"max_steps": 26}, 0, marks=pytest.mark.ci),
        pytest.param(EACH_STEP, {"max_steps": 26, "val_check_interval": 4}, 2, marks=pytest.mark.slow),
        pytest.param(EACH_STEP, {"max_epochs": 3}, 0, marks=pytest.mark.slow),
        pytest.param(
            EACH_STEP,
            {"max_steps": 26, "val_check_interval": 5, "check_val_every_n_epoch": None},
            0,
            marks=pytest.mark.ci,
        ),
        pytest.param(
            EACH_STEP,
            {"max_steps": 20, "limit_train_batches": 6, "limit_val_batches": 1},
            0,
            marks=pytest.mark.ci,
        ),
        pytest.param(EACH_STEP, {"max_steps": 16, "accumulate_grad_batches": 2}, 0, marks=pytest.mark.ci),
        pytest.param(AFTER_VALIDATION, {"max_steps": 26}, 0, marks=pytest.mark.slow),
        pytest.param(AFTER_VALIDATION, {"max_epochs": 3, "val_check_interval": 4}, 2, marks=pytest.mark.ci),
        pytest.param(AFTER_VALIDATION, {"max_steps": 20, "limit_train_batches": 6}, 0, marks=pytest.mark.ci),
        pytest.param(AFTER_EPOCH, {"max_steps": 26}, 0, marks=pytest.mark.slow),
        pytest.param(AFTER_EPOCH, {"max_epochs": 3}, 2, marks=pytest.mark.ci),
        (AFTER_EPOCH, {"max_steps": 20, "limit_train_batches": 6}, 0),
    ],
)
def test_a_resumed_run_sees_the_batches_of_one_that_was_not_stopped(
    corpus, cache, tmp_path, save, options, workers
):
    data = prepared(corpus, cache, num_workers=workers)
    epoch = options.get("limit_train_batches", len(data.train_dataloader()))
    assert epoch in (6, 11)
    whole = fit(data, callback=ModelCheckpoint(tmp_path, save_top_k=-1, **save), **options)
    assert len(set(whole)) == len(whole) > 2 * epoch
    checkpoints = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    assert len(checkpoints) >= 2
    ends = [k for k, path in enumerate(checkpoints) if _batches_done(path) % epoch < 2]
    chosen = checkpoints if workers == 0 else [checkpoints[k] for k in ends[:4]]
    for checkpoint in chosen:
        resumed = fit(build_like(data), checkpoint, **options)
        assert resumed == whole[_batches_done(checkpoint) :], checkpoint.name


def build_like(data):
    return prepared(data.source, data.cache_dir, num_workers=data.num_workers)


def _batches_done(checkpoint):
    loops = torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]
    return loops["epoch_loop.batch_progress"]["total"]["ready"]


@pytest.mark.filterwarnings("ignore")
def test_resumes_may_follow_each_other(corpus, cache, tmp_path):
    data = prepared(corpus, cache)
    whole = fit(data, max_steps=40)
    seen, checkpoint = [], None
    for number, stop in enumerate([11, 17, 22, 23, 33, 40]):
        folder = tmp_path / str(number)
        end_of_epoch = ModelCheckpoint(
            folder, save_on_train_epoch_end=True
        )  # Lightning then miscounts epochs
        each = ModelCheckpoint(folder, every_n_train_steps=1, filename="last")
        callback = end_of_epoch if stop % 11 == 0 else each
        seen += fit(build_like(data), checkpoint, callback, max_steps=stop)
        (checkpoint,) = folder.glob("*.ckpt")
        assert seen == whole[:stop]


@pytest.mark.filterwarnings("ignore")
def test_the_checkpoint_holds_the_tokenizer(corpus, cache, tmp_path):
    data = prepared(corpus, cache)
    fit(data, callback=ModelCheckpoint(tmp_path, filename="one"), max_steps=3, limit_val_batches=0)
    (path,) = tmp_path.glob("*.ckpt")
    stored = torch.load(path, weights_only=True)["PretrainDataModule"]["tokenizer"]
    assert Tokenizer.from_str(stored).decode(Tokenizer.from_str(stored).encode("a model").ids) == "a model"


@pytest.mark.filterwarnings("ignore")
def test_overfitting_takes_the_same_batches_each_epoch(corpus, cache):
    seen = fit(prepared(corpus, cache), max_epochs=2, overfit_batches=3)
    assert seen[:3] == seen[3:]


def _fit_on_a_rank(rank, port, corpus, folder):
    place = {
        "WORLD_SIZE": 2,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in place.items()}
    seen = fit(build(corpus, folder / "cache"), max_steps=9, devices=2, strategy="ddp",
               plugins=[TorchElasticEnvironment()])  # fmt: skip
    torch.save(seen, folder / f"{rank}.pt")


def test_two_ranks_share_the_batches_of_one(corpus, tmp_path):
    on_ranks(_fit_on_a_rank, 2, free_port(), corpus, tmp_path)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    one = list(prepared(corpus, tmp_path / "cache", batch_size=6).train_dataloader())
    assert len(parts[0]) == len(parts[1]) == 9 > len(one)  # on into the second epoch
    for batch, left, right in zip(one, *parts, strict=False):
        inputs, labels = torch.tensor([left, right]).reshape(2, 2, 3, 36).transpose(0, 1)
        assert torch.equal(inputs.flatten(0, 1), batch["input_ids"])
        assert torch.equal(labels.flatten(0, 1), batch["labels"])
