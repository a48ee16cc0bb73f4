"""Folders on object storage: S3 and services that speak its protocol, Google Cloud Storage, Azure Blob Storage.

The client is obstore, which comes with litdata. Credentials and endpoints are those of the environment, as the storage's
own tools find them; a configuration holds none. Nothing here connects before the first call of a method.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from core.errors import ConfigError
from toolkit.bounded import MOST_BYTES

__all__ = ["SCHEMES", "ObjectFolder", "StoredObject", "require_storage_url"]

SCHEMES = ("s3", "gs", "azure", "az", "abfs", "abfss")
RETRIES, RETRY_S = 6, 120
"""How often a request is made again, within so many seconds: some 10 seconds, so that a wrong address is found soon."""
UPLOAD_RETRIES, UPLOAD_RETRY_S = 100, 300
"""The same while a run uploads: an outage of 5 minutes is waited out."""
LOOK_S, ANSWER_S = 1, 4
"""How often a request of a run that is to end is looked at, and within how many seconds the storage has to answer then."""
PART_BYTES, PARALLEL = 16 * 2**20, 4
"""How much of an object a request carries, and how many there are at a time: 64 MiB of memory."""
MOST_PARTS = 9_000
"""S3 takes 10,000 for an object."""

_LISTS = {"s3": "aws s3 ls", "gs": "gcloud storage ls"}
_COPIES = {
    "s3": "aws s3 sync {here} {url}",
    "gs": "gcloud storage rsync --recursive {here} {url}",
    "azure": "az storage blob upload-batch --source {here} (to {url})",
}
_KEYS = {
    "s3": "environment (AWS_ACCESS_KEY_ID, AWS_PROFILE...), ~/.aws, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the machine's account",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY or a managed identity",
}


@dataclass(frozen=True)
class StoredObject:
    """What a listing says of an object.

    Attributes:
        size: Bytes.
        modified_ns: When it was written, in nanoseconds since 1970, as `st_mtime_ns`.
        tag: The storage's mark of this content.
        version: Its number of this content, where it has one, as Google's generations.
    """

    size: int
    modified_ns: int
    tag: str
    version: str | None = None


def require_storage_url(url: str, option: str) -> str:
    """Returns a URL that names a folder on object storage, without slashes at its end.

    Raises:
        ConfigError: If it has another scheme, or names no bucket.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(
            f"{option} is {url}: there is no storage for {scheme}://.\n"
            f"Give a folder of this machine, or a URL with {known}."
        )
    bucket, *parts = rest.split("/")
    if not bucket or any(part in (".", "..") for part in parts):
        raise ConfigError(f"{option} is {url}: give bucket and folder, such as {scheme}://bucket/runs/first.")
    return "/".join([f"{scheme}://{bucket}", *filter(None, parts)])


