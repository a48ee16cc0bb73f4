"""Prompts that are dealt out one a row, each batch several times in succession."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from core.contracts import Batch
from datamodules.packing.grouped import Row
from datamodules.records.record_batches import PADDING, PaddedRecords
from toolkit.rollouts import RECORDS, TURNS


class _Rows(list[Row]):
    """Rows of a global batch that know how often they have been dealt out before."""

    turn = 0


@dataclass(eq=False)
class PromptBatches(PaddedRecords):
    """One rank's batches of prompts, with the numbers of their records and of the turn.

    Args:
        turns: How often each batch is dealt out. The turn is part of the cursor.
    """

    turns: int = 1

    def __len__(self) -> int:
        return super().__len__() * self.turns

    def take(self, cursor: dict[str, Any], count: int) -> tuple[_Rows, dict[str, Any]]:
        """Returns the rows of the next batches, `count` in all, and the cursor behind them."""
        taken = _Rows()
        at_once = self.batch_size * self.world_size
        while count > 0:
            turn, place = cursor.get("turn", 0), {**cursor, "turn": 0}
            rows, after = super().take(place, min(count, at_once))
            if not rows:
                break
            taken += rows
            taken.turn = turn
            cursor = {**place, "turn": turn + 1} if turn + 1 < self.turns else {**after, "turn": 0}
            count -= at_once
        return taken, cursor

    def read(self, rows: Sequence[Row], own: slice) -> Batch:
        """Returns a slice of the rows as a batch."""
        batch: dict[str, torch.Tensor] = {**cast(Any, super().read(rows, own))}
        mine = [row[0][0] if row else PADDING for row in rows[own]]
        mine += [PADDING] * (len(batch["input_ids"]) - len(mine))
        turn = rows.turn if isinstance(rows, _Rows) else 0
        batch[RECORDS], batch[TURNS] = torch.tensor(mine), torch.full((len(mine),), turn)
        return cast(Batch, batch)
