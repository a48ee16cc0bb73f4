"""Web archives as crawlers write them, by FastWARC's own writer."""

import gzip
import io

import zstandard

PACK = {"warc": bytes, "gz": lambda data: gzip.compress(data, mtime=0), "zst": zstandard.compress}
DATE = "2024-01-02T03:04:05Z"


def record(kind, content, url="http://example.org/", content_type=None, **headers):
    """Returns the bytes of a record with its digest."""
    from fastwarc.warc import WarcRecord, WarcRecordType

    made = WarcRecord()
    made.init_headers(getattr(WarcRecordType, kind), f"urn:uuid:{abs(hash(url)) % 10**9}".encode())
    made.headers["WARC-Target-URI"] = url
    made.headers["WARC-Date"] = DATE
    if content_type:
        made.headers["Content-Type"] = content_type
    for name, value in headers.items():
        made.headers[name.replace("_", "-")] = value
    made.set_bytes_content(content)
    out = io.BytesIO()
    made.write(out, checksum_data=True)
    return out.getvalue()


def response(
    body, url="http://example.org/", status="200 OK", content_type="text/html; charset=utf-8", more=()
):
    """Returns the bytes of a response record."""
    body = body if isinstance(body, bytes) else body.encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", *more, "", ""]
    return record("response", "\r\n".join(lines).encode() + body, url, "application/http; msgtype=response")


def page(text, lang="en"):
    """Returns a page with this text."""
    return f'<!doctype html><html lang="{lang}"><title>T</title><nav><a href="/">Home</a></nav><main><p>{text}</p></main></html>'


def write_archive(path, records):
    """Writes records, each a member of its own; returns the offsets where they begin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    members = [PACK[path.name.rpartition(".")[2].replace("wet", "warc")](one) for one in records]
    path.write_bytes(b"".join(members))
    return [sum(map(len, members[:number])) for number in range(len(members) + 1)]
