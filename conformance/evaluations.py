"""Proofs for evaluations: sums of items, which add up, and figures that follow from them.

They measure the tiny run's network with random weights, whose tokens are bytes. A case names what files its arguments need.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite

import torch

from conformance.case import Case
from conformance.proof import proof, require
from conformance.rewards import selected
from core.contracts import Network
from plugins.cli.configuration.class_paths import qualify
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured

LENGTH = 512
"""Tokens that the network sees."""

END = "<|endoftext|>"


def build(case: Case) -> Evaluation:
    """Builds the evaluation with the case's arguments, or with those of its example."""
    from jsonargparse import ArgumentParser

    named = selected(case.overlay, (case.entry.name, case.entry.class_path))
    require(named is not None, "its example does not name it at a `class_path`")
    qualify(named)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--evaluation", type=Evaluation)
    found: Evaluation = parser.instantiate(parser.parse_object({"evaluation": named})).evaluation
    return found


def model_of(case: Case) -> EvaluatedModel:
    """Returns the network of the case's configuration, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {END: len(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    values = case.values["model"]["network"]["init_args"]
    if "max_sequence_length" in values:
        values["max_sequence_length"] = max(LENGTH, values["max_sequence_length"] or 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: Network = case.build("model.network", Network).eval()
    end = len(letters)
    return EvaluatedModel(network, tokenizer.to_str(), end, [end], batch_size=4)


def measured(evaluation: Evaluation, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
    """Returns what is measured of items, one for each, all numbers finite, the rest plain JSON."""
    with torch.no_grad():
        found = list(evaluation.measure(model, items))
    require(len(found) == len(items), f"`measure` gave {len(found)} results for {len(items)} items")
    for item, one in zip(items, found, strict=True):
        for name, value in one.sums.items():
            require(isfinite(value), f"{name} of the item {item.id!r} is {value!r}")
        json.dumps([one.sums, one.shown])
    return found


def _total(found: Sequence[Measured]) -> dict[str, float]:
    names = {name for one in found for name in one.sums}
    return {name: sum(one.sums.get(name, 0.0) for one in found) for name in names}


def _apart(one: Mapping[str, float], other: Mapping[str, float], tolerance: float) -> str:
    """Returns the first name whose values differ; empty: none."""
    for name in sorted({*one, *other}):
        first, second = one.get(name, 0.0), other.get(name, 0.0)
        if abs(first - second) > tolerance * max(1.0, abs(second)):
            return f"{name} is {first!r}, not {second!r}"
    return ""


@proof("evaluations")
def measures_each_item_alone(case: Case) -> None:
    """An item has the same sums, to rounding, in whatever company, and from a second instance; names of items are their own."""
    evaluation, model = build(case), model_of(case)
    items = list(evaluation.items(model))[:6]
    require(items, "it has no items")
    require(len({item.id for item in items}) == len(items), "two items have the same id")
    again = build(case)
    same = [item.digest for item in list(again.items(model))[:6]] == [item.digest for item in items]
    require(same, "a second instance has other items")
    usual = measured(evaluation, model, items)
    alone = [measured(evaluation, model, [item])[0] for item in items]
    reverse = measured(again, model, items[::-1])[::-1]
    for found, where in ((alone, "alone"), (reverse, "in reverse order, from a second instance")):
        for item, one, other in zip(items, found, usual, strict=True):
            apart = _apart(one.sums, other.sums, case.tolerance)
            require(not apart, f"{where}, {apart} of the item {item.id!r}")


@proof("evaluations")
def figures_follow_from_sums(case: Case) -> None:
    """Figures are finite numbers that sums alone decide, and without items there are none, and no error."""
    evaluation, model = build(case), model_of(case)
    items = list(evaluation.items(model))[:6]
    total = _total(measured(evaluation, model, items))
    figures = type(evaluation).figures(total)
    require(figures, "there are no figures")
    for name, value in figures.items():
        require(isfinite(value), f"the figure {name} is {value!r}")
    require(not type(evaluation).figures({}), "without items there are figures")
    require(measured(evaluation, model, []) == [], "for no items it gives results: a rank may have none")


@proof("evaluations")
def leaves_the_network_alone(case: Case) -> None:
    """Measuring changes neither weights nor modes of the network, and draws no random numbers of the run."""
    evaluation, model = build(case), model_of(case)
    items = list(evaluation.items(model))[:2]
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    state = torch.default_generator.get_state()
    measured(evaluation, model, items)
    require(torch.equal(torch.default_generator.get_state(), state), "it draws from torch's global generator")
    require(not any(module.training for module in model.network.modules()), "a module is in training mode")
    for name, value in model.network.state_dict().items():
        require(torch.equal(value, before[name]), f"the weight {name} has changed")
