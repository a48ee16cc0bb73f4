"""Objectives that each break a promise."""

import torch
import torch.nn.functional as F

from core.contracts import IGNORED_LABEL, Objective, TokenSum


class Sound(Objective):
    """The cross-entropy, summed."""

    def loss(self, network, batch):
        labels = batch["labels"]
        logits = network.logits(network(batch)).flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
        return self.summed(losses.view_as(labels), labels != IGNORED_LABEL), {}

    def summed(self, losses, counts):
        return TokenSum(losses.sum(), counts.sum())


class MeanOfMeans(Sound):
    """Averages each row, then the rows: a token in a short row weighs more."""

    def summed(self, losses, counts):
        return TokenSum((losses.sum(1) / counts.sum(1).clamp(min=1)).mean() * counts.sum(), counts.sum())


class CountingAll(Sound):
    """Counts positions without a label among the tokens."""

    def summed(self, losses, counts):
        return TokenSum(losses.sum(), torch.tensor(counts.numel()))


class Penalised(Sound):
    """Adds a z-loss that is divided by the number of labels, also where there is none."""

    def loss(self, network, batch):
        (total, tokens), _ = super().loss(network, batch)
        counts = (batch["labels"] != IGNORED_LABEL).float()
        penalty = network.logits(network(batch)).logsumexp(-1).square()
        return TokenSum(total + (penalty * counts / counts.sum()).sum() * tokens, tokens), {}


class Detached(Sound):
    def summed(self, losses, counts):
        return TokenSum(losses.sum().detach().requires_grad_(), counts.sum())


class TrainingMean(Sound):
    """Adds, in training alone, a mean where a sum belongs."""

    def summed(self, losses, counts):
        total, tokens = super().summed(losses, counts)
        return TokenSum(total + (losses.square().mean() if self.training else 0.0), tokens)


class TrainingAll(Sound):
    """Counts, in training alone, positions without a label too."""

    def summed(self, losses, counts):
        return TokenSum(losses.sum(), torch.tensor(counts.numel()) if self.training else counts.sum())


class TrainingDivision(Sound):
    """Divides, in training alone, by the number of labels of each row."""

    def summed(self, losses, counts):
        total, tokens = super().summed(losses, counts)
        if self.training:
            total = total + 0.1 * (losses.sum(1) / counts.sum(1)).mean() * tokens
        return TokenSum(total, tokens)


class TrainingTerm(Sound):
    """Adds, in training alone, a term as it should be: sound."""

    def summed(self, losses, counts):
        total, tokens = super().summed(losses, counts)
        return TokenSum(total + (0.1 * losses.square().sum() if self.training else 0.0), tokens)
