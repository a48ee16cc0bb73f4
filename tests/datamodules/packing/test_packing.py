"""All packings: every token once in an epoch, whatever the ranks, workers, lengths and stops."""

import json
from itertools import chain, islice
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from core.data.token_loader import TokenLoader
from core.errors import ConfigError
from datamodules.packing import grouped
from datamodules.packing.best_fit import BestFitBatches
from datamodules.packing.concatenate import ConcatenatedBatches
from datamodules.packing.padded_documents import PaddedBatches
from datamodules.packing.permutation import Permutation
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from tests.support.positions import LENGTHS, write_positions

ENDS = set(np.cumsum(LENGTHS).tolist())
PACKINGS = [ConcatenatedBatches, BestFitBatches, PaddedBatches]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_positions(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Several groups of documents, so that batches reach over their ends."""
    monkeypatch.setattr(grouped, "GROUP", 6)


def batches(kind, store, **options):
    options = {"sequence_length": 12, "batch_size": 3, "shuffle": True} | options
    return kind(store, **options)


def tokens_of(batch):
    """Returns the tokens of a batch that are no padding: the labels say which of them are followed by what."""
    pairs = torch.stack([batch["input_ids"], batch["labels"]], -1).flatten(0, -2)
    return [tuple(pair) for pair in pairs.tolist()]


def labels_of(found):
    return sorted(label for batch in found for label in batch["labels"].flatten().tolist() if label != -100)


def expected_labels(kind, mask=True):
    return (
        [n for n in range(1, 601) if not (mask and n in ENDS)]
        if kind is not ConcatenatedBatches
        else list(range(1, 601))
    )


def epochs_worth(loader, count):
    """Takes batches until `count` label tokens were seen."""
    found, seen = [], 0
    while seen < count:
        for batch in loader:
            found.append(batch)
            seen += int((batch["labels"] != -100).sum())
            if seen >= count:
                break
    return found


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_two_epochs_ask_for_every_label_twice(kind, shuffle, store):
    expected = expected_labels(kind)
    labels = []
    for _, batch in batches(kind, store, shuffle=shuffle, sequence_length=10, batch_size=1):
        labels += [label for label in batch["labels"].flatten().tolist() if label != -100]
        if len(labels) >= 2 * len(expected):
            break
    assert sorted(labels[: len(expected)]) == expected
    assert sorted(labels[len(expected) : 2 * len(expected)]) == expected


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("sequence_length", [1, 7, 12, 599, 600, 601, 1000])
@pytest.mark.parametrize("world_size", [1, 2])
def test_padded_batches_count_every_label_once_and_end(kind, sequence_length, world_size, store):
    found, lengths = [], set()
    for rank in range(world_size):
        data = batches(
            kind, store, shuffle=False, pad=True, sequence_length=sequence_length,
            batch_size=4, rank=rank, world_size=world_size,
        )  # fmt: skip
        own = [batch for _, batch in data]
        assert len(own) == len(data)
        lengths.add(len(own))
        found += own
    assert len(lengths) == 1
    assert labels_of(found) == expected_labels(kind)
    for batch in found:
        counted = batch["labels"] != -100
        assert torch.equal(batch["labels"][counted], batch["input_ids"][counted] + 1)
        assert batch["input_ids"].min() >= 0
        assert batch["input_ids"].shape[0] == 4
        assert batch["input_ids"].is_contiguous()


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("shape", [(12, 3), (7, 1)])
def test_epochs_are_the_share_of_the_tokens_that_came(kind, shape, store, monkeypatch):
    monkeypatch.setattr(grouped, "GROUP", 2048)  # one group: the tokens of all count alike
    data = batches(kind, store, sequence_length=shape[0], batch_size=shape[1])
    seen, last = 0, 0.0
    for cursor, batch in islice(data, 40):
        seen += int((batch["input_ids"] != 0).sum())  # the token 0 and padding
        [epochs] = data.epochs(cursor).values()
        assert epochs == pytest.approx(seen / 600, abs=4 / 600)
        last = epochs
    assert data.epochs(json.loads(json.dumps(cursor))) == {"all": last}


@pytest.mark.parametrize("kind", [BestFitBatches, PaddedBatches])
def test_groups_count_alike_and_a_change_of_length_counts_nothing_twice(kind, store):
    loader = TokenLoader(batches(kind, store, batch_size=1))
    counts = []
    for number, _ in enumerate(islice(chain.from_iterable([loader] * 9), 150)):
        counts.append(loader.epochs()["all"])
        if number % 9 == 4:
            loader.reshape(sequence_length=5 + number % 20)
            assert loader.epochs()["all"] == pytest.approx(counts[-1])
    assert counts == sorted(counts)
    assert {0.25, 0.5, 0.75, 1.0} <= set(counts)  # the ends of four groups


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (1, 1), (3, 2)])
def test_ranks_and_workers_only_slice_the_same_global_batches(kind, workers, world_size, store):
    expected = list(islice(TokenLoader(batches(kind, store, batch_size=6)), 20))
    loaders = [
        TokenLoader(
            batches(kind, store, batch_size=6 // world_size, rank=rank, world_size=world_size), workers
        )
        for rank in range(world_size)
    ]
    ranks = [list(islice(loader, 20)) for loader in loaders]
    for name in expected[0]:
        joined = [torch.cat([batch[name] for batch in parts]) for parts in zip(*ranks, strict=True)]
        for one, other in zip(joined, [batch[name] for batch in expected], strict=True):
            assert torch.equal(one, other) or name == "document_ids"


SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 6), st.integers(1, 4), st.integers(0, 7), st.booleans())


@pytest.mark.parametrize("kind", PACKINGS)
def test_batches_and_cursors_do_not_depend_on_the_size_of_shards(kind, store, tmp_path):
    one = write_positions(tmp_path, shard_bytes=1 << 29)
    assert len(store._chunks) > 4
    assert len(one._chunks) == 1
    found, expected = (list(islice(batches(kind, tokens), 40)) for tokens in (one, store))
    assert len(expected) == 40  # more than two epochs
    for (cursor, batch), (other, its) in zip(found, expected, strict=True):
        assert cursor == other
        assert all(torch.equal(value, its[name]) for name, value in batch.items())


@pytest.mark.parametrize("kind", PACKINGS)
def test_a_rank_reads_the_tokens_of_its_own_rows_alone(kind, store, monkeypatch):
    read, plain = [], type(store).copy

    def copy(self, first, inputs, labels):
        read.append((first, len(inputs)))
        return plain(self, first, inputs, labels)

    monkeypatch.setattr(type(store), "copy", copy)
    for rank in range(4):
        read.clear()
        rows = [batch for _, batch in islice(batches(kind, store, batch_size=2, rank=rank, world_size=4), 6)]
        # token 0, as padding has it, left out
        came = sorted(place for batch in rows for place, _ in tokens_of(batch) if place)
        places = (place for first, size in read for place in range(first, first + size))
        assert sorted(filter(None, places)) == came


def test_a_rank_packs_the_groups_of_its_own_rows_alone(store):
    packed = []

    class Counted(BestFitBatches):
        def _pack(self, pieces, group, turn, length):
            packed.append(group)
            return super()._pack(pieces, group, turn, length)

    data = batches(Counted, store, batch_size=2, rank=20, world_size=40)
    rows, cursor = data.take(data.cursor, 80)
    assert cursor["group"] > 3
    assert packed == []  # their rows were counted
    own = data.read(rows, slice(40, 42))
    assert 0 < len(packed) <= 2
    whole = batches(BestFitBatches, store, batch_size=80)
    whole = whole.read(whole.take(whole.cursor, 80)[0], slice(80))
    assert all(torch.equal(own[name], whole[name][40:42]) for name in ("input_ids", "labels", "position_ids"))


@pytest.mark.ci
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(PACKINGS), shapes=st.lists(SHAPES, min_size=1, max_size=5), seed=st.integers(0, 3)
)
def test_nothing_is_lost_or_repeated_whatever_changes_and_stops(store, kind, shapes, seed):
    """Length, micro-batch and number of ranks change in mid-epoch, in one process or over a checkpoint."""
    expected, seen, cursor, turn = expected_labels(kind), [], None, 0
    loaders = []
    while len(seen) < 2 * len(expected):
        length, batch_size, world_size, count, resume = shapes[turn % len(shapes)]
        turn += 1
        options = {
            "sequence_length": length,
            "batch_size": batch_size,
            "world_size": world_size,
            "seed": seed,
        }
        if resume or len(loaders) != world_size:
            loaders = [TokenLoader(batches(kind, store, rank=rank, **options)) for rank in range(world_size)]
            for loader in loaders if cursor else ():
                loader.load_state_dict(json.loads(json.dumps(cursor)))
        else:
            for loader in loaders:
                loader.reshape(length, batch_size)
        passes = [iter(loader) for loader in loaders]
        for _ in range(count + 1):
            parts = [next(part, None) for part in passes]
            if None in parts:
                break
            for batch in parts:
                seen += [label for label in batch["labels"].flatten().tolist() if label != -100]
        cursor = loaders[0].state_dict()
        assert all(loader.state_dict() == cursor for loader in loaders)
    whole = len(seen) // len(expected) * len(expected)
    counts = np.bincount(seen, minlength=601)[expected]
    assert set(counts.tolist()) <= {whole // len(expected), whole // len(expected) + 1}


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("workers", [0, 2])
def test_reshaping_in_mid_pass_takes_effect_with_the_next_batch(kind, workers, store):
    loader, plain = (TokenLoader(batches(kind, store), w) for w in (workers, 0))
    found = []
    for number, batch in enumerate(loader):
        found.append(batch)
        if number == 2:
            loader.reshape(sequence_length=8, batch_size=2)
        if number == 6:
            break
    expected = list(islice(plain, 3))
    plain.reshape(sequence_length=8, batch_size=2)
    expected += list(islice(plain, 4))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
    assert found[3]["input_ids"].shape[0] == 2
    assert found[3]["input_ids"].shape[1] <= 8


@pytest.mark.parametrize("kind", PACKINGS)
def test_a_pass_goes_on_where_the_last_one_was_cut_short(kind, store):
    whole = [batch["input_ids"].tolist() for batch in islice(TokenLoader(batches(kind, store)), 9)]
    loader = TokenLoader(batches(kind, store))
    pieces = [batch["input_ids"].tolist() for _ in range(3) for batch in islice(loader, 3)]
    assert pieces == whole


def test_padded_passes_and_repeated_ones_begin_anew(store):
    for options, repeat in (({"pad": True, "shuffle": False}, False), ({}, True)):
        loader = TokenLoader(batches(ConcatenatedBatches, store, **options), repeat=repeat)
        first, second = ([batch["input_ids"].tolist() for batch in islice(loader, 4)] for _ in range(2))
        assert first == second


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize(
    ("change", "line"),
    [({"seed": 5}, "seed: 0 then, 5 now"), ({"shuffle": False}, "shuffle: True then, False now")],
)
def test_another_order_is_refused(kind, store, change, line):
    state = TokenLoader(batches(kind, store)).state_dict()
    with pytest.raises(ConfigError, match=line) as caught:
        TokenLoader(batches(kind, store, **change)).load_state_dict(state)
    assert len(str(caught.value).splitlines()) <= 10


def test_orders_follow_seed_and_epoch(store):
    for kind in PACKINGS:
        orders = set()
        for seed in (0, 1):
            data = [batch for _, batch in islice(batches(kind, store, seed=seed, batch_size=1), 150)]
            labels = [
                label for batch in data for label in batch["labels"].flatten().tolist() if label != -100
            ]
            count = len(expected_labels(kind))
            orders |= {tuple(labels[:count]), tuple(labels[count : 2 * count])}
        assert len(orders) == 4


# Documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PACKINGS)
def test_documents_are_on_their_own(kind, store):
    options = {"mask_documents": True} if kind is ConcatenatedBatches else {}
    number_of = np.searchsorted(np.cumsum(LENGTHS), np.arange(601), side="right")
    for _, batch in islice(batches(kind, store, sequence_length=37, batch_size=2, **options), 30):
        for ids, labels, documents, positions in zip(
            *(batch[name].tolist() for name in ("input_ids", "labels", "document_ids", "position_ids")),
            strict=True,
        ):
            for t in range(1, len(ids)):
                real = labels[t] != -100 or labels[t - 1] != -100
                joined = ids[t] == ids[t - 1] + 1 and number_of[ids[t]] == number_of[ids[t - 1]]
                if real:
                    assert (documents[t] == documents[t - 1]) == joined
                assert positions[t] == (positions[t - 1] + 1 if documents[t] == documents[t - 1] else 0)
            for token, label in zip(ids, labels, strict=True):
                assert label in (-100, token + 1)
                assert label == -100 or number_of[label] == number_of[token]


def test_best_fit_leaves_less_than_one_per_cent_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(grouped, "GROUP", 2048)
    lengths = np.random.default_rng(0).lognormal(4.5, 1.2, 4000).astype(int).clip(1, 60_000)
    store = write_positions(tmp_path, lengths.tolist(), 1 << 20)
    data = BestFitBatches(store, 256, 1, pad=True)
    rows = len(data)
    assert len(store) / (rows * 256) > 0.99


@given(st.lists(st.integers(1, 32), max_size=60))
def test_best_fit_is_as_the_paper_has_it(store, sizes):
    """The longest piece first, each into the row that is then fullest; the first of equals."""
    pieces = list(enumerate(sizes))
    rows = []
    for piece in sorted(pieces, key=lambda piece: -piece[1]):
        fitting = [row for row in rows if sum(size for _, size in row) + piece[1] <= 32]
        if fitting:
            max(fitting, key=lambda row: sum(size for _, size in row)).append(piece)
        else:
            rows.append([piece])
    data = batches(BestFitBatches, store, shuffle=False)
    assert data.pack(pieces, 32, None) == rows
    assert data.count(np.array(sizes, np.int64), 32) == len(rows)


def test_padded_rows_are_about_as_long_as_their_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(grouped, "GROUP", 2048)
    lengths = np.random.default_rng(0).integers(1, 500, 4096)
    store = write_positions(tmp_path, lengths.tolist(), 1 << 20)
    widths = [b["input_ids"].shape[1] for _, b in islice(PaddedBatches(store, 512, 8, shuffle=True), 512)]
    assert sum(widths) * 8 / len(store) < 1.2  # without sorting about 1.8
    assert all(width % 8 == 0 for width in widths)
    order = np.array(widths)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.99  # buckets are shuffled


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("position", ["rotary", "learned", "sinusoidal"])
def test_packed_documents_have_the_loss_that_they_have_alone(kind, position, store):
    torch.manual_seed(0)
    network = GPT(
        vocab_size=601, max_sequence_length=40, n_layer=2, n_head=2, n_embd=16, position=position, dropout=0.0
    ).double()
    network.init_weights()
    options = {"mask_documents": True} if kind is ConcatenatedBatches else {}
    for _, batch in islice(batches(kind, store, sequence_length=40, batch_size=3, **options), 6):
        packed, _ = CausalLM().loss(network, batch)
        total, tokens = 0.0, 0
        for row in range(3):
            documents = batch["document_ids"][row]
            for document in documents.unique():
                own = documents == document
                alone = {name: batch[name][row][own][None] for name in ("input_ids", "labels")}
                loss, _ = CausalLM().loss(network, alone)
                total, tokens = total + loss.total.item(), tokens + int(loss.tokens)
        assert packed.tokens == tokens > 0
        assert packed.total.item() == pytest.approx(total, rel=1e-6)  # float32 sums


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("workers", [0, 1])
def test_reading_leaves_torchs_random_generator_alone(kind, workers, store):
    before = torch.get_rng_state()
    list(islice(TokenLoader(batches(kind, store), workers), 5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(PACKINGS[0], marks=pytest.mark.ci),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in PACKINGS[1:]),
    ],
)
def test_workers_may_be_spawned(kind, store, monkeypatch):
    monkeypatch.undo()  # a spawned process knows nothing of the small groups
    loader = DataLoader(
        batches(kind, store), batch_size=None, num_workers=1, multiprocessing_context=get_context("spawn")
    )
    found, expected = list(islice(loader, 5)), list(islice(batches(kind, store), 5))
    for (cursor, batch), (other_cursor, other) in zip(found, expected, strict=True):
        assert cursor == other_cursor
        assert all(torch.equal(batch[name], other[name]) for name in other)


# Changes of length inside a group -----------------------------------------------------------------------


def replayed(data, taken):
    """The rows of the first group that are left, by the definition: every change packs what the last one left."""
    order = Permutation(data.documents, (data.seed, 0)).map(np.arange(data.documents))
    pieces, rows = data.store.documents(order).tolist(), []
    for turn, (length, count) in enumerate((*taken, (data.sequence_length, 0))):
        pieces = [(at, min(length, a + n - at)) for a, n in pieces for at in range(a, a + n, length)]
        rows = data.pack(pieces, length, np.random.default_rng((data.seed, 0, 0, turn)))
        pieces = [piece for row in rows[count:] for piece in row]
    return rows


@pytest.mark.parametrize("kind", [BestFitBatches, PaddedBatches])
def test_a_change_of_length_packs_once_and_changes_no_position(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(grouped, "GROUP", 2048)
    store = write_positions(tmp_path, np.random.default_rng(0).integers(1, 90, 400).tolist(), 1 << 20)
    packed = []

    class Counted(kind):
        def pack(self, pieces, length, random):
            packed.append(length)
            return super().pack(pieces, length, random)

    data, expected = Counted(store, 64, 4, shuffle=True), kind(store, 64, 4, shuffle=True)
    cursor, lengths = data.cursor, [64, 40, 24, 40] * 4
    for number, length in enumerate(lengths):
        data.sequence_length = expected.sequence_length = length
        taken = tuple(map(tuple, cursor["taken"]))
        rows, cursor = data.take(cursor, 3)
        data.epochs(cursor)
        assert len(packed) == number + 1
        assert rows == replayed(expected, taken)[:3]
        assert data.take(cursor, 5)[0] == data.take(cursor, 5)[0]  # of one length: nothing is packed
    assert cursor["group"] == 0
    assert len(packed) == len(lengths)
    resumed = Counted(store, lengths[-1], 4, shuffle=True)
    assert resumed.take(json.loads(json.dumps(cursor)), 30) == data.take(cursor, 30)
    assert len(packed) == 2 * len(lengths)
    resumed.take(cursor, 30)
    assert len(packed) == 2 * len(lengths)
