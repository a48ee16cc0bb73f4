"""Folders on object storage: what is written is read, and every error says in three lines what to do."""

import os
from collections import Counter

import pytest
from obstore.store import LocalStore

from core.errors import ConfigError
from tests.support.object_storage import KEYS, answer_with, answering
from toolkit import object_storage
from toolkit.object_storage import ObjectFolder, require_storage_url

DENIED = (
    b"<Error><Code>InvalidAccessKeyId</Code><Message>The key does not exist in our records.</Message></Error>"
)


@pytest.fixture
def found(storage, monkeypatch):
    """The storage, with its credentials in the environment."""
    for name, value in storage.environment.items():
        monkeypatch.setenv(name, value)
    return storage


def test_objects_come_back_and_go(found, tmp_path, monkeypatch):
    monkeypatch.setattr(object_storage, "PART_BYTES", 5 << 20)  # the least that S3 takes
    folder, content = ObjectFolder("s3://corpora//objects/"), os.urandom((11 << 20) + 3)
    (tmp_path / "large").write_bytes(content)
    folder.put("large", tmp_path / "large")
    folder.put("inner/small", b"small")
    objects, folders = folder.level()
    assert ({name: item.size for name, item in objects.items()}, folders) == (
        {"large": len(content)},
        ["inner"],
    )
    assert folder.below("inner")["small"] == folder.look_up("inner/small")
    assert folder.read("inner/small") == b"small"
    with open(tmp_path / "copy", "w+b") as stream:
        folder.fetch("large", stream, len(content))
    assert (tmp_path / "copy").read_bytes() == content
    with pytest.raises(ConfigError, match="more than 3 bytes"):
        folder.read("inner/small", 3)
    folder.remove(["large", "never-there"])
    assert folder.look_up("large") is None
    assert folder.level() == ({}, ["inner"])


def test_what_is_not_there_does_not_keep_what_is(tmp_path):
    """S3 says nothing of what is not there; Google says so and leaves those behind it, as this store does."""
    folder = ObjectFolder("gs://bucket/run")
    folder._store = LocalStore(tmp_path)
    names = [f"{number:03d}" for number in range(100)]
    for name in names[50:]:
        (tmp_path / name).write_bytes(b"x")
    folder.remove(names)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///tmp/x", "there is no storage for file://"),
        ("s4://bucket/x", "there is no storage for s4://."),
        ("s3:///x", "give bucket and folder"),
        ("s3://bucket/../other", "give bucket and folder"),
    ],
)
def test_what_is_no_folder_on_a_storage(url, message):
    with pytest.raises(ConfigError) as error:
        require_storage_url(url, "dirpath")
    assert message in str(error.value)


def three_lines(url="s3://nowhere/run"):
    with pytest.raises(ConfigError) as error:
        ObjectFolder(url).put("name", b"content")
    lines = str(error.value).splitlines()
    assert len(lines) <= 3
    assert lines[0].startswith(f"{url}/name cannot be written: ")
    return lines[0].rpartition(": ")[2], " ".join(lines[1:])


def test_a_bucket_that_is_not_there(found):
    assert three_lines() == (
        "NoSuchBucket.",
        "There is no such bucket: make it, or correct the URL. See `aws s3 ls s3://nowhere/run/`.",
    )


def test_no_credentials(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in [name for name in os.environ if name.startswith("AWS_") and "METADATA" not in name]:
        monkeypatch.delenv(name)
    reason, hint = three_lines()
    assert reason == "there are no credentials."
    assert "~/.aws" in hint
    assert "try `aws s3 ls s3://nowhere/run/`" in hint


def test_no_account_at_azure(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    reason, hint = three_lines("azure://container/run")
    assert reason == "AZURE_STORAGE_ACCOUNT_NAME is not set."
    assert "AZURE_STORAGE_ACCOUNT_KEY" in hint


@pytest.mark.parametrize("status", [403, 503])
def test_wrong_credentials_and_an_outage(status, monkeypatch):
    """Credentials are refused at once; an outage is waited out, with a bound."""
    monkeypatch.setattr(object_storage, "RETRIES", 2)
    requests = Counter()

    def answer(handler, body):
        requests[handler.command] += 1
        answer_with(handler, status, DENIED if status == 403 else b"")

    with answering(answer) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["aws_access_key_id"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        reason, hint = three_lines()
    assert requests == {"PUT": 1 if status == 403 else 3}
    assert (reason == "InvalidAccessKeyId.") == (status == 403)
    assert ("Credentials come from" in hint) == (status == 403)
    assert ("AWS_ENDPOINT_URL" in hint) == (status == 503)
