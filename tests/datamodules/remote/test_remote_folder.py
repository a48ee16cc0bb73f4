"""The cache of remote folders: what is fetched, kept, deleted, and shared; and what is wrong with a storage."""

import json
import os
import pickle
import random
import shutil
import signal
import time
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from core.errors import ConfigError
from datamodules.remote import remote_folder
from datamodules.remote.remote_folder import open_remote, remote_of

SIZE, COUNT = 10_000, 12
FIGURES = {"vocab_size": 2, "end_of_text_id": 0, "train_tokens": 1, "unigram_loss": 1.0}


def chunk(number):
    return np.random.default_rng(number).bytes(SIZE)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A folder of 12 chunks of 10,000 bytes; what they hold is nobody's concern here."""
    folder = tmp_path_factory.mktemp("whole")
    contents = {f"train/chunk-0-{number}.bin": chunk(number) for number in range(COUNT)}
    contents |= {"tokenizer.json": b"{}", "train/index.json": b"{}", "validation/index.json": b"{}"}
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    files = {n: {"bytes": len(c), "sha256": sha256(c).hexdigest()} for n, c in contents.items()}
    (folder / "manifest.json").write_text(json.dumps(FIGURES | {"files": files}))
    return folder


@pytest.fixture(scope="session")
def url(storage, whole):
    return storage.upload(whole, "cache")


def opened(url, cache, storage, limit=3 * SIZE, **options):
    return remote_of(open_remote(url, Path(cache), limit, storage.options | options))


def name(number):
    return f"train/chunk-0-{number}.bin"


def kept(remote):
    return sorted(path.name for path in (remote.folder / "train").glob("*.bin"))


def names(*numbers):
    return sorted(f"chunk-0-{number}.bin" for number in numbers)


# Keeping and deleting ------------------------------------------------------------------------------------


def test_what_says_what_there_is_comes_first_and_no_chunk(url, tmp_path, storage, whole):
    remote = opened(url, tmp_path, storage)
    found = {str(p.relative_to(remote.folder)) for p in remote.folder.rglob("*") if p.is_file()}
    assert found == {"manifest.json", "tokenizer.json", "train/index.json", "validation/index.json"}
    assert all((remote.folder / name).read_bytes() == (whole / name).read_bytes() for name in found)


def test_the_chunks_used_longest_ago_are_deleted(url, tmp_path, storage):
    remote = opened(url, tmp_path, storage)
    for number in (0, 1, 2, 0, 3):
        assert remote.fetch(name(number)).read_bytes() == chunk(number)
        time.sleep(0.01)
    assert kept(remote) == names(0, 2, 3)
    remote.fetch(name(4))
    assert kept(remote) == names(0, 3, 4)


def test_a_mapped_chunk_stays_however_little_room_there_is(url, tmp_path, storage):
    remote = opened(url, tmp_path, storage, limit=1)
    mapped = remote.map(name(0)).raw[4:]
    for number in (1, 2):
        remote.fetch(name(number))
    assert kept(remote) == names(0, 2)
    assert mapped.tobytes() == chunk(0)[4:]
    del mapped
    remote.fetch(name(3))
    assert kept(remote) == names(3)


def test_folders_share_the_limit_and_changed_data_is_another_copy(tmp_path, storage, whole):
    one = opened(storage.upload(whole, "shared"), tmp_path, storage)
    for number in range(3):
        one.fetch(name(number))
    manifest = json.loads((whole / "manifest.json").read_text())
    storage.put("shared/manifest.json", json.dumps({"new": True, **manifest}).encode())
    two = opened(f"s3://{storage.bucket}/shared", tmp_path, storage)
    assert two.folder != one.folder
    time.sleep(0.01)
    two.fetch(name(5))
    assert kept(one) == names(1, 2)
    assert kept(two) == names(5)


def test_too_little_room_is_said(url, tmp_path, storage, capsys):
    opened(url, tmp_path, storage, limit=SIZE * COUNT)
    assert capsys.readouterr().err == ""
    opened(url, tmp_path, storage)
    assert f"{url} has 120 kB of shards, the cache 30.0 kB (data.cache_bytes)" in capsys.readouterr().err


