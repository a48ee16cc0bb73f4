"""Prints how many MB of dumps and source code a core reads in a second, and how fast simple scripts do, in turn.

    python -m tests.benchmarks.source_readers

StackExchangeDump beside ElementTree and BeautifulSoup, as The Pile's script has them, with all posts in memory; SourceCode
beside reading and decoding the same files; CodeQuality beside its rules written with numpy, as in CodeParrot's script. The
dump is drawn from Python's help, the code is Python's library. Times are CPU seconds.
"""

from __future__ import annotations

import argparse
import html
import random
import statistics
import sysconfig
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow

from datamodules.preparation.readers import source_files
from datamodules.preparation.readers.source_code import SourceCode
from datamodules.preparation.readers.stack_exchange_dump import StackExchangeDump
from datamodules.preparation.transforms.code_quality import CodeQuality
from tests.support.corpus import TOPICS
from tests.support.license_texts import MIT
from tests.support.stack_exchange import answer, posts, question
from toolkit.arrow_columns import strings

Work = Callable[[], Any]


def main() -> None:
    """Prints a line for each comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--posts", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        dump = Path(name, "ai.stackexchange.com", "Posts.xml")
        dump.parent.mkdir()
        dump.write_bytes(posts(drawn(options.posts)))
        source_files.LEAST = 1 << 40  # one task
        print("| reader | MB | MB/s | simple script MB/s | ratio |\n| --- | --- | --- | --- | --- |")
        whole = StackExchangeDump(name)
        report("StackExchangeDump", size_of(dump), lambda: read(whole), lambda: parsed(dump), options.blocks)
        source_files.LEAST = dump.stat().st_size // 16
        pieces = StackExchangeDump(name)
        report(
            f"... in {len(pieces.tasks())} pieces", size_of(dump), lambda: read(pieces), None, options.blocks
        )
        source_files.LEAST = 1 << 20
        code = copied(Path(name, "code"))
        files = sorted(code.rglob("*.py"))
        folder, archive = SourceCode(str(code)), SourceCode(str(packed(code, Path(name, "code.tar.gz"))))
        size = sum(map(size_of, files))
        report("SourceCode, folder", size, lambda: read(folder), lambda: decoded(files), options.blocks)
        report("SourceCode, .tar.gz", size, lambda: read(archive), None, options.blocks)
        texts = [path.read_text("utf-8", "replace") for path in files]
        batch = pyarrow.record_batch([strings(texts)], names=["text"])
        stage = CodeQuality()
        report(
            "CodeQuality",
            size,
            lambda: stage.apply(batch, lambda *_: None),
            lambda: rules(texts),
            options.blocks,
        )


def report(name: str, size: float, work: Work, simple: Work | None, blocks: int) -> None:
    """Runs both in turn, and prints medians."""
    times: dict[Work, list[float]] = defaultdict(list)
    for _ in range(blocks):
        for one in filter(None, (work, simple)):
            begin = time.process_time()
            one()
            times[one].append(time.process_time() - begin)
    ours = size / statistics.median(times[work])
    if simple is None:
        print(f"| {name} | {size:.0f} | {ours:.1f} | | |")
        return
    ratios = [theirs / own for own, theirs in zip(times[work], times[simple], strict=True)]
    theirs = size / statistics.median(times[simple])
    print(
        f"| {name} | {size:.0f} | {ours:.1f} | {theirs:.1f} | {statistics.median(ratios):.2f} |", flush=True
    )


def size_of(path: Path) -> float:
    """Returns a file's size in MB."""
    return path.stat().st_size / 1e6


def read(reader: Any) -> int:
    """Reads all tasks; returns the number of documents."""
    return sum(len(batch) for task in reader.tasks() for batch in reader.read(task, lambda *_: None))


def drawn(count: int) -> list[str]:
    """Returns the rows of a dump: questions and answers of one to five paragraphs, some of them code."""
    draw = random.Random(0)
    paragraphs = [html.escape(part) for topic in TOPICS for part in topic.split("\n\n") if len(part) > 40]
    rows, asked = [], list[int]()
    for number in range(1, count + 1):
        some = draw.choices(paragraphs, k=draw.randint(1, 5))
        body = "\n".join(
            f"<pre><code>{one}</code></pre>" if one[0] == " " else f"<p>{one}</p>" for one in some
        )
        if not asked or draw.random() < 0.4:
            rows.append(question(number, f"Title {number}", body))
            asked.append(number)
        else:
            rows.append(answer(number, draw.choice(asked), body, draw.randint(-2, 20)))
    return rows


def parsed(path: Path) -> int:
    """Groups the posts in memory, with ElementTree and BeautifulSoup; returns the characters."""
    from bs4 import BeautifulSoup

    questions, answers = {}, defaultdict(list)
    for _, row in ElementTree.iterparse(path):
        if row.get("PostTypeId") == "1":
            questions[row.get("Id")] = row.get("Title"), row.get("Body")
        elif row.get("PostTypeId") == "2":
            answers[row.get("ParentId")].append((-int(row.get("Score", "0")), row.get("Body")))
        row.clear()
    size = 0
    for number, (title, body) in questions.items():
        bodies = [body, *(one for _, one in sorted(answers[number]))]
        size += len("\n\n".join([title, *(BeautifulSoup(one, "html.parser").get_text() for one in bodies)]))
    return size


def copied(folder: Path) -> Path:
    """Writes Python's library, without its tests, as a repository."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if not {"site-packages", "test", "tests", "lib2to3", "idlelib"} & set(name.parts):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())
    (folder / "LICENSE").write_text(MIT)
    return folder


def packed(folder: Path, path: Path) -> Path:
    """Packs a folder into an archive."""
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    return path


def decoded(files: list[Path]) -> int:
    """Reads and decodes files; returns the characters."""
    return sum(len(path.read_bytes().decode("utf-8", "replace")) for path in files)


def rules(texts: list[str]) -> int:
    """Applies the rules as CodeParrot's script does; returns the number of files that are kept."""
    kept = 0
    for text in filter(None, texts):
        lengths = [len(line) for line in text.splitlines()]
        alphanumeric = np.mean([character.isalnum() for character in text])
        kept += bool(np.mean(lengths) <= 100 and max(lengths) <= 1000 and alphanumeric >= 0.25)
    return kept


if __name__ == "__main__":
    main()
