"""Training steps of leyden beside litgpt, transformers' Trainer and loops written by hand, on the CPU.

    python -m tests.benchmarks.against_peers --out FOLDER

Each measurement is a process of its own; the sides take turns, round by round. All train a Llama of the same sizes on the same
random rows, with AdamW and clipping at 1; the data notes when a batch is fetched, so that every side is measured alike. leyden
and transformers run at their defaults, litgpt too (it compiles, logs each step), the hand-written loop trains leyden's network and loss.
litgpt is installed without its dependencies into an environment in FOLDER, on top of this one.

The ratio of a side is its time over leyden's in the same round, the median over rounds: above 1, leyden is faster. A round in
which other programs took more than `--other-load` of the cores is dropped. With `--cpu`, CPU seconds are compared, for machines
that are never quiet.

How long each round took is said on stderr; a round of 1.1M takes one to two minutes, the first also compiles. `--sizes`,
`--precisions` and `--sides` choose parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[2]
SIZES = {
    "1.1M": {
        "vocab_size": 512,
        "n_layer": 4,
        "n_head": 4,
        "n_kv_head": 4,
        "n_embd": 144,
        "intermediate_size": 384,
    },
    "10M": {
        "vocab_size": 4096,
        "n_layer": 6,
        "n_head": 5,
        "n_kv_head": 5,
        "n_embd": 320,
        "intermediate_size": 864,
    },
    "30M": {
        "vocab_size": 8192,
        "n_layer": 8,
        "n_head": 8,
        "n_kv_head": 8,
        "n_embd": 480,
        "intermediate_size": 1280,
    },
}
SIDES = ("leyden", "leyden compiled", "litgpt", "transformers", "by hand", "by hand compiled")
ROWS, LENGTH = 8, 128
WARM_UP = 25
"""Steps that are not measured: what is done once is in them, such as compilation, or the CPU's peak that leyden measures at step 20."""

COMMON = '''
import json, os, resource, sys, time, torch
size, warm_up, steps, folder, bf16 = json.loads(sys.argv[1])
torch.manual_seed(0)
STEPS = warm_up + steps
corpus = torch.randint(0, size["vocab_size"], (64, 8, 129))

class Watched:
    """Counts batches; leaves with the time per step when the last of them was trained on."""
    def __init__(self): self.fetched = 0
    def __call__(self):
        now = time.perf_counter(), time.process_time()
        if self.fetched == warm_up: self.begin = now
        if self.fetched == STEPS:
            print("MEASURED", *((end - start) / steps for start, end in zip(self.begin, now)), flush=True)
            os._exit(0)
        self.fetched += 1
watched = Watched()

def batches(make):
    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            for number in range(STEPS + 10):
                watched()
                yield make(corpus[number % len(corpus)])
    return Batches()

def ours(rows): return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
'''

LEYDEN = (
    COMMON
    + """
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from callbacks.loss_curve import LossCurve
from callbacks.periodic_checkpoint import PeriodicCheckpoint
from callbacks.progress_bar import ProgressBar
from callbacks.run_summary import RunSummary
from callbacks.throughput import Throughput
from core.language_module import LanguageModule
from plugins.cli.runs.kept_memory import keep_memory
from plugins.cli.runs.no_profiler import NoProfiler
from plugins.loggers.metrics_csv import MetricsCSV
from plugins.networks.llama import Llama
from plugins.objectives.causal_lm import CausalLM
from plugins.optimizers.adamw import AdamW
from plugins.schedules.warmup_cosine import WarmupCosine
keep_memory()  # as `fit` does
module = LanguageModule(lambda: Llama(max_sequence_length=128, tie_embeddings=False, **size), CausalLM(), lambda groups: AdamW(groups),
                        lambda optimizer: WarmupCosine(optimizer, warmup_steps=5))
more = []
if COMPILED:
    from callbacks.compile import Compile
    more = [Compile(scope="whole")]
trainer = Trainer(
    accelerator="cpu", devices=1, max_steps=STEPS + 5, gradient_clip_val=1.0, log_every_n_steps=10, enable_model_summary=False,
    num_sanity_val_steps=0, use_distributed_sampler=False, default_root_dir=folder, profiler=NoProfiler(),
    precision="bf16-mixed" if bf16 else None,
    logger=[TensorBoardLogger(folder, name="", version=""), MetricsCSV(str(folder))],
    callbacks=[ProgressBar(), Throughput(), LossCurve(), RunSummary(), *more,
               PeriodicCheckpoint(every_n_steps=200, dirpath=str(Path(folder) / "checkpoints"))])
trainer.fit(module, torch.utils.data.DataLoader(batches(ours), batch_size=None))
"""
)

LITGPT = (
    COMMON
    + """
from pathlib import Path
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import setup
class Rows(DataModule):
    def connect(self, **_): pass
    def train_dataloader(self): return torch.utils.data.DataLoader(batches(lambda rows: rows), batch_size=None)
    def val_dataloader(self): return torch.utils.data.DataLoader(list(corpus[:2]), batch_size=None)
vocabulary = size["vocab_size"]
config = Config(
    name="same", block_size=128, vocab_size=vocabulary, padded_vocab_size=vocabulary, n_layer=size["n_layer"],
    n_head=size["n_head"], n_embd=size["n_embd"], intermediate_size=size["intermediate_size"], rotary_percentage=1.0,
    parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", norm_eps=1e-5)
train = TrainArgs(save_interval=1000, log_interval=1, global_batch_size=8, micro_batch_size=8, max_tokens=10**9, max_norm=1.0,
                  min_lr=4e-5, lr_warmup_steps=5, tie_embeddings=False)
setup("same", config, Path(folder), "bf16-mixed" if bf16 else "32-true", data=Rows(), train=train,
      eval=EvalArgs(interval=10**6, max_iters=1), devices=1)
"""
)