def test_by_default_three_quarters_of_what_is_free(url, tmp_path, storage):
    free = shutil.disk_usage(tmp_path).free
    assert opened(url, tmp_path, storage, limit=None).limit == pytest.approx(free * 3 / 4, rel=0.1)


def test_a_later_run_finds_what_is_there(url, tmp_path, storage):
    first = opened(url, tmp_path, storage)
    first.fetch(name(7))
    before = len(storage.downloads("cache"))
    again = pickle.loads(pickle.dumps(opened(url, tmp_path, storage)))
    assert again.map(name(7)).raw.tobytes() == chunk(7)
    assert storage.downloads("cache")[before:] == ["manifest.json"]


def test_the_first_bytes_alone(url, tmp_path, storage):
    remote = opened(url, tmp_path, storage)
    assert remote.fetch_head(name(1), 100).read_bytes() == chunk(1)[:100]
    assert kept(remote) == []
    remote.fetch(name(2))
    storage_is_not_asked = opened(url, tmp_path, storage)
    storage_is_not_asked.options = {"endpoint_url": "http://127.0.0.1:1"}
    assert storage_is_not_asked.fetch_head(name(2), 100).read_bytes() == chunk(2)[:100]
    assert storage_is_not_asked.fetch_head(name(1), 100).read_bytes() == chunk(1)[:100]


@pytest.mark.ci
def test_what_is_downloaded_in_parts_comes_in_order(whole, tmp_path, storage):
    content = np.random.default_rng(1).bytes(30 << 20)
    manifest = json.loads((whole / "manifest.json").read_text())
    manifest["files"]["train/large.bin"] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    url = storage.upload(whole, "large")
    storage.put("large/train/large.bin", content)
    storage.put("large/manifest.json", json.dumps(manifest).encode())
    before = len(storage.log.read_text().splitlines())
    remote = opened(url, tmp_path, storage, limit=1 << 30)
    assert remote.map("train/large.bin").raw.tobytes() == content
    asked = [line for line in storage.log.read_text().splitlines()[before:] if "large.bin" in line]
    assert sum(" 206 " in line for line in asked) > 2
    storage.put("large/train/large.bin", content[:-9])
    (remote.folder / "train" / "large.bin").unlink()
    said = complaint(lambda: remote.fetch("train/large.bin"))
    assert "it has 31,457,271 bytes, the manifest says 31,457,280" in said


def test_a_slow_folder_is_read_through_the_cache(whole, tmp_path, storage):
    remote = remote_of(open_remote(f"local:{whole}", tmp_path, 2 * SIZE, None))
    for number in range(4):
        assert remote.map(name(number)).raw.tobytes() == chunk(number)
    assert remote.fetch_head(name(8), 8).read_bytes() == chunk(8)[:8]
    assert len(kept(remote)) == 2
    assert not list(remote.folder.glob("tmp*"))


# Many at once --------------------------------------------------------------------------------------------


def _read(url, cache, options, limit, seed, queue):
    remote = remote_of(open_remote(url, Path(cache), limit, options))
    rng, most = random.Random(seed), 0
    for _ in range(150):
        number = rng.randrange(COUNT)
        if remote.map(name(number)).raw.tobytes() != chunk(number):
            queue.put("wrong")
        found = remote_folder._cached(remote.folder.parent)
        most = max(most, sum(size for _, size, path in found if path.suffix == ".bin"))
    queue.put(most)


@pytest.mark.ci
@pytest.mark.parametrize("limit", [9 * SIZE, 100 * SIZE])
def test_processes_share_the_cache(url, tmp_path, storage, limit):
    context = get_context("fork")
    queue = context.Queue()
    before = len(storage.downloads("cache"))
    readers = [
        context.Process(target=_read, args=(url, tmp_path, storage.options, limit, seed, queue))
        for seed in range(4)
    ]
    for reader in readers:
        reader.start()
    found = [queue.get(timeout=120) for _ in readers]
    for reader in readers:
        reader.join()
    assert "wrong" not in found
    assert max(found) <= min(limit, COUNT * SIZE)
    chunks = [n for n in storage.downloads("cache")[before:] if "chunk" in n]
    if limit > COUNT * SIZE:
        assert sorted(chunks) == sorted(map(name, range(COUNT)))  # each once
    remote = opened(url, tmp_path, storage, limit=limit)
    assert not list(remote.folder.rglob("*.tmp"))


