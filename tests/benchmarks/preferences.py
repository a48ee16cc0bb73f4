"""Win rates after training on preferences: `python -m tests.benchmarks.preferences`.

A network of 8 thousand weights answers with 8 letters at random and learns that more a's are better: see
`tests.support.preference_task`. Prints win rate, divergence and CPU seconds for each objective and three seeds, and the share of new
pairs that reward models order right.
"""

import tempfile
import time
import warnings
from pathlib import Path

from plugins.objectives.dpo import DPO
from plugins.objectives.kto import KTO
from plugins.objectives.orpo import ORPO
from plugins.objectives.simpo import SimPO
from tests.support.preference_task import base, compared, ordered, preferring

SEEDS = (0, 1, 2)

RUNS = {
    "DPO": lambda: DPO(beta=0.1),
    "DPO, label_smoothing 0.1": lambda: DPO(beta=0.1, label_smoothing=0.1),
    "DPO, kind ipo": lambda: DPO("ipo", beta=0.5),
    "DPO, kind hinge": lambda: DPO("hinge", beta=0.1),
    "KTO": lambda: KTO(beta=0.1),
    "ORPO, weight 1": lambda: ORPO(weight=1.0),
    "ORPO, weight 3": lambda: ORPO(weight=3.0),
    "SimPO": lambda: SimPO(beta=2.0, gamma=1.0),
}


def main() -> None:
    """Prints a table."""
    warnings.simplefilter("ignore")
    print(
        "| objective | win rates of 3 seeds | nats per token from the start | CPU s |\n| --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as folder:
        starts = {seed: base(Path(folder, str(seed)), seed) for seed in SEEDS}
        same = [compared(starts[seed], starts[seed], seed)[0] for seed in SEEDS]
        print(f"| none | {', '.join(f'{rate:.2f}' for rate in same)} | 0 | |")
        for number, (name, objective) in enumerate(RUNS.items()):
            begun, found = time.process_time(), []
            for seed in SEEDS:
                after = preferring(Path(folder, f"{number}-{seed}"), seed, objective(), starts[seed])
                found.append(compared(starts[seed], after, seed))
            rates, moved = (
                ", ".join(f"{value:.2f}" for value in column) for column in zip(*found, strict=True)
            )
            print(f"| {name} | {rates} | {moved} | {(time.process_time() - begun) / 3:.0f} |", flush=True)
        found = [ordered(Path(folder, f"reward-{seed}"), seed, starts[seed]) for seed in SEEDS]
        print(f"\nRewardModel, pairs in order: {', '.join(f'{share:.3f}' for share in found)}")


if __name__ == "__main__":
    main()
