"""Evaluations that each break a promise."""

import torch

from toolkit.evaluation import Evaluation, Item, Measured


class Comparing(Evaluation):
    """Gives each item its length in proportion to the longest of those that come with it.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Comparing}}}}]}
    """

    def items(self, model):
        return [Item(str(number), "alpha " * number) for number in range(1, 4)]

    def measure(self, model, items):
        longest = max((len(item.content) for item in items), default=1)
        return [Measured({"items": 1.0, "length": len(item.content) / longest}) for item in items]

    @staticmethod
    def figures(sums):
        return {"length": sums["length"] / sums["items"]} if sums.get("items") else {}


class Namesakes(Evaluation):
    """Gives all items one name.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Namesakes}}}}]}
    """

    def items(self, model):
        return [Item("text", "alpha " * number) for number in range(1, 4)]

    def measure(self, model, items):
        return [Measured({"items": 1.0, "length": float(len(item.content))}) for item in items]

    @staticmethod
    def figures(sums):
        return {"length": sums["length"] / sums["items"]} if sums.get("items") else {}


class Undefined(Evaluation):
    """Has a figure where there are no items.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Undefined}}}}]}
    """

    def items(self, model):
        return [Item(str(number), "alpha " * number) for number in range(1, 4)]

    def measure(self, model, items):
        return [Measured({"items": 1.0, "length": float(len(item.content))}) for item in items]

    @staticmethod
    def figures(sums):
        return {"length": sums.get("length", 0.0) / max(sums.get("items", 0.0), 1.0)}


class Drawing(Evaluation):
    """Draws from the generator of the run.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Drawing}}}}]}
    """

    def items(self, model):
        return [Item(str(number), "alpha " * number) for number in range(1, 4)]

    def measure(self, model, items):
        torch.rand(1)
        return [Measured({"items": 1.0, "length": float(len(item.content))}) for item in items]

    @staticmethod
    def figures(sums):
        return {"length": sums["length"] / sums["items"]} if sums.get("items") else {}


class Sound(Evaluation):
    """Measures the length of texts.

    Example:
        trainer: {callbacks+: [{class_path: Evaluate, init_args: {evaluations: {own: {class_path: Sound}}}}]}
    """

    def items(self, model):
        return [Item(str(number), "alpha " * number) for number in range(1, 4)]

    def measure(self, model, items):
        return [Measured({"items": 1.0, "length": float(len(item.content))}) for item in items]

    @staticmethod
    def figures(sums):
        return {"length": sums["length"] / sums["items"]} if sums.get("items") else {}
