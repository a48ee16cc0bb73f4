"""Reward and distance from the reference of training on rewards, on a toy task.

    python -m tests.benchmarks.on_policy

A random GPT of two layers answers short prompts with up to 8 tokens; the reward of an answer is the share of its tokens in the
lower half of the vocabulary, half at first. For each objective and seed: the mean reward of the first rollout and of the
best of its 8 answers to each prompt, then of the last four rollouts, with their KL divergence from the start in nats per token.
RejectionSampling has four times the prompts in a rollout, and five eighths of the rollouts.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from plugins.objectives.grpo import GRPO
from plugins.objectives.ppo import PPO
from plugins.objectives.rejection_sampling import RejectionSampling
from tests.support.rewarded import on_policy
from toolkit.rewards import KL, REWARD
from toolkit.rollouts import OnPolicyObjective

OBJECTIVES: dict[str, Callable[[], OnPolicyObjective]] = {
    "GRPO": lambda: GRPO(kl=0.1),
    "Dr. GRPO": lambda: GRPO(kl=0.05, baseline="mean", weigh="room"),
    "RLOO": lambda: GRPO(kl=0.05, baseline="leave_one_out"),
    "PPO": lambda: PPO(kl=0.02),
    "PPO, adaptive KL": lambda: PPO(kl=0.02, kl_target=0.5),
    "RejectionSampling": lambda: RejectionSampling(keep_reference=True),
}
BATCHES, SHARES = {"RejectionSampling": 32}, {"RejectionSampling": 0.625}
"""Prompts of a rollout where they are not 8, and share of the steps: nothing but its end holds RejectionSampling to the start."""

LAST = 4


def measured(name: str, seed: int, steps: int) -> tuple[float, float, float, float]:
    """Returns the first reward, that of the best of 8, the last reward and the last divergence."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"rollouts": {"samples": 8}, "limit_val_batches": 0, "seed": seed}
        prompts, steps = BATCHES.get(name, 8), round(SHARES.get(name, 1) * steps)
        _, _, figures = on_policy(Path(folder), OBJECTIVES[name](), steps, batch_size=prompts, **options)
    last = figures[-LAST:]
    return (
        figures[0][REWARD],
        figures[0]["rollout/best"],
        fmean(one[REWARD] for one in last),
        fmean(one[KL] for one in last),
    )


def main() -> None:
    """Prints a line for each objective and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(
        "| objective | seed | first | best of 8 | last | KL nats/token | s |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name in OBJECTIVES:
        for seed in range(options.seeds):
            start = time.perf_counter()
            found = measured(name, seed, options.steps)
            shown = " | ".join(f"{value:.3f}" for value in found)
            print(f"| {name} | {seed} | {shown} | {time.perf_counter() - start:.1f} |", flush=True)


if __name__ == "__main__":
    main()
