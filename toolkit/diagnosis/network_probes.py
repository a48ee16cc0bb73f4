"""What is measured of the network on one batch: what it sees, how loud it is, what its gradients are."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from core.contracts import IGNORED_LABEL
from toolkit.diagnosis.data_probes import document_numbers
from toolkit.generation.rows import evaluating
from toolkit.network_parts import MLP_READERS, NamesParts
from toolkit.routing import RoutesTokens, Routing, count_experts, recorded


@torch.no_grad()
def visibility(network: Any, batch: Mapping[str, Any]) -> dict[str, float]:
    """Returns how much logits change with tokens that they must not depend on, over how much with those they may.

    `doctor/sees_future`: of positions before a token that is changed, in its row. `doctor/sees_documents`: of the documents behind the
    first, where positions restart within rows. `doctor/sees_rows`: of other rows than the first.
    """
    ids, found = batch["input_ids"], dict[str, float]()
    with evaluating(network):
        plain = _logits(network, batch)
        for place in {ids.shape[1] // 4, ids.shape[1] // 2, ids.shape[1] - 1} - {0}:
            here = torch.zeros(ids.shape, dtype=torch.bool)
            here[-1, place] = True  # in one row: what others see of it is `sees_rows`
            moved = (
                (_logits(network, {**batch, "input_ids": _other(ids, here, network)}) - plain).abs().amax(-1)
            )
            share = _ratio(moved[-1, :place], moved[-1, place])
            found["doctor/sees_future"] = max(share, found.get("doctor/sees_future", 0.0))
        if len(ids) > 1:
            first = (torch.arange(len(ids)) == 0)[:, None]
            moved = (
                (_logits(network, {**batch, "input_ids": _other(ids, first, network)}) - plain).abs().amax(-1)
            )
            found["doctor/sees_rows"] = _ratio(moved[1:], moved[0])
        number = document_numbers(batch)
        if number is not None and bool((number > 0).any()):
            first, later = number == 0, number > 0
            moved = (
                (_logits(network, {**batch, "input_ids": _other(ids, first, network)}) - plain).abs().amax(-1)
            )
            found["doctor/sees_documents"] = _ratio(moved[later], moved[first])
    return found


@torch.no_grad()
def unsteadiness(network: Any, batch: Mapping[str, Any], is_first: bool = False) -> dict[str, float]:
    """Returns by how much logits of the same rows move from one pass in evaluation to the next, over their deviation.

    `doctor/unsteady`; before the first step `doctor/initial_unsteady`, and `doctor/initial_warms`, by how much a pass in training moves them.
    """
    with kept_buffers(network), evaluating(network):
        logits = [_logits(network, batch) for _ in range(2)]
        if not is_first:
            return {"doctor/unsteady": _moved(*logits)}
    with kept_buffers(network):
        if network.training:
            _logits(network, batch)
        with evaluating(network):
            logits.append(_logits(network, batch))
    return {"doctor/initial_unsteady": _moved(*logits[:2]), "doctor/initial_warms": _moved(*logits[1:])}


def _moved(before: Tensor, after: Tensor) -> float:
    return float((after - before).abs().max() / before.std().clamp(min=1e-30))


@contextmanager
def kept_buffers(network: nn.Module, buffers: Sequence[Tensor] | None = None) -> Iterator[None]:
    """Puts back what passes make of a network's buffers, such as running means; within, they are `buffers` where those are given."""
    now = copied_buffers(network)
    _put(network, buffers or ())
    try:
        yield
    finally:
        _put(network, now)


def copied_buffers(network: nn.Module) -> list[Tensor]:
    """Returns copies of a network's buffers."""
    return [buffer.detach().clone() for buffer in network.buffers()]


@torch.no_grad()
def _put(network: nn.Module, values: Sequence[Tensor]) -> None:
    for buffer, value in zip(network.buffers(), values, strict=False):
        if buffer.shape == value.shape:  # one that grows with the rows stays as it has grown
            buffer.copy_(value)


