"""Data stages and data modules that each break a promise."""

import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context

import pyarrow
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from core import catalog
from core.contracts import DocumentSource, Engine, Packing, Transform
from core.errors import ConfigError


class Shuffled(DocumentSource):
    """Yields the documents in another order each time.

    Example:
        data: {init_args: {reader: Shuffled}}
    """

    def __init__(self, source: str):
        self.source = source

    def fingerprint(self):
        return {"sha": open(self.source).read()}

    def documents(self):
        lines = [json.loads(line)["text"] for line in open(self.source)]  # noqa: SIM115
        random.SystemRandom().shuffle(lines)
        yield from lines


class PathAlone(Shuffled):
    """Takes the number of documents for what identifies the text.

    Example:
        data: {init_args: {reader: PathAlone}}
    """

    def fingerprint(self):
        return {"kind": "json lines"}

    def documents(self):
        yield from (json.loads(line)["text"] for line in open(self.source))  # noqa: SIM115


class Timed(PathAlone):
    """Puts the time into its fingerprint, so that nothing is ever found again.

    Example:
        data: {init_args: {reader: Timed}}
    """

    def fingerprint(self):
        return {"at": time.perf_counter_ns()}


BPE = catalog.find("BPETokenizer", "data").load()


class Upper(BPE):
    """Writes all in capitals if it is told to, of which its fingerprint says nothing.

    Example:
        data: {init_args: {tokenizer: Upper}}
    """

    def __init__(self, vocab_size: int = 300, capitals: bool = False):
        super().__init__(vocab_size)
        self.capitals = capitals

    def encode_batch(self, texts):
        return super().encode_batch([text.upper() if self.capitals else text for text in texts])


class Shifted(BPE):
    """Makes room for an id that its JSON knows nothing of.

    Example:
        data: {init_args: {tokenizer: Shifted}}
    """

    def encode_batch(self, texts):
        return [[token + 1 for token in ids] for ids in super().encode_batch(texts)]


