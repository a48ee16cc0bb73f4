"""The three recipes that faults are injected into: small runs of a second or two, as configurations.

- `gpt`: a GPT with ReLU, AdamW and a cosine, on text without document masks.
- `llama`: a Llama with Muon and a WSD schedule, on packed documents.
- `moe`: an OLMoE of four experts with balanced routing and AdamW, on concatenated text with document masks.

Each also comes in two variants, with the same global batch and the same steps: `gpt-2-ranks` over two ranks, and
`gpt-resumed`, which is interrupted and resumed from its checkpoint.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

STEPS, LENGTH, ROWS, VOCABULARY = 48, 32, 8, 288
WARMUP = 6

_TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": STEPS,
    "log_every_n_steps": 1,
    "val_check_interval": 12,
    "check_val_every_n_epoch": None,
    "limit_val_batches": 4,
    "num_sanity_val_steps": 0,
    "gradient_clip_val": 1.0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
    "logger": [{"class_path": "MetricsCSV"}],
    "callbacks": [
        {"class_path": "WeightMonitor", "init_args": {"every_n_steps": 4}},
        {"class_path": "TrainingDoctor", "init_args": {"every_n_steps": 8}},
        {"class_path": "StepTime", "init_args": {"window": 16, "every_n_steps": 0}},
    ],
}

_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH, "n_head": 2, "n_embd": 32}

NETWORKS: dict[str, dict[str, Any]] = {
    "gpt": {
        "class_path": "GPT",
        "init_args": _SIZES | {"n_layer": 2, "position": "rotary", "activation": "relu"},
    },
    "llama": {
        "class_path": "Llama",
        "init_args": _SIZES | {"n_layer": 2, "n_kv_head": 1, "intermediate_size": 88, "init": "gpt2"},
    },
    "moe": {
        "class_path": "OLMoE",
        "init_args": _SIZES
        | {
            "n_layer": 2,
            "n_kv_head": 2,
            "intermediate_size": 48,
            "n_experts": 4,
            "experts_per_token": 2,
            "init": "gpt2",
        },
    },
}

OBJECTIVES: dict[str, dict[str, Any]] = {
    "gpt": {"class_path": "CausalLM"},
    "llama": {"class_path": "CausalLM"},
    "moe": {
        "class_path": "BalancedRouting",
        "init_args": {"objective": {"class_path": "CausalLM"}, "load_balancing": 0.01, "z_loss": 0.001},
    },
}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gpt": {"class_path": "AdamW", "init_args": {"lr": 8e-3}},
    "llama": {"class_path": "Muon", "init_args": {"lr": 2.5e-2, "ns_steps": 3}},
    "moe": {"class_path": "AdamW", "init_args": {"lr": 1e-2}},
}

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpt": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": WARMUP}},
    "llama": {"class_path": "WarmupStableDecay", "init_args": {"warmup_steps": WARMUP}},
    "moe": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": WARMUP}},
}

PACKINGS: dict[str, dict[str, Any]] = {
    "gpt": {"class_path": "Concatenate"},
    "llama": {"class_path": "BestFit"},
    "moe": {"class_path": "Concatenate", "init_args": {"mask_documents": True}},
}

RECIPES = tuple(NETWORKS)

RANKS, RESUMED = "2-ranks", "resumed"
VARIANTS = tuple(f"{name}-{variant}" for variant in (RANKS, RESUMED) for name in RECIPES)

INTERRUPTED = 22
"""The step after which a run is interrupted that is resumed."""

FEW = (8, 12, 20)
"""How many documents there are in the small corpora."""


def corpus(folder: Path) -> Path:
    """Writes the documents, once: the paragraphs of the topics of Python's `help()`, topic by topic; and a few of them."""
    path = folder / "topics.jsonl"
    if not all(
        (folder / name).exists() for name in ("topics.jsonl", *(f"topics-{few}.jsonl" for few in FEW))
    ):
        folder.mkdir(parents=True, exist_ok=True)
        texts = [
            part.strip()
            for name in sorted(topics)
            for part in re.split(r"\n\n(?=\S)", topics[name])
            if len(part.strip()) > 40
        ]
        lines = [json.dumps({"text": text}) + "\n" for text in dict.fromkeys(texts)]
        for few in FEW:
            chosen = lines[:: len(lines) // few][:few]
            (folder / f"topics-{few}.jsonl").write_text("".join(chosen), encoding="utf-8")
        path.write_text("".join(lines), encoding="utf-8")
    return path


def recipe(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Returns the configuration of a clean run.

    Args:
        name: One of `RECIPES` or `VARIANTS`.
        folder: Where text, prepared tokens and run folders go.
        seed: Of weights and of the order of the data.
    """
    name, _, variant = name.partition("-")
    values: dict[str, Any] = {
        "seed_everything": seed,
        "trainer": deepcopy(_TRAINER),
        "model": {
            "network": deepcopy(NETWORKS[name]),
            "objective": deepcopy(OBJECTIVES[name]),
            "optimizer": deepcopy(OPTIMIZERS[name]),
            "lr_scheduler": deepcopy(SCHEDULES[name]),
        },
        "data": {
            "class_path": "PretrainDataModule",
            "init_args": {
                "source": str(corpus(folder)),
                "cache_dir": str(folder / "cache"),
                "reader": {"class_path": "JSONLinesDocuments"},
                "tokenizer": {"class_path": "BPETokenizer", "init_args": {"vocab_size": VOCABULARY}},
                "writer": {"class_path": "TokenShards"},
                "packing": deepcopy(PACKINGS[name]),
                "sequence_length": LENGTH,
                "batch_size": ROWS,
                "seed": seed,
            },
        },
    }
    if name == "moe":
        values["trainer"]["callbacks"].insert(0, {"class_path": "RoutingMonitor"})
    if variant == RANKS:
        values["trainer"] |= {"devices": 2, "strategy": {"class_path": "DDP"}}
        values["trainer"]["callbacks"][-1]["init_args"]["every_n_steps"] = 8  # StepTime: communication, too
        values["data"]["init_args"]["batch_size"] = ROWS // 2
    if variant == RESUMED:
        interrupted = {"step": INTERRUPTED, "path": "${run_folder}/interrupted.ckpt"}
        values["trainer"]["callbacks"].append(
            {"class_path": "tests.faults.running.Interrupted", "init_args": interrupted}
        )
    return values
