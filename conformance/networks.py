"""Proofs for networks: what strategies, objectives and generation rely on; see `core.contracts.Network`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case
from conformance.proof import NotProvable, proof, require
from core.contracts import Network
from core.errors import ConfigError
from core.technique import declaration_of
from toolkit.generation.rows import PadsPrompts
from toolkit.initial_values import draw_part, initial_values, new_seed

ROWS, LENGTH = 2, 12
"""B and T of the batches."""

DOCUMENTS = (5, 4, 3)
"""Lengths of the documents in a row of LENGTH tokens."""

PIECES = (5, 3, 1, 1, 2)
"""Tokens of each call with a cache, LENGTH in all: a prompt, a second one, single tokens, and two at once."""

PROMPTS, NEW = (3, 7, 1), 4
"""Tokens of the rows in a padded cache, and tokens after them."""

CHOSEN = ([0, 1, 2], [2, 0, 0, 1], [3, 1], [0, 1])
"""Which rows go on, before each of those tokens: all; one twice, in another order; fewer; all that are left."""

FLOPS_FACTOR = 3.0
"""How far `flops_per_token` may be from the products that are counted: conventions differ by up to 2 (causal
attention halved or not, the embedding's weights counted or not)."""

TOLERANCE = 1e-5
"""Tolerance of float32 logits, relative to the largest: products of a few hundred terms in another order."""


def build(case: Case, perturbed: bool = True) -> Network:
    """Builds the network in eval mode; weights are drawn again where a zero would hide a mistake."""
    with seeded(0):
        network: Network = case.build("model.network", Network)
    network.eval()
    if perturbed:  # projections that begin at zero would let no token see another
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return network


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's generator, and gives back its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def tokens(network: Network, seed: int = 0, length: int = LENGTH) -> Tensor:
    """Returns token ids (B, T)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(network.vocab_size, (ROWS, length), generator=generator)


def logits_of(network: Network, input_ids: Tensor, cache: object = None) -> Tensor:
    """Returns logits (B, T, V) in float32."""
    with torch.no_grad():
        return network.logits(network({"input_ids": input_ids}, cache)).float()


def distance(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))


@proof("networks")
def returns_logits_for_each_token(case: Case) -> None:
    """`forward` and `logits` give (B, T, vocab_size) for every length up to `max_sequence_length`."""
    network = build(case)
    longest = network.max_sequence_length
    require(longest is None or longest >= 1, f"max_sequence_length is {longest}")
    for length in {1, 7, min(LENGTH, longest or LENGTH)}:
        with torch.no_grad():
            hidden = network({"input_ids": tokens(network, length=length)})
        logits = network.logits(hidden)
        wanted = (ROWS, length, network.vocab_size)
        require(logits.shape == wanted, f"logits are {tuple(logits.shape)} for T = {length}, not {wanted}")
        require(hidden.shape[:2] == wanted[:2], f"`forward` returned {tuple(hidden.shape)} for T = {length}")
        require(torch.isfinite(logits).all(), f"logits are not finite for T = {length}")


@proof("networks")
def is_causal(case: Case) -> None:
    """No logit depends on a later token; where it offers `bidirectional`, each but the last one does."""
    network = build(case)
    first, second = tokens(network, 0), tokens(network, 1)
    declared = declaration_of(type(network))
    both_ways = declared is not None and "bidirectional" in declared.offers
    for cut in range(1, LENGTH):
        changed = torch.cat((first[:, :cut], second[:, cut:]), dim=1)
        leak = distance(logits_of(network, changed)[:, :cut], logits_of(network, first)[:, :cut])
        require(
            leak > TOLERANCE if both_ways else leak <= TOLERANCE,
            f"it offers `bidirectional`, and other tokens from position {cut} on do not change the logits before it"
            if both_ways
            else f"other tokens from position {cut} on change the logits before it by {leak:.1e} of the largest",
        )


@proof("networks")
def blocks_are_submodules(case: Case) -> None:
    """`blocks` are different modules of the network, in the order of their names, so that they can be wrapped."""
    network = build(case)
    places = {id(module): place for place, module in enumerate(network.modules())}
    found = [places.get(id(block)) for block in network.blocks]
    require(
        None not in found, f"block {found.index(None) if None in found else 0} is no module of the network"
    )
    require(len(set(found)) == len(found), "a block is in `blocks` twice")
    require(
        found == sorted(found, key=lambda place: place or 0), "the blocks are not in the order of the modules"
    )


@proof("networks")
def starts_on_the_meta_device(case: Case) -> None:
    """Built on the meta device, emptied onto a real one and initialised, it is what it is when built there."""
    usual = build(case, perturbed=False)
    with torch.device("meta"):
        sharded: Network = case.build("model.network", Network)
    real = [name for name, tensor in _tensors(sharded) if tensor.device.type != "meta"]
    require(not real, f"built on the meta device it still allocates {', '.join(real[:5])}")
    sharded.to_empty(device="cpu")
    with torch.no_grad():
        for _, tensor in _tensors(sharded):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    for network in (usual, sharded):
        with seeded(2):
            network.init_weights()
    left = [name for name, tensor in _tensors(sharded) if tensor.is_floating_point() and tensor.isnan().any()]
    require(not left, f"init_weights leaves out {', '.join(left[:5])}")
    expected = dict(_tensors(usual))
    other = [
        n for n, tensor in _tensors(sharded) if n not in expected or not torch.equal(tensor, expected[n])
    ]
    require(not other and len(expected) == len(dict(_tensors(sharded))), f"differs in {', '.join(other[:5])}")
    fresh = logits_of(sharded.eval(), tokens(sharded))
    require(torch.isfinite(fresh).all(), "its logits are not finite")


@proof("networks")
def defers_its_initialisation(case: Case) -> None:
    """With `deferred_init`: from the meta device and from the constructor come the same weights of a seed, bit by bit."""
    with seeded(0):
        usual: Network = case.build("model.network", Network)
        state = torch.get_rng_state()
    if not vars(type(usual)).get("deferred_init"):
        raise NotProvable("it does not set deferred_init")
    with torch.device("meta"):
        deferred: Network = case.build("model.network", Network)
    deferred.to_empty(device="cpu")
    with seeded(0):
        deferred.init_weights()
        require(torch.equal(torch.get_rng_state(), state), f"{_ELSEWHERE}: it draws more or fewer numbers")
    expected, found = dict(_tensors(usual)), dict(_tensors(deferred))
    require(expected.keys() == found.keys(), "tied parameters are no longer tied after `to_empty`")
    other = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    require(not other, f"{_ELSEWHERE}: it differs in {', '.join(other[:5])}")


@proof("networks")
def says_how_each_parameter_begins(case: Case) -> None:
    """Where it does, parameters that are drawn one by one are what `init_weights` makes of them, bit by bit."""
    with seeded(0):
        network: Network = case.build("model.network", Network)
    if (starts := initial_values(network)) is None:
        raise NotProvable("it does not say of each parameter how it begins")
    with seeded(2):
        seed = new_seed()
    with seeded(2):
        network.init_weights()
    for name, tensor in _tensors(network):
        found = torch.empty_like(tensor)
        draw_part(found, starts[name], seed, name)
        require(
            torch.equal(found, tensor),
            f"{name} drawn by itself is not what init_weights makes of it.\nLikely: init_weights does more than "
            "toolkit.initial_values.draw, or `initial_value` looks at values.",
        )


_ELSEWHERE = "the constructor draws or sets values outside of init_weights"


def _tensors(network: Network) -> Iterator[tuple[str, Tensor]]:
    yield from network.named_parameters()
    yield from network.named_buffers()


@proof("networks")
def parallel_plan_names_modules(case: Case) -> None:
    """Each name in the plans for tensor and sequence parallelism, wildcards included, is that of a module."""
    network = build(case)
    names = [name for name, _ in network.named_modules()]
    keys = [*network.tensor_parallel_plan(), *network.sequence_parallel_plan()]
    unknown = [key for key in keys if not any(fnmatchcase(n, key) for n in names)]
    require(not unknown, f"there is no module {', '.join(unknown)}")


@proof("networks")
def stages_compute_what_forward_does(case: Case) -> None:
    """Its blocks in two parts, the `ends` of the other part taken away, give what `forward` gives, bit by bit."""
    network = build(case)
    if network.ends is None or len(network.blocks) == 0:
        raise NotProvable("it cannot be cut into stages")
    batch = {"input_ids": tokens(network)}
    with torch.no_grad():
        expected = network(batch)
        cut = (len(network.blocks) + 1) // 2
        first, last = (_without(network, index) for index in (1, 0))
        hidden = first.forward_blocks(batch, None, range(cut))
        found = last.forward_blocks(batch, hidden, range(cut, len(network.blocks)))
    require(
        torch.equal(found, expected), f"they differ by {distance(found, expected):.1e} of the largest value"
    )


def _without(network: Network, end: int) -> Network:
    """Returns a copy without the modules of one end that the other does not use, and NaN in place of them."""
    copied = copy.deepcopy(network)
    ends = copied.ends or ((), ())
    other = {id(module) for module in ends[1 - end]}
    for module in ends[end]:
        if id(module) not in other:
            for parameter in module.parameters():
                parameter.data.fill_(float("nan"))
    return copied


@proof("networks")
def attends_through_what_it_is_given(case: Case) -> None:
    """With another attention function in place, every block calls it, causally where the batch has one document."""
    network = build(case)
    calls: list[bool] = []

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs.get("is_causal", False))
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)

    expected = logits_of(network, tokens(network))
    if not network.replace_attention(attention):
        raise NotProvable("its attention cannot be replaced")
    found = logits_of(network, tokens(network))
    require(len(calls) >= len(network.blocks), f"{len(calls)} calls of {len(network.blocks)} blocks")
    require(all(calls), "it was called without is_causal")
    require(torch.equal(found, expected), "the same function in its place gives other logits")


@proof("networks")
def documents_are_isolated(case: Case) -> None:
    """Where a batch has `document_ids`, the logits of a document are those that it has alone in a row."""
    network = build(case)
    input_ids = tokens(network)
    ids = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS)).expand(ROWS, LENGTH)
    places = torch.cat([torch.arange(size) for size in DOCUMENTS]).expand(ROWS, LENGTH)
    batch = {"input_ids": input_ids, "document_ids": ids.contiguous(), "position_ids": places.contiguous()}
    try:
        with torch.no_grad():
            packed = network.logits(network(batch)).float()
    except ConfigError as refusal:
        raise NotProvable(f"it refuses document_ids: {refusal}") from None
    begin = 0
    for number, size in enumerate(DOCUMENTS):
        own = slice(begin, begin + size)
        apart = distance(packed[:, own], logits_of(network, input_ids[:, own]))
        require(
            apart <= TOLERANCE,
            f"document {number} of a row with {len(DOCUMENTS)} differs from the same one alone by {apart:.1e} of the "
            "largest logit.\nLikely: attention, a convolution or a recurrence reaches over the end of a document "
            "(document_ids), or positions continue instead of starting at 0 (position_ids). A network that cannot "
            "keep documents apart raises a ConfigError.",
        )
        begin += size


@proof("networks")
def counts_flops(case: Case) -> None:
    """`flops_per_token` is about what forward and backward compute, and does not fall with the length."""
    from torch.utils.flop_counter import FlopCounterMode

    network = build(case)
    short, long = (network.flops_per_token(length) for length in (8, 16))
    require(0 < short <= long < float("inf"), f"{short:g} at T = 8, {long:g} at T = 16")
    counter = FlopCounterMode(display=False)
    with counter:
        network.logits(network({"input_ids": tokens(network)})).sum().backward()
    network.zero_grad()
    counted, stated = counter.get_total_flops() / (ROWS * LENGTH), network.flops_per_token(LENGTH)
    require(
        not counted or counted / FLOPS_FACTOR <= stated <= counted * FLOPS_FACTOR,
        f"{stated:g} per token at T = {LENGTH}; torch's FlopCounterMode counts {counted:g} in the matrix products of "
        "forward and backward.\nLikely: it is the figure of a sequence or a batch, not of one token; or backward, "
        "which is twice the forward, is left out.",
    )


@proof("networks")
def a_cache_changes_nothing(case: Case) -> None:
    """Logits with a key-value cache, in pieces of several tokens and one at a time, are those without."""
    network = build(case)
    input_ids = tokens(network)
    cache = network.new_cache(ROWS, LENGTH)
    if cache is None:
        raise NotProvable("it has no cache")
    expected = logits_of(network, input_ids)
    begin, parts = 0, []
    with _unchanged(network):
        for size in PIECES:
            own = slice(begin, begin + size)
            parts.append(logits_of(network, input_ids[:, own], cache))
            apart = distance(parts[-1], expected[:, own])
            require(
                apart <= TOLERANCE,
                f"a piece of {size} tokens behind {begin} in the cache: they differ by {apart:.1e} of the largest "
                f"logit.\nLikely: {_cause_of_cache(begin, size)}.",
            )
            begin += size
    again = logits_of(network, input_ids[:, : PIECES[0]], network.new_cache(ROWS, LENGTH))
    require(torch.equal(again, parts[0]), "a new cache is not empty: the same tokens give other logits")


@proof("networks")
def padding_changes_nothing(case: Case) -> None:
    """Rows of different lengths in a padded cache have the logits that they have alone, also after rows are chosen.

    Of networks that offer `toolkit.generation.rows.PadsPrompts`.
    """
    network = build(case)
    if not isinstance(network, PadsPrompts):
        raise NotProvable("it does not offer PadsPrompts")
    rows = [tokens(network, seed, length)[0] for seed, length in enumerate(PROMPTS)]
    longest = max(PROMPTS)
    padding = torch.tensor([longest - length for length in PROMPTS])
    cache = network.new_padded_cache(padding, longest + NEW)
    if cache is None:
        raise NotProvable("it has no cache")
    found = logits_of(network, _padded(rows), cache)
    require(torch.isfinite(found).all(), "logits of padding are not finite")
    _same_as_alone(network, rows, found, "the prompts")
    for step, chosen in enumerate(CHOSEN):
        if chosen != list(range(len(rows))):
            network.select_cache_rows(cache, torch.tensor(chosen))
        rows = [rows[row] for row in chosen]
        new = tokens(network, 10 + step, len(rows))[0]
        rows = [torch.cat((row, token[None])) for row, token in zip(rows, new, strict=True)]
        found = logits_of(network, new[:, None], cache)
        _same_as_alone(network, rows, found, f"token {step + 1} after them, with rows {chosen}")


def _padded(rows: Sequence[Tensor]) -> Tensor:
    longest = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])


def _same_as_alone(network: Network, rows: Sequence[Tensor], found: Tensor, where: str) -> None:
    for number, row in enumerate(rows):
        seen = min(len(row), found.shape[1])
        alone = logits_of(network, row[None])[0, -seen:]
        apart = distance(found[number, -seen:], alone)
        require(
            apart <= TOLERANCE,
            f"{where}: those of row {number} differ from the same row's alone by {apart:.1e} of the largest logit.\n"
            "Likely: tokens see the padding, their positions do not begin at 0 behind it, or select_cache_rows leaves out "
            "the padding or a part of the cache.",
        )


def _cause_of_cache(begin: int, size: int) -> str:
    if begin == 0:
        return "with an empty cache another path is taken than without one"
    if size > 1:
        return "the mask of the new tokens does not begin behind those in the cache (is_causal does not)"
    return "positions do not continue after the tokens in the cache"


@contextmanager
def _unchanged(network: Network) -> Iterator[None]:
    before = {name: tensor.clone() for name, tensor in _tensors(network)}
    yield
    changed = [name for name, tensor in _tensors(network) if not torch.equal(tensor, before[name])]
    require(not changed, f"generating changes {', '.join(changed)}")
