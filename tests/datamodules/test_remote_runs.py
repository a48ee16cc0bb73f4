"""The command `fit` on a folder on object storage."""

import csv

import pytest

from conformance.runs import run
from core.__main__ import main
from datamodules.preparation.writers.token_shards import TokenShards
from datamodules.remote.remote_folder import open_remote, remote_of
from tests.support.corpus import corpus, prepare


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    return prepare(corpus(folder / "source", documents=60), folder / "out", writer=TokenShards(500))


@pytest.fixture
def config(tiny, write_yaml, storage, tmp_path):
    """Writes a tiny run on a source."""

    def write(source, **data):
        tiny["trainer"] |= {
            "default_root_dir": str(tmp_path / "run"),
            "log_every_n_steps": 1,
            "logger": [{"class_path": "MetricsCSV", "init_args": {"save_dir": "${run_folder}"}}],
            "val_check_interval": 6,
            "check_val_every_n_epoch": None,
        }
        tiny["model"]["network"]["init_args"]["vocab_size"] = 320
        stages = {
            "reader": "TextDocuments",
            "tokenizer": "BPETokenizer",
            "writer": "TokenShards",
            "packing": "BestFit",
        }
        options = {
            "source": str(source),
            "cache_dir": str(tmp_path / "cache"),
            "sequence_length": 16,
            "batch_size": 4,
            "storage_options": storage.options,
        }
        tiny["data"] = {"class_path": "PretrainDataModule", "init_args": stages | options | data}
        return write_yaml("run.yaml", tiny)

    return write


def figures(folder):
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.ci
def test_the_figures_are_those_of_a_copy_here(local, storage, config, tmp_path):
    url = storage.upload(local, "fit")
    for source in (local, url):
        assert main(["fit", f"--config={config(source)}"]) == 0
    one, other = figures(tmp_path / "run"), figures(tmp_path / "run-2")
    assert one == other
    assert len(one) >= 6


@pytest.mark.ci
def test_two_ranks_share_a_cache_that_is_too_small(local, storage, config, tmp_path):
    url = storage.upload(local, "ranks")
    less = ["--trainer.max_steps=4", "--trainer.limit_val_batches=0"]
    assert main(["fit", f"--config={config(local)}", *less]) == 0
    path = config(url, batch_size=2, num_workers=1, cache_bytes=2000)
    words = ["fit", f"--config={path}", "--trainer.devices=2", "--trainer.strategy=ddp", *less]
    done = run(words, tmp_path, ranks=2)
    assert done.code == 0, done.error_text
    losses = [
        [float(row["train/loss"]) for row in figures(tmp_path / name) if row["train/loss"]]
        for name in ("run", "run-2")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # float32 sums in another order
    # While chunks are mapped or downloaded they stay, however many; nothing holds what the ranks left behind.
    copy = open_remote(url, tmp_path / "cache", 2000, storage.options)
    names = [path.relative_to(local).as_posix() for path in local.rglob("*.bin")]
    for name in names:
        remote_of(copy).fetch(name)
    kept = [path.stat().st_size for path in copy.rglob("*.bin")]
    assert 2000 - max(kept) < sum(kept) <= 2000 < sum((local / name).stat().st_size for name in names)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.ci), 1])
def test_what_is_damaged_ends_the_run_in_a_few_lines(local, storage, config, capsys, workers):
    url = storage.upload(local, f"ends-{workers}")
    key = f"ends-{workers}/train/chunk-0-1.bin"
    storage.put(key, storage.read(key)[:-4])
    assert main(["fit", f"--config={config(url, num_workers=workers, shuffle=False)}"]) == 2
    message = capsys.readouterr().err
    assert f"{url}/train/chunk-0-1.bin is damaged: it has " in message
    assert "Traceback" not in message
    assert len(message.splitlines()) <= 10


def test_a_network_that_is_too_small_for_it(local, storage, config, capsys):
    url = storage.upload(local, "vocabulary")
    assert main(["fit", f"--config={config(url)}", "--model.network.vocab_size=200"]) == 2
    message = capsys.readouterr().err
    assert "vocab_size is 200" in message
    assert len(message.splitlines()) <= 10


@pytest.mark.ci
def test_a_bucket_that_is_not_there(config, capsys):
    assert main(["fit", f"--config={config('s3://nowhere-at-all/corpus')}"]) == 2
    message = capsys.readouterr().err
    assert "s3://nowhere-at-all/corpus/manifest.json cannot be read" in message
    assert len(message.splitlines()) <= 10


def test_commands_that_need_a_folder_here_say_so(capsys):
    for words in (["verify-data", "s3://corpora/fit"], ["inspect-data", "s3://corpora/fit"]):
        assert main(words) == 2
        assert "aws s3 sync s3://corpora/fit DIR" in capsys.readouterr().err
    words = ["prepare", "--config=data/text", "--output=s3://corpora/new"]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "the manifest last" in message
    assert "aws s3 cp prepared/corpus/manifest.json s3://corpora/new/manifest.json" in message