class ObjectFolder:
    """A folder on object storage: the objects whose names begin with its URL.

    Every method raises a ConfigError that says what to do, after a bounded number of attempts.

    Args:
        url: Such as `s3://bucket/runs/first`.
        option: What the URL was given for, for messages.
        uploads: Whether an outage is waited out, as by a run that uploads.
        ending: Is set once the run is to end: `put`, `remove`, `look_up`, `level` and `below` then go on only as long as the
            storage answers. For threads without an event loop.
    """

    def __init__(
        self,
        url: str,
        option: str = "The URL",
        uploads: bool = False,
        ending: threading.Event | None = None,
    ) -> None:
        self.url, self._ending = require_storage_url(url, option), ending
        self._retries = (UPLOAD_RETRIES, UPLOAD_RETRY_S) if uploads else (RETRIES, RETRY_S)

    @cached_property
    def _store(self) -> Any:
        return self._opened(*self._retries, "5m")

    @cached_property
    def _hasty(self) -> Any:
        return self._opened(0, ANSWER_S, f"{ANSWER_S}s")

    def _opened(self, retries: int, seconds: int, timeout: str) -> Any:
        from obstore.store import from_url

        options: dict[str, Any] = {
            "client_options": {
                "allow_http": True,
                "timeout": timeout,
            },  # of an endpoint that is http:// itself
            "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds)},
        }
        if self.url.startswith("s3:"):
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
        elif self._family == "azure" and "@" not in self.url and not _account():
            raise PermissionError("AZURE_STORAGE_ACCOUNT_NAME is not set")
        elif self._family == "azure" and "@" not in self.url:
            options["config"] = {"account_name": _account()}
        return from_url(self.url, **options)

    @property
    def _family(self) -> str:
        scheme = self.url.partition(":")[0]
        return scheme if scheme in ("s3", "gs") else "azure"

    def copy_command(self, here: Path) -> str:
        """Returns the command of the storage's own tools that copies a folder of this machine there."""
        return _COPIES[self._family].format(here=shlex.quote(str(here)), url=self.url)

    def _done(self, now: Callable[[], Any], later: Callable[[], Awaitable[Any]]) -> Any:
        """Returns what a request returned; of its two forms the second can be ended in the middle."""
        return now() if self._ending is None else asyncio.run(self._while_answered(later, self._ending))

    async def _while_answered(self, later: Callable[[], Awaitable[Any]], ending: threading.Event) -> Any:
        request = asyncio.ensure_future(_awaited(later))
        while not (await asyncio.wait([request], timeout=LOOK_S))[0]:
            if ending.is_set() and not await self._answers():
                request.cancel()
                with suppress(asyncio.CancelledError):
                    await request
                raise ConnectionError("it does not answer, and the run is to end")
        return request.result()

    async def _answers(self) -> bool:
        import obstore
        from obstore.exceptions import BaseError, GenericError

        try:
            await asyncio.wait_for(_awaited(lambda: obstore.head_async(self._hasty, "complete")), ANSWER_S)
        except (GenericError, TimeoutError):
            return False
        except (BaseError, FileNotFoundError, PermissionError):
            pass  # an answer, too
        return True

    # -- reading ------------------------------------------------------------------------------------

    def level(self) -> tuple[dict[str, StoredObject], list[str]]:
        """Returns the objects directly in this folder by name, and the names of folders in it."""
        import obstore

        with self._explaining("read"):
            found = self._done(
                lambda: obstore.list_with_delimiter(self._store),
                lambda: obstore.list_with_delimiter_async(self._store),
            )
        objects = {self._name(item): _stored(item) for item in found["objects"]}
        return objects, [str(prefix).rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]

    def below(self, folder: str) -> dict[str, StoredObject]:
        """Returns all objects in a folder within this one, by their names there."""
        import obstore

        def stream() -> Any:
            return obstore.list(self._store, prefix=folder)

        with self._explaining("read", folder):
            found = self._done(lambda: stream().collect(), lambda: stream().collect_async())
        return {item["path"].removeprefix(f"{folder}/"): _stored(item) for item in found}

    def look_up(self, name: str) -> StoredObject | None:
        """Returns what the storage says of an object, or None if there is none."""
        import obstore

        with self._explaining("read", name):
            try:
                return _stored(
                    self._done(
                        lambda: obstore.head(self._store, name), lambda: obstore.head_async(self._store, name)
                    )
                )
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def read(self, name: str, most: int = MOST_BYTES) -> bytes:
        """Returns the content of a small object.

        Raises:
            ConfigError: If there is none, or it has more than `most` bytes.
        """
        import obstore

        with self._explaining("read", name):
            found = obstore.get(self._store, name)
            if found.meta["size"] > most:
                raise ConfigError(
                    f"{self.url}/{name} has more than {most:,} bytes: it is not what it should be."
                )
            return bytes(found.bytes())

    def fetch(self, name: str, stream: IO[bytes], size: int) -> None:
        """Writes an object of that many bytes into a file that is open, in parts at the same time."""
        import obstore

        def part(start: int) -> None:
            end = min(start + PART_BYTES, size)
            content = memoryview(obstore.get_range(self._store, name, start=start, end=end))
            while content:
                written = os.pwrite(stream.fileno(), content, start)
                start, content = start + written, content[written:]

        with self._explaining("read", name), ThreadPoolExecutor(PARALLEL) as threads:
            stream.truncate(size)
            list(threads.map(part, range(0, size, PART_BYTES)))

    # -- writing ------------------------------------------------------------------------------------

    def put(self, name: str, content: bytes | Path) -> None:
        """Writes an object, from memory or from a file in parts; it is there whole, or not at all."""
        import obstore

        size = content.stat().st_size if isinstance(content, Path) else len(content)
        part = max(PART_BYTES, -(-size // MOST_PARTS))
        with self._explaining("written", name):
            given = (self._store, name, content)
            self._done(
                lambda: obstore.put(*given, chunk_size=part, max_concurrency=PARALLEL),
                lambda: obstore.put_async(*given, chunk_size=part, max_concurrency=PARALLEL),
            )

    def put_if(self, name: str, content: bytes, found: StoredObject | None) -> bool:
        """Writes a small object if it is as it was looked up, or if there was and is none; returns whether it did.

        A service that has no conditional writes does so in any case.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        version = {"version": found.version} if found and found.version else {}
        known: Any = "create" if found is None else {"e_tag": found.tag, **version}
        with self._explaining("written", name):
            try:
                obstore.put(self._store, name, content, mode=known, use_multipart=False)
            except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
                if "NoSuchBucket" in str(error):
                    raise
                return False
            except BaseError as error:
                if "NotImplemented" not in str(error):
                    raise
                obstore.put(self._store, name, content, use_multipart=False)
            return True

    def remove(self, names: Sequence[str]) -> None:
        """Deletes objects, also where some are not there."""
        import obstore

        if not names:
            return

        def delete(some: list[str]) -> None:
            try:
                self._done(
                    lambda: obstore.delete(self._store, some), lambda: obstore.delete_async(self._store, some)
                )
            except FileNotFoundError as error:  # Google says so of an object, and leaves those behind it
                if "NoSuchBucket" in str(error):
                    raise

        with self._explaining("removed", names[0]), ThreadPoolExecutor(PARALLEL) as threads:
            groups = [list(names)] if self._family == "s3" else [[name] for name in names]
            list(threads.map(delete, groups))

    # -- errors -------------------------------------------------------------------------------------

    @contextmanager
    def _explaining(self, action: str, name: str = "") -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of a disk of this machine
                raise
            raise ConfigError(self._explanation(action, name, error)) from error
        except Exception as error:
            if not type(error).__module__.startswith("botocore"):
                raise
            raise ConfigError(self._explanation(action, name, error)) from error

    def _explanation(self, action: str, name: str, error: Exception) -> str:
        said, family = str(error), self._family
        code = re.search(r"<Code>([^<]{1,80})</Code>", said)
        reason = code[1] if code else " ".join(said.partition("Debug source")[0].split())[:240]
        kind = type(error).__name__ + said
        lister = f"`{_LISTS[family]} {self.url}/`" if family in _LISTS else "`az storage blob list`"
        if "session.get_credentials" in said:
            reason = "there are no credentials"
        if any(
            word in kind
            for word in ("redential", "Unauthenticated", "Permission", "AccessKeyId", "Signature")
        ):
            hint = f"Credentials come from: {_KEYS[family]}.\nSet them, and try {lister}."
        elif any(word in said for word in ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")):
            hint = f"There is no such bucket: make it, or correct the URL. See {lister}."
        elif isinstance(error, FileNotFoundError):
            reason, hint = "there is no such object", f"See what there is: {lister}."
        elif "redirect" in said.lower():
            hint = "The bucket is in another region: set AWS_REGION."
        else:
            hint = "Check the URL and the network"
            hint += "; for another endpoint than Amazon's, AWS_ENDPOINT_URL." if family == "s3" else "."
        return f"{self.url}{name and '/' + name} cannot be {action}: {reason}.\n{hint}"

    def _name(self, item: Any) -> str:
        return str(item["path"]).rpartition("/")[2]


async def _awaited(request: Callable[[], Awaitable[Any]]) -> Any:
    return await request()  # obstore makes its futures within a loop


def _account() -> str | None:
    return os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT")


def _stored(item: Any) -> StoredObject:
    written: datetime = item["last_modified"]
    seconds = int(written.timestamp())
    modified_ns = seconds * 10**9 + written.microsecond * 1000
    return StoredObject(item["size"], modified_ns, str(item["e_tag"]), item["version"])
