"""Initial values: a part is what the whole has there, whatever the part, the data type and the other parameters."""

import math

import pytest
import torch

from plugins.networks.gpt import GPT
from tests.support.tiny_training import tiny_gpt
from toolkit.initial_values import (
    TILE,
    draw,
    draw_part,
    initial_values,
    normal,
    spread,
    uniform,
)
from toolkit.truncated_normal import truncated_normal


def whole(shape, name="w", seed=5, start=None, dtype=None):
    found = torch.full(shape, torch.nan, dtype=dtype)
    draw_part(found, start or normal(0.02), seed, name)
    return found


@pytest.mark.parametrize(
    "shape", [(), (5,), (1500,), (130, 1100), (3, 70, 520), (4096, 1, 4), (2, 3, 40, 33)]
)
@pytest.mark.parametrize("start", [normal(0.02), truncated_normal(0.01, 0.02, -0.03, 0.04)])
def test_any_part_is_what_the_whole_has_there(shape, start):
    expected = whole(shape, start=start)
    assert not expected.isnan().any()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        offset = [int(torch.randint(size, (), generator=generator)) for size in shape]
        sizes = [
            int(torch.randint(1, size - first + 1, (), generator=generator))
            for size, first in zip(shape, offset, strict=True)
        ]
        part, wanted = torch.empty(sizes), expected
        draw_part(part, start, 5, "w", shape, offset)
        for dim, (first, size) in enumerate(zip(offset, sizes, strict=True)):
            wanted = wanted.narrow(dim, first, size)
        assert torch.equal(part, wanted), (offset, sizes)


def test_values_depend_on_seed_and_name_alone_and_no_tile_is_that_of_another():
    shape = 128, 2048  # eight tiles
    first = whole(shape)
    assert torch.equal(first, whole(shape))
    others = [whole(shape, name="v"), whole(shape, seed=6)]
    tiles = [t for x in (first, *others) for rows in x.chunk(4) for t in rows.chunk(2, dim=1)]
    assert len({tuple(tile.flatten()[:8].tolist()) for tile in tiles}) == 24
    # the mean of n numbers has a standard deviation of 1 / sqrt(n), their square's of sqrt(2 / n): five of each
    values, n = first.double() / 0.02, first.numel()
    assert abs(values.mean()) < 5 * n**-0.5
    assert abs(values.square().mean() - 1) < 5 * (2 / n) ** 0.5
    assert abs((values[:, 1:] * values[:, :-1]).mean()) < 5 * n**-0.5
    assert (whole(shape, start=uniform(-2, 3)).mean() - 0.5).abs() < 5 * (25 / 12 / n) ** 0.5


def below(x):
    """The probability of a normal number below x."""
    return math.erfc(-x / 2**0.5) / 2


@pytest.mark.parametrize(
    ("mean", "std", "low", "high"),
    [
        (0.0, 0.02, -0.04, 0.04),
        (0.0, 0.02, -2.0, 2.0),  # 100 standard deviations, torch's default
        (1.0, 2.0, -1.0, 1.5),
        (0.0, 1.0, 6.0, math.inf),
        (0.5, 1.0, -math.inf, -9.0),
    ],
)
def test_truncated_numbers_have_their_distribution(mean, std, low, high):
    own = whole((512, 1024), start=truncated_normal(mean, std, low, high))
    assert bool(((own >= low) & (own <= high)).all())
    side = -1 if low > mean else 1  # where all is right of the mean, the distribution is looked at from there
    values, n = side * (own.double().flatten() - mean) / std, own.numel()
    first, last = sorted((side * (low - mean) / std, side * (high - mean) / std))
    area, here = below(last) - below(first), [0 if math.isinf(x) else x for x in (first, last)]
    dense = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0 for x in (first, last)]
    expected = (dense[0] - dense[1]) / area
    variance = 1 + (here[0] * dense[0] - here[1] * dense[1]) / area - expected**2
    # the mean's standard error is s / sqrt(n), the variance's s^2 sqrt(8 / n) at most, that of an exponential tail; five of each
    assert abs(values.mean() - expected) < 5 * (variance / n) ** 0.5
    assert abs(values.var() - variance) < 5 * variance * (8 / n) ** 0.5
    # the distance of two distribution functions is above 1.95 / sqrt(n) once in a thousand cases (Kolmogorov)
    places = (torch.special.erfc(-values.sort().values / 2**0.5) / 2 - below(first)) / area
    assert (places - torch.arange(1, n + 1) / n).abs().max() < 1.95 * n**-0.5
    if abs(low - mean) < 5 * std or low < mean < high:  # where torch's repetitions come to an end
        torchs = torch.nn.init.trunc_normal_(
            torch.empty(512, 1024), mean, std, low, high, generator=torch.Generator().manual_seed(0)
        ).double()
        assert float(own.double().mean()) == pytest.approx(float(torchs.mean()), abs=7 * std * n**-0.5)
        assert float(own.double().std()) == pytest.approx(float(torchs.std()), rel=0.01)


def test_many_threads_draw_what_one_does(monkeypatch):
    shape = 65 * TILE // 1024, 1030
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    alone = whole(shape)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(whole(shape), alone)


def test_in_two_bytes_they_are_the_same_values_rounded():
    assert torch.equal(whole((130, 1100), dtype=torch.bfloat16), whole((130, 1100)).bfloat16())


def test_with_more_blocks_those_that_were_there_begin_alike():
    few, more = tiny_gpt(), tiny_gpt(n_layer=5)
    draw(few, 3)
    draw(more, 3)
    assert torch.equal(few.layers[1].mlp.up_proj.weight, more.layers[1].mlp.up_proj.weight)


class Undeclared(GPT):
    """Does not say that its constructor leaves all values to init_weights."""


class Overriding(GPT):
    """Begins in a way of its own."""

    deferred_init = True

    def init_weights(self):
        super().init_weights()


class Silent(GPT):
    """Does not say how its embedding begins."""

    deferred_init = True

    def initial_value(self, name, tensor):
        return None if name == "embed_tokens.weight" else super().initial_value(name, tensor)


@pytest.mark.parametrize("kind", [Undeclared, Overriding, Silent])
def test_a_network_counts_that_says_it_of_all_parameters_and_means_it(kind):
    sizes = dict(vocab_size=8, n_layer=1, n_head=1, n_embd=4, max_sequence_length=4)
    assert initial_values(kind(**sizes)) is None
    assert len(initial_values(GPT(**sizes))) == len(list(GPT(**sizes).parameters()))


@pytest.mark.gpu
def test_on_a_gpu_they_are_those_of_a_cpu():
    for start in (normal(0.02), truncated_normal(0.0, 0.02, -0.04, 0.04)):
        for dtype in (torch.float32, torch.bfloat16):
            found = torch.empty(130, 1100, dtype=dtype, device="cuda")
            draw_part(found, start, 5, "w")
            assert torch.equal(found.cpu(), whole((130, 1100), start=start, dtype=dtype))


def test_a_spread_is_that_of_numbers_on_another_device_than_a_network_is_built_on():
    matrix = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):  # as Lightning builds it on a GPU, within `torch.device("cuda")`
        found = spread(matrix.split(16))
    assert found == spread(matrix.split(16))


def test_a_spread_is_float32_while_a_network_is_built_in_bfloat16():
    matrix = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    expected = float(matrix.double().std(correction=0).float())
    torch.set_default_dtype(torch.bfloat16)  # as `bf16-true` does, outside of which ranks draw their shards
    try:
        found = spread(matrix.split(16))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == pytest.approx(expected, rel=1e-6)