def test_a_chunk_that_takes_its_name_between_two_looks_is_counted(tmp_path, monkeypatch):
    done, under_way = (
        tmp_path / "a" / "train" / "chunk-0-0.bin",
        tmp_path / "a" / "train" / "chunk-0-1.bin.tmp",
    )
    done.parent.mkdir(parents=True)
    for path in (done, under_way):
        path.write_bytes(b"1234")
    stat = Path.stat

    def published(path, **options):
        if path == under_way and under_way in list(under_way.parent.iterdir()):
            path.rename(path.with_suffix(""))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", published)
    assert [path.name for _, _, path in remote_folder._cached(tmp_path)] == ["chunk-0-0.bin", "chunk-0-1.bin"]


def _map_without_end(url, cache, options, ready):
    remote = remote_of(open_remote(url, Path(cache), 2 * SIZE, options))
    ready.set()
    for number in range(10**6):
        remote.map(name(number % 12))


def test_a_killed_process_leaves_nothing_that_misleads(url, tmp_path, storage):
    context = get_context("fork")
    rng = random.Random(0)
    for _ in range(4):
        ready = context.Event()
        words = (url, tmp_path, storage.options, ready)
        child = context.Process(target=_map_without_end, args=words, daemon=True)
        child.start()
        assert ready.wait(240)
        time.sleep(rng.uniform(0.0, 0.1))
        child.kill()
        child.join()
    remote = opened(url, tmp_path, storage, limit=2 * SIZE)
    (remote.folder / "train" / "chunk-0-11.bin.tmp").write_bytes(b"what came before the end" * 1000)
    for number in range(COUNT):
        assert remote.map(name(number)).raw.tobytes() == chunk(number)
    assert len(kept(remote)) <= 2
    assert not list(remote.folder.rglob("*.tmp"))


# What is wrong -------------------------------------------------------------------------------------------


def complaint(call):
    with pytest.raises(ConfigError) as caught:
        call()
    assert len(str(caught.value).splitlines()) <= 4
    return str(caught.value)


@pytest.fixture
def damaged(storage, whole, request):
    """A folder of its own on the storage."""
    return storage.upload(whole, request.node.name.replace("[", "-").replace("]", ""))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:-7], "it has 9,993 bytes, the manifest says 10,000"),
        (lambda content: content + b"x", "it has 10,001 bytes, the manifest says 10,000"),
        (lambda content: bytes([content[0] ^ 1]) + content[1:], r"its content is not what was prepared (SHA-256)"),
        (lambda content: b"", "it has 0 bytes"),
    ],
)  # fmt: skip
def test_a_damaged_chunk_is_named_and_not_kept(damaged, tmp_path, storage, change, reason):
    key = damaged.removeprefix(f"s3://{storage.bucket}/") + "/" + name(3)
    storage.put(key, change(storage.read(key)))
    remote = opened(damaged, tmp_path, storage)
    said = complaint(lambda: remote.fetch(name(3)))
    assert f"{damaged}/{name(3)} is damaged: {reason}" in said
    assert kept(remote) == []
    assert not list(remote.folder.rglob("*.tmp"))
    storage.put(key, chunk(3))
    assert remote.map(name(3)).raw.tobytes() == chunk(3)


def test_missing_files_and_buckets(damaged, tmp_path, storage):
    remote = opened(damaged, tmp_path, storage)
    prefix = damaged.removeprefix(f"s3://{storage.bucket}/")
    for missing in (name(3), "manifest.json"):
        storage.client.delete_object(Bucket=storage.bucket, Key=f"{prefix}/{missing}")
    said = complaint(lambda: remote.fetch(name(3)))
    assert f"{damaged}/{name(3)} cannot be read" in said
    assert "There is no such file" in said
    for url in (damaged, "s3://no-such-bucket/corpus"):
        said = complaint(lambda url=url: opened(url, tmp_path, storage))
        assert f"{url}/manifest.json cannot be read" in said
        assert "no such bucket" in said
        assert "upload it last" in said


