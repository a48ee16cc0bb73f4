"""A quadratic problem whose gradient and gradient noise are known, for LanguageModule."""

import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader

from core.contracts import Network, Objective, TokenSum

WIDTH, ROWS, LENGTH = 8, 8, 4
DISTANCE, SIGMA = 0.5, 1.0
NOISE_SCALE = WIDTH * SIGMA**2 / (WIDTH * DISTANCE**2)
"""tr(S) / |G|^2 in tokens."""


class Point(Network):
    """One vector of weights."""

    vocab_size = 2
    max_sequence_length = None

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(WIDTH))

    def init_weights(self):
        nn.init.zeros_(self.place)

    def forward(self, batch, cache=None):
        return self.place.expand(*batch["input_ids"].shape, WIDTH)

    @property
    def blocks(self):
        return []

    @property
    def output_weight(self):
        return None

    def flops_per_token(self, sequence_length):
        return 1.0


class Distance(Objective):
    """Half the squared distance from each token's own point: the gradient of a token is place - point."""

    loss_unit = "squared distance"

    def loss(self, network, batch):
        squares = (network(batch) - batch["points"]).square().sum(-1) / 2
        return TokenSum(squares.sum(), torch.tensor(squares.numel())), {}


class Points(LightningDataModule):
    """Points around one at `DISTANCE` in each direction, with a standard deviation of `SIGMA`.

    Args:
        batches: Micro-batches of an epoch on each rank.
        rows: Rows of a micro-batch on each rank.
    """

    sequence_length = LENGTH

    def __init__(self, batches: int = 400, rows: int = ROWS):
        super().__init__()
        self.batches, self.rows = batches, rows

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1 + self.trainer.global_rank)
        size = self.batches, self.rows, LENGTH, WIDTH
        points = DISTANCE + SIGMA * torch.randn(size, generator=generator)
        ids = torch.zeros(self.rows, LENGTH, dtype=torch.int64)
        batches = [{"input_ids": ids, "labels": ids, "points": some} for some in points]
        return DataLoader(batches, batch_size=None)
