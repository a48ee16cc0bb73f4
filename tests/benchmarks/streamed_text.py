"""How fast text is tokenised while it is read, how long a resume takes, and how much memory that needs, by the size of the source.

python -m tests.benchmarks.streamed_text --megabytes 50 200
"""

import argparse
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from callbacks.throughput import peak_resident_set
from datamodules.packing.streamed import StreamedBatches
from datamodules.preparation.readers.mds_documents import MDSDocuments
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.streaming_text_datamodule import StreamingTextDataModule
from tests.support.corpus import TOPICS
from tests.support.raw_folders import write_mds

BATCHES = 200


def batches(folder: Path, tokenizer: Path) -> StreamedBatches:
    """Returns the training batches of a folder."""
    data = StreamingTextDataModule(
        str(folder), MDSDocuments, PretrainedTokenizer(str(tokenizer)), sequence_length=1024, batch_size=8
    )
    data.setup()
    found = data.packed("train", sequence_length=1024, batch_size=8, shuffle=True, seed=0)
    assert isinstance(found, StreamedBatches)
    return found


def read_on(stream: StreamedBatches) -> None:
    """Reads an epoch: each document becomes one token, since what takes memory by the size of the source is reading."""
    stream.stream.encode = lambda texts: [[0] for _ in texts]
    cursor = stream.cursor
    while not cursor["epoch"]:
        _, cursor = stream.take(cursor, 1)


def measure(folder: Path, tokenizer: Path) -> tuple[float, float, float, float, float]:
    """Returns seconds to begin, tokens/s, seconds of the first batch of a resume, and the peak in MiB, without and with imports."""
    imports = peak_resident_set()
    begin = time.perf_counter()
    stream = batches(folder, tokenizer)
    began = time.perf_counter()
    cursor = stream.cursor
    for _ in range(BATCHES):
        rows, cursor = stream.take(cursor, 8)
        stream.read(rows, slice(8))
    read = time.perf_counter()
    fresh = batches(folder, tokenizer)
    resumed = time.perf_counter()
    fresh.read(fresh.take(cursor, 8)[0], slice(8))
    last = time.perf_counter() - resumed
    del rows, stream, fresh
    read_on(batches(folder, tokenizer))
    peak = peak_resident_set()
    return began - begin, BATCHES * 8192 / (read - began), last, (peak - imports) / 2**20, peak / 2**20


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 200])
    options = parser.parse_args()
    tokenizer = BPETokenizer(8192 // 2)
    tokenizer.prepare(TOPICS)
    print(
        f"{'MB':>5}  {'begin, s':>8}  {'tokens/s':>9}  {'resume, s':>9}  {'held, MiB':>9}  {'peak, MiB':>9}"
    )
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "tokenizer.json")
        path.write_text(tokenizer.to_json(), encoding="utf-8")
        for size in options.megabytes:
            draw = random.Random(0)
            count = size * 1_000_000 * len(TOPICS) // sum(map(len, TOPICS))
            texts = (f"{number} {draw.choice(TOPICS)}" for number in range(count))
            write_mds(folder := Path(name, str(size)), texts, 1 << 24)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                figures = pool.submit(measure, folder, path).result()
            begin, rate, resume, held, peak = figures
            print(f"{size:>5}  {begin:>8.2f}  {rate:>9,.0f}  {resume:>9.2f}  {held:>9.0f}  {peak:>9.0f}")


if __name__ == "__main__":
    main()