def test_nobody_answers_and_nobody_is_known(url, tmp_path, storage, monkeypatch):
    few = {"config": {"retries": {"max_attempts": 1}}}
    said = complaint(lambda: opened(url, tmp_path, storage, endpoint_url="http://127.0.0.1:1", **few))
    assert "EndpointConnectionError" in said
    assert "data.storage_options" in said
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    anonymous = {"endpoint_url": storage.url, "region_name": "us-east-1"}
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    said = complaint(lambda: open_remote(url, tmp_path, None, anonymous))
    assert "NoCredentialsError" in said
    assert "Credentials come from" in said
    said = complaint(lambda: opened(url, tmp_path, storage, endpont_url="x"))
    assert "endpont_url" in said


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"files": {}}',
        *(json.dumps(FIGURES | {"files": files}).encode() for files in ({}, {"tokenizer.json": 3}, [1])),
        b"[" * 100_000,
    ],
)
def test_a_damaged_manifest_is_named(damaged, tmp_path, storage, content):
    storage.put(damaged.removeprefix(f"s3://{storage.bucket}/") + "/manifest.json", content)
    said = complaint(lambda: opened(damaged, tmp_path, storage))
    assert f"{damaged}/manifest.json is damaged" in said


def test_paths_outside_the_folder_are_refused_before_anything_is_fetched(damaged, whole, tmp_path, storage):
    manifest = json.loads((whole / "manifest.json").read_text())
    known = manifest["files"]["tokenizer.json"]
    for outside in ("../../x", "/etc/passwd", "train/../../x", "train//x", ".", "train\\x", "a\x1b[31m", ""):
        content = json.dumps(manifest | {"files": manifest["files"] | {outside: known}}).encode()
        storage.put(damaged.removeprefix(f"s3://{storage.bucket}/") + "/manifest.json", content)
        assert "is no path inside the folder" in complaint(lambda: opened(damaged, tmp_path, storage))
    assert not list(tmp_path.rglob("*"))


def test_a_storage_that_sends_more_than_was_announced(damaged, whole, tmp_path, storage, monkeypatch):
    monkeypatch.setattr(remote_folder, "_MORE", 100)
    remote = opened(damaged, tmp_path, storage)
    prefix = damaged.removeprefix(f"s3://{storage.bucket}/")
    storage.put(f"{prefix}/{name(3)}", chunk(3) + bytes(10_000))
    assert "there are more than 10,100 bytes" in complaint(lambda: remote.fetch(name(3)))
    assert not list(remote.folder.rglob("*.tmp"))
    monkeypatch.setattr(remote_folder, "MOST_BYTES", 100)
    assert "there are more than 100 bytes" in complaint(lambda: opened(damaged, tmp_path, storage))


@pytest.mark.timeout(60)
def test_a_slow_folder_with_pipes_devices_and_links(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "slow")
    remote = remote_of(open_remote(f"local:{folder}", tmp_path / "cache", 2 * SIZE, None))
    for number, place in enumerate((lambda p: os.mkfifo(p), lambda p: p.symlink_to("/dev/zero"))):
        path = folder / name(number)
        path.unlink()
        place(path)
        said = complaint(lambda number=number: remote.fetch(name(number)))
        assert ("a named pipe" in said) or ("a symbolic link leads out of the folder" in said)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert "a named pipe" in complaint(lambda: open_remote(f"local:{folder}", tmp_path / "cache", None, None))


def test_a_cache_that_cannot_be_written(url, tmp_path, storage):
    (tmp_path / "file").write_text("")
    said = complaint(lambda: opened(url, tmp_path / "file", storage))
    assert str(tmp_path / "file") in said
    assert "data.cache_dir" in said
    assert "it must be at least 1" in complaint(lambda: opened(url, tmp_path, storage, limit=0))


@pytest.mark.ci
def test_a_full_disk(url, tmp_path, storage):
    resource = pytest.importorskip("resource")
    remote = opened(url, tmp_path, storage)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
    try:
        said = complaint(lambda: remote.fetch(name(0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert os.strerror(27) in said
    assert "data.cache_bytes" in said
    assert kept(remote) == []