class Lossy(BPE):
    """Leaves out every second id.

    Example:
        data: {init_args: {tokenizer: Lossy}}
    """

    def to_json(self):
        stored = json.loads(super().to_json())
        stored["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
        return json.dumps(stored)

    def encode_batch(self, texts):
        return super().encode_batch([text.replace("a", "") for text in texts])


class Random(BPE):
    """Trains on a sample that is another one each time.

    Example:
        data: {init_args: {tokenizer: Random}}
    """

    def prepare(self, documents):
        chance = random.SystemRandom()
        super().prepare([f"{chance.random():.16f} " * 50 for _ in documents])


SHARDS = catalog.find("TokenShards", "data").load()


class Narrow(SHARDS):
    """Stores 16 bits of each id.

    Example:
        data: {init_args: {writer: Narrow}}
    """

    def write(self, documents, folder, vocab_size):
        return super().write(([token % 65536 for token in ids] for ids in documents), folder, 65536)


class Dropping(SHARDS):
    """Drops documents of one token.

    Example:
        data: {init_args: {writer: Dropping}}
    """

    def write(self, documents, folder, vocab_size):
        kept = list(documents)
        super().write([ids for ids in kept if len(ids) > 1], folder, vocab_size)
        return sum(map(len, kept))


class Stamped(SHARDS):
    """Notes when it wrote.

    Example:
        data: {init_args: {writer: Stamped}}
    """

    def write(self, documents, folder, vocab_size):
        (folder / "written").write_text(str(time.perf_counter_ns()))
        return super().write(documents, folder, vocab_size)


class Untouched(Transform):
    """Leaves documents as they are; those below change something.

    Example:
        data: {init_args: {transforms: [{class_path: Untouched}]}}
    """

    def fingerprint(self):
        return {}

    def apply(self, batch, drop):
        keep = [self.keeps(number, text) for number, text in enumerate(batch["text"].to_pylist())]
        drop("unloved", keep.count(False))
        return batch.filter(pyarrow.array(keep))

    def keeps(self, number, text):
        return True


class FirstOfBatch(Untouched):
    """Drops a document whose first letter the batch has had before.

    Example:
        data: {init_args: {transforms: [{class_path: FirstOfBatch}]}}
    """

    def apply(self, batch, drop):
        self.seen = set()
        return super().apply(batch, drop)

    def keeps(self, number, text):
        first = text[0] not in self.seen
        self.seen.add(text[0])
        return first


class Hashing(Untouched):
    """Draws a sample by Python's hash, which is another in each process.

    Example:
        data: {init_args: {transforms: [{class_path: Hashing}]}}
    """

    def keeps(self, number, text):
        return hash(text) % 2 == 0


class Unpicklable(Untouched):
    """Holds what cannot be sent to another process.

    Example:
        data: {init_args: {transforms: [{class_path: Unpicklable}]}}
    """

    def __init__(self):
        self.keeps = lambda number, text: True


class Renumbering(Untouched):
    """Gives documents new names.

    Example:
        data: {init_args: {transforms: [{class_path: Renumbering}]}}
    """

    def apply(self, batch, drop):
        return batch.set_column(2, "id", pyarrow.array([str(number) for number in range(len(batch))]))


class Silent(Untouched):
    """Drops short documents, and does not say so.

    Example:
        data: {init_args: {transforms: [{class_path: Silent}]}}
    """

    def apply(self, batch, drop):
        return super().apply(batch, lambda reason, number: None)

    def keeps(self, number, text):
        return len(text) > 20


class Unversioned(Untouched):
    """Drops documents that are shorter than `least`, of which its fingerprint says nothing.

    Example:
        data: {init_args: {transforms: [{class_path: Unversioned}]}}
    """

    def __init__(self, least: int = 5):
        self.least = least

    def keeps(self, number, text):
        return len(text) >= self.least


class Here(Engine):
    """Does all in this process; those below do it in a wrong way.

    Example:
        data: {init_args: {engine: Here}}
    """

    def run(self, work, tasks):
        yield from map(work, tasks)


class Doubling(Here):
    """Does each task twice.

    Example:
        data: {init_args: {engine: Doubling}}
    """

    def run(self, work, tasks):
        for task in tasks:
            yield work(task)
            yield work(task)


class Forgiving(Here):
    """Leaves out what fails.

    Example:
        data: {init_args: {engine: Forgiving}}
    """

    def run(self, work, tasks):
        for task in tasks:
            with suppress(Exception):
                yield work(task)


class Rephrasing(Here):
    """Makes a bug of each mistake.

    Example:
        data: {init_args: {engine: Rephrasing}}
    """

    def run(self, work, tasks):
        try:
            yield from map(work, tasks)
        except ConfigError as error:
            raise RuntimeError(f"a worker failed: {error}") from error


class Fragile(Here):
    """Ends when one of its processes does.

    Example:
        data: {init_args: {engine: Fragile}}
    """

    def run(self, work, tasks):
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            yield from pool.map(work, tasks)


class Tireless(Here):
    """Does a task again and again until it is done.

    Example:
        data: {init_args: {engine: Tireless}}
    """

    def run(self, work, tasks):
        waiting = list(tasks)
        while waiting:
            with suppress(BrokenProcessPool), ProcessPoolExecutor(1, get_context("fork")) as pool:
                while waiting:
                    found = pool.submit(work, waiting[0]).result()
                    del waiting[0]
                    yield found


CONCATENATE = catalog.find("Concatenate", "data").load()


class Changed:
    """Batches of another packing with something changed."""

    def __init__(self, batches, change):
        vars(self).update(batches=batches, change=change)

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def __setattr__(self, name, value):
        setattr(self.batches, name, value)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for number, (cursor, batch) in enumerate(self.batches):
            yield cursor, self.change(self.batches, number, batch)


class Unshifted(Packing):
    """Labels each token with itself.

    Example:
        data: {init_args: {packing: Unshifted}}
    """

    def batches(self, folder, **options):
        return Changed(CONCATENATE().batches(folder, **options), self.change)

    def change(self, batches, number, batch):
        return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


class Repeating(Unshifted):
    """Gives every batch the rows of the first.

    Example:
        data: {init_args: {packing: Repeating}}
    """

    def change(self, batches, number, batch):
        self.first = batch if number == 0 else self.first
        return self.first


class RankBlind(Packing):
    """Gives all ranks the same rows.

    Example:
        data: {init_args: {packing: RankBlind}}
    """

    def batches(self, folder, **options):
        return CONCATENATE().batches(folder, **{**options, "rank": 0})


class OneOrder(Packing):
    """Has one order for all epochs.

    Example:
        data: {init_args: {packing: OneOrder}}
    """

    def batches(self, folder, **options):
        found = CONCATENATE().batches(folder, **options)
        first = {"_order": lambda self, epoch, blocks: super(type(self), self)._order(0, blocks)}
        kind = type("Same", (type(found),), first)
        found.__class__ = kind
        return found


class Rows(LightningDataModule):
    """The same rows for all ranks."""

    vocab_size = 64

    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(0)

    def row(self):
        return torch.randint(64, (17,), generator=self.generator)

    def train_dataloader(self):
        return self.batches(10)

    def val_dataloader(self):
        return self.batches(2)

    def batches(self, count):
        rows = [torch.stack([self.row() for _ in range(self.batch_size)]) for _ in range(count)]
        batches = [{"input_ids": each[:, :-1], "labels": each[:, 1:]} for each in rows]
        return DataLoader(batches, batch_size=None)


class Constant(Rows):
    """Gives the same rows in each step."""

    def row(self):
        return torch.arange(17)


class Wandering(Rows):
    """Validates on something else each time."""

    def val_dataloader(self):
        data = self

        class Fresh:
            def __len__(self):
                return 2

            def __iter__(self):
                yield from data.batches(2)

        return Fresh()
