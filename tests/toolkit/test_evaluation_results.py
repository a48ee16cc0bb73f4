"""Stored results: what is damaged is said, ranks that fail, groups."""

import threading

import pytest

from core.errors import ConfigError
from tests.support.evaluated import certain, model
from toolkit.evaluation import Evaluation, Item, Measured
from toolkit.evaluation_results import (
    ALONE,
    Ranks,
    Results,
    evaluate,
    flat_figures,
    read_items,
    read_results,
    write_results,
)


class Lengths(Evaluation):
    def __init__(self, texts, groups=("",)):
        self.texts, self.groups = texts, groups

    def items(self, model):
        return [Item(f"{n}", text, self.groups[n % len(self.groups)]) for n, text in enumerate(self.texts)]

    def measure(self, model, items):
        return [
            Measured({"items": 1, "length": float(item.content)}, {"shown": item.content}) for item in items
        ]

    @staticmethod
    def figures(sums):
        return {"length": sums["length"] / sums["items"]} if sums.get("items") else {}


TEXTS = ["1", "2", "3", "4", "6"]


def on_ranks(evaluation, size):
    """Returns what each of so many ranks, threads here, finds."""
    given, barrier = [None] * size, threading.Barrier(size)
    found = [None] * size

    def work(rank):
        def gather(value):
            given[rank] = value
            barrier.wait()
            return list(given)

        try:
            found[rank] = evaluate(
                "set", evaluation, model(certain(257, lambda ids: 0)), Ranks(rank, size, gather)
            )
        except ConfigError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("size", [1, 2, 7])
def test_ranks_share_the_items_and_all_have_the_same_result(size):
    alone = evaluate("set", Lengths(TEXTS, ("a", "b")), model(certain(257, lambda ids: 0)), ALONE)
    assert all(one == alone for one in on_ranks(Lengths(TEXTS, ("a", "b")), size))
    assert alone.figures["length"].value == 16 / 5
    assert flat_figures({"set": alone}) == {
        "eval/set/length": 16 / 5,
        "eval/set/a/length": 10 / 3,
        "eval/set/b/length": 3.0,
    }


def test_an_item_that_cannot_be_measured_fails_on_every_rank():
    found = on_ranks(Lengths([*TEXTS[:3], "nan"]), 2)
    assert found == ["evaluation set: length of the item 3 is nan: have the weights diverged?"] * 2


class UnreadOnOther(Lengths):
    measured = False

    def items(self, model):
        if threading.current_thread().name == "other":
            raise ConfigError("books.txt cannot be read")
        return super().items(model)

    def measure(self, model, items):
        self.measured = True  # it would wait for the other rank in the network
        return super().measure(model, items)


def test_a_file_that_one_of_those_with_the_same_share_cannot_read_fails_on_both_before_the_network_is_called():
    evaluation, barrier, given, found = UnreadOnOther(TEXTS), threading.Barrier(2), {}, {}

    def work():
        name = threading.current_thread().name

        def agree(fault):
            given[name] = fault
            barrier.wait()
            return next(filter(None, given.values()), "")

        try:
            ranks = Ranks(0, 1, lambda value: [value], agree)
            evaluate("set", evaluation, model(certain(257, lambda ids: 0)), ranks)
        except ConfigError as error:
            found[name] = str(error)

    threads = [threading.Thread(target=work, name=name) for name in ("first", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(("first", "other"), "evaluation set: books.txt cannot be read")
    assert not evaluation.measured


def test_results_are_read_back_and_damage_is_said(tmp_path):
    found = evaluate("set", Lengths(TEXTS), model(certain(257, lambda ids: 0)))
    place = write_results(Results(3, 100, "abc", "", {"set": found}), tmp_path)
    [back] = read_results(tmp_path)
    assert (back.step, back.tokens, back.sets["set"].figures) == (3, 100, found.figures)
    assert read_items(tmp_path, 3, "set") == [dict(row) for row in found.rows]
    (place / "set.jsonl").write_text('{"id": "0", "sums": []}\n')
    with pytest.raises(ConfigError, match=r"set.jsonl is not as Evaluate writes it"):
        read_items(tmp_path, 3, "set")
    text = (place / "results.json").read_text()
    for damaged in ("{}", text.replace('"set"', '"../set"'), text[:40], text.replace("3.2", "NaN")):
        (place / "results.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"results.json is not as Evaluate writes it"):
            read_results(tmp_path)
