"""Steps of a small network whose threads spin or sleep while they wait, alone and beside other programs.

    python -m tests.benchmarks.crowded_cores

Each measurement is a process of its own, as OpenMP reads its setting once; both settings in turn. The other programs are
loops that compute, as many as are asked for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[2]
STEPS = """
import sys, time, torch
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
torch.manual_seed(0)
network, objective = GPT(vocab_size=512, n_layer=4, n_head=4, n_embd=144), CausalLM()
optimizer = torch.optim.AdamW(network.parameters(), fused=True)
ids = torch.randint(0, 512, (8, 129))
batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
def step():
    optimizer.zero_grad()
    objective.loss(network, batch)[0].mean.backward()
    optimizer.step()
for _ in range(3):
    step()
begin, steps = time.perf_counter(), 0
while time.perf_counter() - begin < float(sys.argv[1]):
    step()
    steps += 1
print((time.perf_counter() - begin) / steps)
"""


def measured(seconds: float, policy: str | None) -> float:
    """Returns seconds per step."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environ |= {"OMP_WAIT_POLICY": policy} if policy else {}
    command = [sys.executable, "-c", STEPS, str(seconds)]
    return float(
        subprocess.run(command, cwd=HOUSE, env=environ, check=True, capture_output=True, text=True).stdout
    )


def main() -> None:
    """Prints a line for each number of other programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--others", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    print(
        "| other programs | ms/step spinning | ms/step sleeping | ratio (smallest to largest) |\n| --- | --- | --- | --- |"
    )
    for count in options.others:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        try:
            pairs = [
                [measured(options.seconds, policy) for policy in (None, "passive")]
                for _ in range(options.rounds)
            ]
        finally:
            for process in busy:
                process.kill()
                process.wait()
        spinning, sleeping = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = sorted(spin / sleep for spin, sleep in pairs)
        print(
            f"| {count} | {spinning:.0f} | {sleeping:.0f} | {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
