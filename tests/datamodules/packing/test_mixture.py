"""Mixtures: shares to within a row, each source in its own order, exact resume."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.data.token_loader import TokenLoader
from core.errors import ConfigError
from datamodules.packing import grouped
from datamodules.packing.best_fit import BestFitBatches
from datamodules.packing.concatenate import ConcatenatedBatches
from datamodules.packing.mixture import MixedBatches
from datamodules.packing.padded_documents import PaddedBatches
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.writers.token_shards import TokenShards

SIZES = {"web": [30] * 40, "code": [17, 60, 5] * 8, "books": [90, 41, 200]}
FIRST = {"web": 0, "code": 10_000, "books": 20_000}
WEIGHTS = {"web": 6, "code": 3, "books": 1}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """In each store a token is its position, plus a number that tells the store."""
    found = {}
    for name, lengths in SIZES.items():
        folder = tmp_path_factory.mktemp(name)
        ends = np.cumsum(lengths) + FIRST[name]
        documents = [np.arange(e - n, e) for e, n in zip(ends, lengths, strict=True)]
        TokenShards(500).write(documents, folder, vocab_size=1 << 15)
        found[name] = TokenStore(folder)
    return found


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(grouped, "GROUP", 5)


def mixed(stores, kinds=(ConcatenatedBatches,) * 3, weights=None, **options):
    options = {"sequence_length": 12, "batch_size": 4, "shuffle": True} | options
    parts = {name: kind(store, **options) for (name, store), kind in zip(stores.items(), kinds, strict=True)}
    return MixedBatches(parts, weights or WEIGHTS)


def sources(batch):
    names = list(FIRST)
    return [names[first // 10_000] for first in batch["input_ids"][:, 0].tolist()]


def test_after_any_number_of_rows_each_source_has_given_its_share(stores):
    given_rows = Counter()
    for count, name in enumerate(
        (name for _, batch in islice(mixed(stores), 200) for name in sources(batch)), 1
    ):
        given_rows[name] += 1
        for source, weight in WEIGHTS.items():
            assert abs(given_rows[source] - count * weight / 10) <= 1


def test_shares_change_linearly_over_tokens(stores):
    weights = {"web": [(0, 1.0), (12_000, 0.0)], "code": [(0, 0.0), (12_000, 1.0)], "books": 0}
    data = mixed(stores, weights=weights)
    assert data.shares(0) == {"web": 1.0, "code": 0.0, "books": 0.0}
    assert data.shares(3_000) == {"web": 0.75, "code": 0.25, "books": 0.0}
    assert data.shares(99_000) == {"web": 0.0, "code": 1.0, "books": 0.0}
    names = [name for _, batch in islice(data, 250) for name in sources(batch)]  # 12,000 tokens
    quarters = [Counter(names[at : at + 250])["code"] / 250 for at in range(0, 1000, 250)]
    assert quarters == pytest.approx([1 / 8, 3 / 8, 5 / 8, 7 / 8], abs=0.01)


def test_each_source_comes_in_the_order_that_it_has_alone(stores):
    found = {name: [] for name in FIRST}
    for _, batch in islice(mixed(stores), 100):
        for name, row in zip(sources(batch), batch["input_ids"].tolist(), strict=True):
            found[name].append(row)
    for name, rows in found.items():
        alone = ConcatenatedBatches(stores[name], sequence_length=12, batch_size=1, shuffle=True)
        assert rows == [batch["input_ids"][0].tolist() for _, batch in islice(alone, len(rows))]


def test_epochs_are_counted_for_each_source(stores):
    data = mixed(stores)
    cursor, _ = next(islice(data, 99, None))  # 400 rows of 12
    expected = {name: 4800 * WEIGHTS[name] / 10 / (sum(SIZES[name]) - 1) for name in FIRST}
    assert data.epochs(cursor) == pytest.approx(expected, rel=0.02)


KINDS = st.tuples(*[st.sampled_from([ConcatenatedBatches, BestFitBatches, PaddedBatches])] * 3)


@pytest.mark.ci
@settings(max_examples=40, deadline=None)
@given(
    kinds=KINDS,
    stops=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    world_size=st.sampled_from([1, 2, 4]),
    masked=st.booleans(),
)
def test_stops_and_ranks_change_nothing(stores, kinds, stops, world_size, masked):
    whole = [batch for _, batch in islice(mixed(stores, kinds, batch_size=4), sum(stops))]
    found, state = [], None
    for stop in stops:
        loaders = [
            TokenLoader(mixed(stores, kinds, batch_size=4 // world_size, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        if state:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        passes = [iter(loader) for loader in loaders]
        for _ in range(stop):
            parts = [next(part) for part in passes]
            found.append({key: torch.cat([part[key] for part in parts]) for key in ("input_ids", "labels")})
        state = loaders[0].state_dict()
    for one, other in zip(found, whole, strict=True):
        for key, value in one.items():
            assert torch.equal(value, other[key])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(stores, workers):
    one, other = (
        [batch["input_ids"].tolist() for batch in islice(TokenLoader(mixed(stores), w), 30)]
        for w in (0, workers)
    )
    assert one == other


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"web": 1, "code": 1}, "a weight for each source: it has web, code for web, code, books"),
        ({"web": 0, "code": 0, "books": 0}, "No source of the mixture has a positive weight"),
        ({"web": -1, "code": 1, "books": 1}, "The weight of web is -1"),
        ({"web": 1, "code": float("inf"), "books": 1}, "The weight of code is inf"),
        ({"web": 1, "code": [(0, 1), (9, float("nan"))], "books": 1}, "The weight of code is"),
        ({"web": [(5, 1), (5, 2)], "code": 1, "books": 1}, "points"),
        ({"web": [], "code": 1, "books": 1}, "points"),
    ],
)
def test_wrong_weights_are_refused(stores, weights, message):
    with pytest.raises(ConfigError, match=message):
        mixed(stores, weights=weights)
