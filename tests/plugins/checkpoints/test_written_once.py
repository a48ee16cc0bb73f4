"""Each part is written once, and ranks with the same parts share them evenly."""

import numpy as np

from plugins.checkpoints.written_once import MOST_SMALL, writers


def held(*parts):
    return np.array(parts, np.int64).reshape(-1, 2)


def test_what_is_small_is_written_by_the_first_that_holds_it():
    found = writers([held((7, 5)), held((8, MOST_SMALL), (7, 5)), held((8, MOST_SMALL), (7, 5))])
    assert [ranks.tolist() for ranks in found] == [[0], [1, 0], [1, 0]]


def test_replicas_share_what_is_large_evenly():
    sizes = np.random.default_rng(0).integers(10_000, 100_000, 60)
    one, other = (held(*((shard * 1000 + part, size) for part, size in enumerate(sizes))) for shard in (0, 1))
    found = writers([one, other, one[::-1], other])  # in whatever order
    for replicas in ((0, 2), (1, 3)):
        first, second = (found[rank] for rank in replicas)
        assert np.array_equal(first, second if replicas[0] else second[::-1])
        assert set(first) == set(replicas)
        total = [sizes[first == rank].sum() for rank in replicas]
        assert abs(total[0] - total[1]) < max(sizes) / 4


def test_nothing_is_decided_where_nothing_is_held():
    assert [len(ranks) for ranks in writers([held(), held((3, 9000)), held()])] == [0, 1, 0]
    assert [len(ranks) for ranks in writers([held(), held()])] == [0, 0]
