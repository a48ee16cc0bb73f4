"""What preparing tokens costs over encoding them, by CPU time, all ways in turn on the same text.

    python -m tests.benchmarks.tokenize_throughput

The text is the source code of the standard library and of what is installed, as one JSON Lines file. Ways: the
bare `encode_batch_fast` of the tokenizers library on documents in memory (the limit); `prepare` with and without
`Normalise`, from the file to the finished folder, in one process; litgpt's way, one document at a time through
litdata's `optimize` with one worker (less what it costs on a single document); datatrove's DocumentTokenizer, if it
is installed. One thread each. Where other programs share the cores, CPU times of the same work differ by half from
one second to the next: what holds then is the share of encoding within `prepare`, measured batch by batch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}

VOCAB_SIZE = 32_000
TRAINING_BYTES = 8_000_000


def texts(limit: int) -> list[str]:
    """Returns source files of up to 100 kB, in the order of their names, of so many bytes altogether."""
    found, size = [], 0
    for root in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_bytes().decode("utf-8", "ignore")
            if 500 < len(text) < 100_000 and size < limit:
                found.append(text)
                size += len(text)
    return list(dict.fromkeys(found))


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children."""
    multiprocessing.active_children()  # waits for those that have ended: only then they are counted
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Ways:
    """The contenders.

    Args:
        folder: Holds text.jsonl and tokenizer.json; results go below it.
        documents: The text.
    """

    def __init__(self, folder: Path, documents: list[str]) -> None:
        self.folder, self.documents = folder, documents
        self.path = folder / "tokenizer.json"

    def encode_batch_fast(self, folder: Path) -> None:
        """Encodes and keeps nothing; loads the tokenizer first, as all do: it remembers words that it has seen."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.path))
        for begin in range(0, len(self.documents), 64):
            tokenizer.encode_batch_fast(self.documents[begin : begin + 64], add_special_tokens=False)

    def prepare(self, folder: Path, normalise: bool = False) -> None:
        """Runs the whole preparation, report included."""
        from datamodules.preparation.preparation_report import write_report
        from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
        from datamodules.preparation.token_preparation import TokenPreparation
        from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
        from datamodules.preparation.transforms.normalise import Normalise
        from datamodules.preparation.writers.token_shards import TokenShards

        reader, tokenizer = (
            JSONLinesDocuments(str(self.folder / "text.jsonl")),
            PretrainedTokenizer(str(self.path)),
        )
        tokenizer.encode_batch = self._timed(tokenizer.encode_batch)
        stages = [Normalise()] if normalise else []
        TokenPreparation(reader, tokenizer, TokenShards(), 0.05, stages).run(folder, "text")
        write_report(folder)

    def _timed(self, encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns the function, with the CPU time that is spent in it counted."""
        self.encoding = 0.0

        def timed(texts: Any) -> Any:
            begin = time.process_time()
            try:
                return encode(texts)
            finally:
                self.encoding += time.process_time() - begin

        return timed

    def prepare_normalise(self, folder: Path) -> None:
        """Runs the whole preparation with Normalise."""
        self.prepare(folder, normalise=True)

    def litdata_optimize(self, folder: Path, documents: int | None = None) -> None:
        """Encodes one document at a time, as litgpt does."""
        from litdata import TokensLoader, optimize

        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(folder / "cache")
        os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(folder / "data")
        optimize(
            fn=OneByOne(str(self.path)),
            inputs=self.documents[:documents],
            output_dir=str(folder / "out"),
            chunk_bytes="64MB",
            num_workers=1,
            item_loader=TokensLoader(),
            start_method="spawn",
        )

    def litdata_start(self, folder: Path) -> None:
        """Does the same with one document: what starting costs."""
        self.litdata_optimize(folder, 1)

    def datatrove(self, folder: Path) -> None:
        """Runs reader and tokenizer in this process."""
        from datatrove.executor import LocalPipelineExecutor
        from datatrove.pipeline.readers import JsonlReader
        from datatrove.pipeline.tokens import DocumentTokenizer

        source = folder / "in"
        source.mkdir()
        (source / "text.jsonl").symlink_to(self.folder / "text.jsonl")
        steps = [
            JsonlReader(str(source)),
            DocumentTokenizer(
                str(folder / "out"), tokenizer_name_or_path=str(self.path), eos_token="<|endoftext|>"
            ),
        ]
        LocalPipelineExecutor(steps, logging_dir=str(folder / "logs")).run()


