"""A local S3 server (moto), in a process of its own, and prepared folders on it."""

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3

from conformance.runs import free_port

KEYS = {"aws_access_key_id": "anybody", "aws_secret_access_key": "secret", "region_name": "us-east-1"}


class Storage:
    """A bucket on a server of its own; what was asked for is in a log."""

    bucket = "corpora"

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.options = {"endpoint_url": self.url, **KEYS}
        self.log = folder / "requests.log"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 300
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < end, "the server does not begin"
                time.sleep(0.1)
        self.client = boto3.client("s3", **self.options)
        self.client.create_bucket(Bucket=self.bucket)

    def upload(self, folder: Path, prefix: str) -> str:
        """Uploads a folder; returns its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://{self.bucket}/{prefix}"

    def put(self, key: str, content: bytes) -> None:
        """Writes an object."""
        self.client.put_object(Bucket=self.bucket, Key=key, Body=content)

    def read(self, key: str) -> bytes:
        """Reads an object."""
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def downloads(self, prefix: str) -> list[str]:
        """Returns the names below a prefix that were asked for whole, in their order."""
        lines = self.log.read_text().splitlines()
        start = f"GET /{self.bucket}/{prefix}/"
        return [line.partition(start)[2].split()[0] for line in lines if start in line and " 200 " in line]

    def close(self) -> None:
        """Ends the server."""
        self.process.terminate()
        self.process.wait()

    @property
    def environment(self) -> dict[str, str]:
        """What the storage's own tools look for."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEYS["aws_access_key_id"],
            "AWS_SECRET_ACCESS_KEY": KEYS["aws_secret_access_key"],
            "AWS_REGION": KEYS["region_name"],
        }

    def keys(self, prefix: str) -> list[str]:
        """Returns the names below a prefix."""
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=f"{prefix}/").get("Contents", [])
        return [item["Key"].removeprefix(f"{prefix}/") for item in found]


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler, bytes], None]) -> Iterator[str]:
    """Yields the URL of a server that answers every request by a call with its handler and body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def answer_with(handler: BaseHTTPRequestHandler, status: int, content: bytes = b"") -> None:
    """Answers a request with a status."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def passed_on(handler: BaseHTTPRequestHandler, body: bytes, url: str) -> None:
    """Answers a request as the server at a URL does."""
    place = url.removeprefix("http://")
    connection = http.client.HTTPConnection(place, timeout=60)
    headers = {k: v for k, v in handler.headers.items() if k.lower() not in ("host", "connection")}
    connection.request(handler.command, handler.path, body, {**headers, "Host": place})
    found = connection.getresponse()
    content = found.read()
    handler.send_response(found.status)
    for name, value in found.getheaders():
        if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
            handler.send_header(name, value)
    length = found.getheader("Content-Length") if handler.command == "HEAD" else str(len(content))
    handler.send_header("Content-Length", length or "0")
    handler.end_headers()
    handler.wfile.write(content)
    connection.close()


def two_ranks() -> list[dict[str, str]]:
    """Returns what torchrun sets for each of two ranks."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "uploads"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
