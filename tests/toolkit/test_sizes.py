import pytest

from toolkit.sizes import readable


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (999.6, "1,000 bytes"),
        (1000, "1.00 kB"),
        (29_999, "30.0 kB"),
        (99_960, "100 kB"),
        (120_000, "120 kB"),
        (999_999, "1.00 MB"),
        (64 << 20, "67.1 MB"),
        (1_234_567_890, "1.23 GB"),
        (4.5e15, "4,500 TB"),
    ],
)
def test_sizes_have_units_that_fit(size, shown):
    assert readable(size) == shown


def test_binary_units():
    sizes = [1023, 1024, 64 << 20, int(3.25 * 2**30), 5 << 40]
    assert [readable(s, binary=True) for s in sizes] == [
        "1,023 bytes",
        "1.00 KiB",
        "64.0 MiB",
        "3.25 GiB",
        "5.00 TiB",
    ]
