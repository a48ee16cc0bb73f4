"""How many documents PerplexityFilter scores in a second on one core, by the size of the network.

python -m tests.benchmarks.perplexity_filter
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow

from datamodules.preparation.transforms.perplexity_filter import PerplexityFilter
from plugins.networks.gpt import GPT
from tests.support.corpus import TOPICS
from tests.support.stored_networks import store

SIZES = {"0.9 M": (4, 4, 128), "10.7 M": (6, 6, 384), "85 M": (12, 12, 768)}


def main() -> None:
    """Prints a line for each network and number of tokens."""
    print(f"{len(TOPICS)} documents, {sum(map(len, TOPICS)) / len(TOPICS):,.0f} characters each\n")
    print(f"{'blocks':>8}  {'tokens':>6}  {'documents/s':>11}  {'tokens/s':>9}")
    columns = [pyarrow.array(TOPICS, pyarrow.large_string())] * 3
    batch = pyarrow.record_batch(columns, ["text", "source", "id"])
    with tempfile.TemporaryDirectory() as name:
        for size, (layers, heads, width) in SIZES.items():
            arguments: dict[str, Any] = {
                "vocab_size": 61,
                "n_layer": layers,
                "n_head": heads,
                "n_embd": width,
                "max_sequence_length": 256,
            }
            path = store(GPT(**arguments), arguments, Path(name) / f"{width}.ckpt")
            for tokens in (128, 1024):
                stage = PerplexityFilter(str(path), tokens=tokens)
                stage.perplexity("warm up")
                begin = time.perf_counter()
                stage.apply(batch, lambda *_: None)
                seconds = time.perf_counter() - begin
                print(
                    f"{size:>8}  {tokens:>6}  {len(TOPICS) / seconds:>11.1f}  {len(TOPICS) * tokens / seconds:>9,.0f}"
                )


if __name__ == "__main__":
    main()
