"""Evaluations that each break a promise."""

import torch

from toolkit.evaluation import Evaluation, Item, Measured


class Lengths(Evaluation):
    """Measures the length of texts; what is wrong with the others is theirs."""

    def items(self, model):
        return [Item(str(number), "alpha " * number) for number in range(1, 4)]

    def measure(self, model, items):
        return [Measured({"items": 1.0, "length": float(len(item.content))}) for item in items]

    @staticmethod
    def figures(sums):
        return {"length": sums["length"] / sums["items"]} if sums.get("items") else {}


class Comparing(Lengths):
    """Gives each item its length in proportion to the longest of those that come with it.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Comparing}}}}]}
    """

    def measure(self, model, items):
        longest = max((len(item.content) for item in items), default=1)
        return [Measured({"items": 1.0, "length": len(item.content) / longest}) for item in items]


class Namesakes(Lengths):
    """Gives all items one name.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Namesakes}}}}]}
    """

    def items(self, model):
        return [Item("text", "alpha " * number) for number in range(1, 4)]


class Undefined(Lengths):
    """Has a figure where there are no items.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Undefined}}}}]}
    """

    @staticmethod
    def figures(sums):
        return {"length": sums.get("length", 0.0) / max(sums.get("items", 0.0), 1.0)}


class Drawing(Lengths):
    """Draws from the generator of the run.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Drawing}}}}]}
    """

    def measure(self, model, items):
        torch.rand(1)
        return super().measure(model, items)


class Sound(Lengths):
    """Measures the length of texts.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Sound}}}}]}
    """
