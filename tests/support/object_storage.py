"""A local S3 server (moto), in a process of its own, and prepared folders on it."""

import socket
import subprocess
import sys
import time
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