class OneByOne:
    """Encodes one document; litdata sends it to its worker."""

    def __init__(self, path: str) -> None:
        self.path, self.tokenizer = path, None

    def __call__(self, text: str) -> Iterator[Any]:
        """Yields the document's ids."""
        import torch
        from tokenizers import Tokenizer

        self.tokenizer = self.tokenizer or Tokenizer.from_file(self.path)
        yield torch.tensor([*self.tokenizer.encode(text).ids, 0], dtype=torch.uint16)


def seconds(way: Callable[[Path], None], folder: Path) -> float:
    """Returns the CPU seconds of one way, which may write to the folder."""
    _fresh(folder)
    begin = cpu_seconds()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        way(folder)
    return cpu_seconds() - begin


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    documents = texts(int(options.megabytes * 1e6))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
        (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
        from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer

        tokenizer = BPETokenizer(VOCAB_SIZE)
        tokenizer.prepare(documents[:: max(1, int(options.megabytes * 1e6 / TRAINING_BYTES))])
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        ways = Ways(folder, documents)
        tokens = sum(map(len, tokenizer.encode_batch(documents)))
        size = sum(len(text.encode()) for text in documents)
        print(
            f"{len(documents):,} documents, {size:,} bytes, {tokens:,} tokens, vocabulary {tokenizer.vocab_size:,}"
        )
        measure(ways, tokens, options.rounds)


def measure(ways: Ways, tokens: int, rounds: int) -> None:
    """Lets the ways take turns; prints medians."""
    names = [
        "encode_batch_fast",
        "prepare",
        "prepare_normalise",
        "litdata_optimize",
        "litdata_start",
        "datatrove",
    ]
    found: dict[str, list[float]] = {name: [] for name in names}
    shares: dict[str, list[float]] = {name: [] for name in names}
    Ways(ways.folder, ways.documents[:1] + ways.documents[-1:]).prepare_normalise(
        _fresh(ways.folder / "imports")
    )
    begin = time.perf_counter()
    for turn in range(rounds):
        first = turn % len(
            names
        )  # another way begins each round: what follows a long one is at a disadvantage
        for name in names[first:] + names[:first]:
            try:
                found[name].append(seconds(getattr(ways, name), ways.folder / name))
                if name.startswith("prepare"):
                    shares[name].append(ways.encoding / found[name][-1])
            except ImportError as error:
                if not found[name]:
                    print(f"{name}: {error}")
    starts = found.pop("litdata_start")
    found["litdata_optimize"] = [
        whole - start for whole, start in zip(found["litdata_optimize"], starts, strict=True)
    ]
    print("way                 CPU s  million tokens/s  of encode_batch_fast (median of the rounds' ratios)")
    for name, times in found.items():
        if times:
            ratio = statistics.median(a / b for a, b in zip(found["encode_batch_fast"], times, strict=True))
            median = statistics.median(times)
            print(f"{name:<18} {median:>6.2f}  {tokens / median / 1e6:>16.2f}  {ratio:>7.1%}")
    for name, of_encoding in shares.items():
        if of_encoding:
            message = (
                f"{statistics.median(of_encoding):.1%} ({min(of_encoding):.1%} to {max(of_encoding):.1%})"
            )
            print(f"of the CPU time of {name}, encode_batch_fast has {message}")
    print(f"{rounds} rounds, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