TRANSFORMERS = (
    COMMON
    + """
import transformers
class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        for batch in batches(lambda rows: rows[:, :-1]):
            for row in batch: yield {"input_ids": row, "labels": row}
config = transformers.LlamaConfig(
    vocab_size=size["vocab_size"], hidden_size=size["n_embd"], intermediate_size=size["intermediate_size"],
    num_hidden_layers=size["n_layer"], num_attention_heads=size["n_head"], max_position_embeddings=128,
    tie_word_embeddings=False)
arguments = transformers.TrainingArguments(
    folder, max_steps=STEPS + 5, per_device_train_batch_size=8, use_cpu=True, report_to="none", bf16=bool(bf16))
transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=Rows()).train()
"""
)

BY_HAND = (
    COMMON
    + """
from plugins.networks.llama import Llama
from plugins.objectives.causal_lm import CausalLM
network, objective = Llama(max_sequence_length=128, tie_embeddings=False, **size), CausalLM()
optimizer = torch.optim.AdamW(network.parameters(), 3e-4, fused=True)
def loss_of(batch): return objective.loss(network, batch)[0].mean
if COMPILED: loss_of = torch.compile(loss_of)
for number, batch in enumerate(batches(ours)):
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(bf16)):
        loss = loss_of(batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    if number % 10 == 0: loss.item()
"""
)
PROGRAMS = {"leyden": LEYDEN, "litgpt": LITGPT, "transformers": TRANSFORMERS, "by hand": BY_HAND}


def litgpt_environment(folder: Path) -> str:
    """Returns the Python of an environment with litgpt, made once."""
    python = folder / "litgpt" / "bin" / "python"
    if not (folder / "litgpt" / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "litgpt")], check=True)
        [packages] = (folder / "litgpt" / "lib").glob("python*/site-packages")
        paths = [path for path in sys.path if path.endswith("-packages")]
        (packages / "below.pth").write_text("".join(f"{path}\n" for path in paths))
        install = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), "litgpt==0.5.13"]
        subprocess.run([str(python), *install], check=True)
        (folder / "litgpt" / "made").touch()
    return str(python)


def measured(side: str, values: list[object], python: str, threads: int) -> tuple[float, float]:
    """Returns wall and CPU seconds per step.

    Raises:
        RuntimeError: If the side ended without a measurement.
    """
    program = f"COMPILED = {side.endswith('compiled')}\n" + PROGRAMS[side.removesuffix(" compiled")]
    environ = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(HOUSE),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [python, "-c", program, json.dumps(values)]
    done = subprocess.run(command, cwd=str(values[3]), env=environ, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("MEASURED"):
            _, wall, cpu = line.split()
            return float(wall), float(cpu)
    raise RuntimeError(f"{side} ended without a measurement:\n{done.stderr[-2000:]}")


def busy_seconds() -> float:
    """Returns CPU seconds that all programs of this machine have used since its start."""
    fields = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def others_load(before: tuple[float, float, float]) -> float:
    """Returns the share of the cores that programs other than ours took since `before`."""
    times = os.times()
    busy, own, begin = before
    passed = (time.monotonic() - begin) * (os.cpu_count() or 1)
    return (busy_seconds() - busy - (times.children_user + times.children_system - own)) / passed


def main() -> None:
    """Prints a line for each size and precision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for environments and runs")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--other-load", type=float, default=0.1, metavar="SHARE")
    parser.add_argument("--cpu", action="store_true", help="compare CPU seconds, and drop no round")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pythons = {"litgpt": litgpt_environment(options.out)} if "litgpt" in options.sides else {}
    print(
        f"{options.threads} threads, {ROWS} rows of {LENGTH} tokens, {'CPU' if options.cpu else 'wall'} time over leyden's\n"
    )
    print(
        f"| size | leyden, ms/step | {' | '.join(side for side in options.sides if side != 'leyden')} | rounds |"
    )
    print("| --- " * (len(options.sides) + 2) + "|")
    for precision in options.precisions:
        for name in options.sizes:
            rounds = [
                one for _ in range(options.rounds) if (one := _round(name, precision, pythons, options))
            ]
            print(_line(f"{name} {precision}", rounds, options.sides), flush=True)


def _round(
    name: str, precision: str, pythons: dict[str, str], options: argparse.Namespace
) -> dict[str, float]:
    """Returns seconds per step of each side; nothing if other programs took part."""
    times = os.times()
    before = busy_seconds(), times.children_user + times.children_system, time.monotonic()
    found = {}
    for side in options.sides:
        folder = options.out / side.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        values = [SIZES[name], WARM_UP, options.steps, str(folder.resolve()), int(precision == "bf16")]
        found[side] = measured(side, values, pythons.get(side, sys.executable), options.threads)[options.cpu]
    print(f"{name} {precision}: a round of {time.monotonic() - before[2]:.0f} s", file=sys.stderr, flush=True)
    return found if options.cpu or others_load(before) <= options.other_load else {}


def _line(what: str, rounds: list[dict[str, float]], sides: list[str]) -> str:
    if not rounds:
        return f"| {what} | every round had other load | {' | ' * (len(sides) - 2)} | 0 |"
    ratios = [
        statistics.median(one[side] / one["leyden"] for one in rounds) for side in sides if side != "leyden"
    ]
    own = 1e3 * statistics.median(one["leyden"] for one in rounds)
    return f"| {what} | {own:.1f} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} | {len(rounds)} |"


if __name__ == "__main__":
    main()
