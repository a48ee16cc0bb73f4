import numpy as np
import pytest

from datamodules.packing.permutation import WINDOW, Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4096, 5000, 65_537])
def test_each_index_comes_once(size):
    order = Permutation(size, (0, 1)).map(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_one_by_one_is_the_same_also_backwards_and_across_windows():
    permutation = Permutation(3 * WINDOW + 5, (7,))
    expected = Permutation(3 * WINDOW + 5, (7,)).map(np.arange(3 * WINDOW + 5))
    indices = [0, 1, WINDOW - 1, WINDOW, 3 * WINDOW + 4, 5, 2 * WINDOW, 0]
    assert [permutation(index) for index in indices] == expected[indices].tolist()


def test_the_key_decides_the_order():
    orders = {
        tuple(Permutation(50, key).map(np.arange(50)).tolist()) for key in [(0, 0), (0, 1), (1, 0), (0, 0)]
    }
    assert len(orders) == 3


def test_orders_stay_what_they_are():
    """A run that resumes with a later version goes on in the order of its checkpoint."""
    assert Permutation(8, (0, 1)).map(np.arange(8)).tolist() == [1, 3, 7, 6, 0, 4, 2, 5]
    assert Permutation(5000, (0, 1)).map(np.arange(4)).tolist() == [4385, 3616, 716, 179]
    assert Permutation(1 << 40, (7,)).map(np.arange(3)).tolist() == [915251205011, 460355512716, 812688182876]


@pytest.mark.parametrize("size", [8, 8192])
def test_orders_are_even(size):
    """Chi-squared over which eighth an index goes to in 2,000 orders: 49 degrees of freedom, 99.99% below 95."""
    counts, places = np.zeros((8, 8)), np.arange(8) * (size // 8)
    for key in range(2000):
        counts[np.arange(8), Permutation(size, (key,)).map(places) // (size // 8)] += 1
    assert ((counts - 250) ** 2 / 250).sum() < 95


def test_neighbours_are_torn_apart():
    order = Permutation(100_000, (3,)).map(np.arange(100_000))
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02  # 6 standard deviations of independent draws


def test_a_trillion_tokens_need_no_memory():
    permutation = Permutation(1 << 40, (0,))
    assert 0 <= permutation((1 << 40) - 1) < 1 << 40
    assert permutation._window.nbytes <= 8 * WINDOW