@contextmanager
def products(network: nn.Module, found: list[tuple[int, bool]]) -> Iterator[None]:
    """Collects of each matrix that is multiplied under autocast its size, and whether it is multiplied in float32 all the same."""

    def note(module: Any, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and torch.is_autocast_enabled(output.device.type):
            found.append((module.weight.numel(), output.dtype == torch.float32))

    matrices = [module for module in network.modules() if isinstance(module, nn.Linear)]
    handles = [matrix.register_forward_hook(note) for matrix in matrices]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def not_optimized(network: nn.Module, optimizers: Sequence[Any]) -> float:
    """Returns the share of the trained weights that no optimizer has."""
    known = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    trained = [p for p in network.parameters() if p.requires_grad]
    return sum(p.numel() for p in trained if id(p) not in known) / max(sum(p.numel() for p in trained), 1)


def _other(ids: Tensor, chosen: Tensor, network: Any) -> Tensor:
    return torch.where(chosen.to(ids.device), (ids + 1) % network.vocab_size, ids)


def _ratio(forbidden: Tensor, allowed: Tensor) -> float:
    most, usual = float(forbidden.max()), float(allowed.max())
    return most / usual if usual > 0 else 0.0


def _logits(network: Any, batch: Mapping[str, Any]) -> Tensor:
    logits: Tensor = network.logits(network(batch)).float()
    return logits


@torch.no_grad()
def inner_state(network: Any, batch: Mapping[str, Any]) -> dict[str, float]:
    """Returns figures of logits, attention, hidden units and experts on a batch.

    `doctor/logit_deviation` over the vocabulary and `doctor/max_logit`; `doctor/attention_entropy`, of the block where it is
    least, over that of equal weights; `doctor/block_adds`, how large what a block adds is beside its input, of the one where it is least; `doctor/blocks_idle`, how
    many blocks are not run; `doctor/dead_units`, the share of hidden units that are next to 0 for all tokens in the
    block where most are; `doctor/experts_unused`, the share that no token chooses in the layer where most are, given
    `TOKENS_PER_EXPERT` choices for each.
    """
    zeros: list[Tensor] = []
    added: list[Tensor] = []
    idle = set(range(len(network.blocks)))
    readers = network.parts_by_kind().get(MLP_READERS, ()) if isinstance(network, NamesParts) else ()
    handles = [
        reader.register_forward_pre_hook(
            lambda _, inputs: zeros.append(_dead(inputs[0].flatten(0, -2).abs()))
        )
        for reader in readers
    ]
    handles += [
        block.register_forward_hook(lambda _, inputs, output: added.append(_added(inputs[0], _first(output))))
        for block in network.blocks
    ]
    handles += [
        block.register_forward_pre_hook(lambda _, inputs, number=number: idle.discard(number))
        for number, block in enumerate(network.blocks)
    ]
    try:
        with (
            evaluating(network),
            _AttentionEntropy() as attention,
            routings_of(network) as routings,
        ):
            logits = _logits(network, batch)
    finally:
        for handle in handles:
            handle.remove()
    found = {
        "doctor/logit_deviation": float(logits.std(-1).mean()),
        "doctor/max_logit": float(logits.abs().max()),
        "doctor/blocks_idle": float(len(idle)),
    }
    if attention.found:
        found["doctor/attention_entropy"] = float(torch.stack(attention.found).min())
    if added:
        found["doctor/block_adds"] = float(torch.stack(added).min())
    if zeros:
        found["doctor/dead_units"] = float(torch.stack(zeros).max())
    if routings and routings[0].experts.numel() >= TOKENS_PER_EXPERT * (count := count_experts(network)):
        chosen = [routing.experts.unique().numel() for routing in routings]
        found["doctor/experts_unused"] = 1 - min(chosen) / count
    return found


@contextmanager
def routings_of(network: Any) -> Iterator[list[Routing]]:
    """Collects what the routers return within the context; nothing of a network without experts."""
    if isinstance(network, RoutesTokens):
        with recorded(network) as found:
            yield found
    else:
        yield []


TOKENS_PER_EXPERT = 16
"""Of as many tokens for each, a router that has not been trained sends some to each expert."""


def _added(before: Tensor, after: Tensor) -> Tensor:
    """Returns how large what a block adds is beside what it was given; what it adds to all tokens alike, as a bias, does not count."""
    more = (after.float() - before.float()).flatten(0, -2)
    return (more - more.mean(0)).norm() / before.float().norm().clamp(min=1e-30)


def _dead(units: Tensor) -> Tensor:
    """Returns the share of units, (tokens, units), whose largest value is next to nothing beside those of others."""
    largest = units.amax(0)
    return (largest <= 1e-6 * largest.amax()).float().mean()


def backward_gains(network: Any, batch: Mapping[str, Any]) -> dict[str, float]:
    """Returns by how much the gradient of the next-token loss grows on its way down through a block.

    Of the hidden states between blocks, so that what a layer's own losses add to weights does not count:
    `doctor/gain_most` and `doctor/gain_least` of one block, `doctor/gain_through` of as many as there are with the least one, and the
    loss, `doctor/next_loss`.
    """
    states: list[Tensor] = []
    handles = [
        block.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]), prepend=True)
        for block in network.blocks
    ]
    handles.append(
        network.blocks[-1].register_forward_hook(lambda _, __, output: states.append(_first(output)))
    )
    try:
        with torch.enable_grad(), evaluating(network):
            logits = _logits(network, batch).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED_LABEL)
            if len(states) != len(network.blocks) + 1 or not all(state.requires_grad for state in states):
                return {"doctor/next_loss": float(loss.detach())}
            gradients = torch.autograd.grad(loss, states, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    norms = torch.stack(
        [torch.zeros((), device=loss.device) if one is None else one.float().norm() for one in gradients]
    )
    norms = norms.clamp(min=1e-30)
    gains = norms[:-1] / norms[1:]
    found = {"doctor/gain_most": float(gains.max()), "doctor/gain_least": float(gains.min())}
    found["doctor/gain_through"] = float(gains.min()) ** len(gains)
    return {**found, "doctor/next_loss": float(loss.detach())}


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


@torch.no_grad()
def coarse_share(network: Any) -> float:
    """Returns the share of float32 matrices of blocks that take few values, as if they were of 8 bits, or of few digits, as of 16."""
    coarse: list[bool] = []
    for parameter in [p for block in network.blocks for p in block.parameters()]:
        values = parameter.detach().flatten()[:65_536].contiguous()
        if (
            parameter.dtype == torch.float32
            and parameter.ndim > 1
            and values.numel() >= 2048
            and bool(values.any() and values.isfinite().all())
        ):
            few = values.unique().numel() < 0.2 * values.numel()
            coarse.append(few or few_digits(values) > 0.9)
    return sum(coarse) / max(len(coarse), 1)


def few_digits(values: Tensor) -> float:
    """Returns the share of some float32 values, of those that are not 0, that a type of 16 bits could hold."""
    values = values.detach().float().flatten()
    values = values[values != 0].contiguous()
    return float(((values.view(torch.int32) & 0x1FFF) == 0).float().mean()) if len(values) else 0.0


def _units_alike(matrix: Tensor) -> float:
    """Returns the share of a matrix's rows or columns, whichever is more, that are like others of it."""
    rows = matrix.detach().double().flatten(0, -2)
    random = torch.Generator().manual_seed(0)
    shares = [0.0]
    for one in (rows, rows.T):
        weights = torch.rand(one.shape[1], generator=random, dtype=torch.float64).to(one.device)
        sums = (one @ weights)[one.any(1)]
        if sums.numel() > 1:
            shares.append(1 - sums.unique().numel() / sums.numel())
    return max(shares)


@torch.no_grad()
def weights_at_start(network: Any) -> dict[str, float]:
    """Returns figures of the weights before the first step.

    `doctor/frozen`, the share that is not trained; `doctor/blocks_of_zeros`; `doctor/matrices_unlike`, by how much a matrix of one
    block is larger or smaller than it is in the others, and `doctor/blocks_unlike`, the same of most matrices of a block; `doctor/head_is_copy`, 1 if the head has the values of
    the embedding, but is not the same tensor; `doctor/units_alike`, the share of a matrix's rows or columns that are like others.
    """
    blocks = [{name: p for name, p in block.named_parameters() if p.ndim > 1} for block in network.blocks]
    empty = [bool(block) and not any(bool(p.any()) for p in block.values()) for block in blocks]
    found = {"doctor/frozen": frozen_share(network), "doctor/blocks_of_zeros": float(sum(empty))}
    alike = [
        _units_alike(parameter)
        for block in blocks
        for parameter in block.values()
        if parameter.dtype.is_floating_point
    ]
    found["doctor/units_alike"] = max(alike, default=0.0)
    sizes = [{name: float(p.float().square().mean().sqrt()) for name, p in block.items()} for block in blocks]
    kept = [
        (block, {name: statistics.median(b[name] for b in sizes if name in b) for name in block})
        for block in sizes
    ]
    unlike = [
        [
            max(size / usual[name], usual[name] / size)
            for name, size in block.items()
            if size > 0 < usual[name]
        ]
        for block, usual in kept
    ]
    if any(unlike):
        found["doctor/blocks_unlike"] = max(statistics.median(each) for each in unlike if each)
        found["doctor/matrices_unlike"] = max(max(each) for each in unlike if each)
    head, kinds = network.output_weight, network.parts_by_kind() if isinstance(network, NamesParts) else {}
    for table in [p for module in kinds.get("embedding", ()) for p in module.parameters()]:
        if head is not None and table is not head and table.shape == head.shape and bool(table.any()):
            found["doctor/head_is_copy"] = float(
                table.data_ptr() != head.data_ptr() and bool(torch.equal(table, head))
            )
    return found


class _AttentionEntropy(TorchFunctionMode):
    """Notes the entropy of the weights of each call of `scaled_dot_product_attention`, over that of equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self._note(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **more: Any
    ) -> None:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q.float() @ k.float().mT * (more.get("scale") or q.shape[-1] ** -0.5)
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        if more.get("is_causal"):
            visible = visible.tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            visible = visible & attn_mask
        elif attn_mask is not None:
            scores, visible = scores + attn_mask.float(), visible & (attn_mask > -torch.inf)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        entropy = -torch.xlogy(weights, weights).sum(-1)
        most = visible.sum(-1).clamp(min=1).log().expand_as(entropy)
        several = most > 1.0  # of three tokens and more
        if bool(several.any()):
            self.found.append((entropy[several] / most[several]).mean())


@torch.no_grad()
def plain_loss(module: Any, batches: Sequence[Mapping[str, Any]]) -> float:
    """Returns the mean loss over the labels of some batches, of all ranks, without what training adds to it, such as dropout."""
    sums = torch.zeros(2, dtype=torch.float64, device=module.device)
    with evaluating(module.network), evaluating(module.objective):
        for batch in batches:
            loss, _ = module.objective.loss(module.network, batch)
            sums += torch.stack((loss.total.double(), loss.weight.double()))
    total, weight = module.sum_over_ranks(sums).tolist()
    return total / max(weight, 1.0)


def frozen_share(network: nn.Module) -> float:
    """Returns which share of the network's weights is not trained."""
    total = sum(parameter.numel() for parameter in network.parameters())
    return sum(p.numel() for p in network.parameters() if not p.requires_grad) / max(total, 1)
