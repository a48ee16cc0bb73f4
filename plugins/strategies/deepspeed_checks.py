"""Checks of DeepSpeedZero before the run: precision, optimizer, other techniques, machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.errors import nearest
from plugins.strategies.deepspeed_engine import library

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

ELEMENTWISE = (torch.optim.Adam, torch.optim.SGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)
"""Elementwise optimizers, which ZeRO's flat partitions need; AdamW is a subclass of Adam."""
FORMATS = {None: 32, "32": 32, "32-true": 32, "bf16": "bf16", "bf16-mixed": "bf16", "16": 16, "16-mixed": 16}
COMPILED = "deepspeed.ops."


def compatibility_errors(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each problem; `given` are the strategy's arguments."""
    given = {
        "stage": 2,
        "offload_optimizer": "none",
        "offload_parameters": "none",
        "nvme_path": None,
        **given,
    }
    stage = given["stage"]
    if given["offload_parameters"] != "none" and stage != 3:
        yield (
            f"offload_parameters is {given['offload_parameters']}, and stage {stage} keeps full "
            "parameters on the device: set stage to 3"
        )
    if given["offload_optimizer"] == "nvme" and stage != 3:
        yield f"offload_optimizer is nvme, which needs stage 3, not {stage}; cpu works with each stage"
    if "nvme" in (given["offload_optimizer"], given["offload_parameters"]):
        yield from _nvme(run, given["nvme_path"])
    optimizer = next((item for item in run.selected if item.key == "model.optimizer"), None)
    if optimizer is not None:
        yield from _optimizer(run, optimizer)
    yield from _precision(run, given)
    yield from _techniques(run, given)


def _nvme(run: Run, path: str | None) -> Iterator[str]:
    if not path:
        yield "nvme_path is missing: name a folder on the NVMe disk"
    elif not run.offline and not Path(path).is_dir():
        parent = Path(path).parent
        hint = nearest(Path(path).name, [p.name for p in parent.iterdir()] if parent.is_dir() else [])
        yield f"nvme_path is {path}, which is not a folder.{hint} Make it: mkdir -p {path}"
    if run.offline or find_spec("deepspeed") is None:
        return
    yield from _tools("nvme reads and writes with DeepSpeed's async_io, which")
    if not library(run.accelerator).ops.__compatible_ops__.get("async_io"):
        yield "nvme needs libaio, whose library and headers are not found: apt install libaio-dev, or offload to cpu"


def _tools(what: str) -> Iterator[str]:
    """Yields which tools are missing that DeepSpeed needs to compile."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        yield f"{what} is compiled when it is first used, and there is no C++ compiler ({compiler}): apt install g++"
    if shutil.which("ninja") is None and find_spec("ninja") is None:
        yield f"{what} is compiled when it is first used, and ninja is missing: pip install 'leyden[deepspeed]'"


def _optimizer(run: Run, item: Selected) -> Iterator[str]:
    target = item.target
    if item.class_path.startswith(COMPILED):
        if not run.offline:
            yield from (f"{line}, or take AdamW" for line in _tools(item.name))
    elif "elementwise" not in item.declaration.offers and not (
        isinstance(target, type) and issubclass(target, ELEMENTWISE)
    ):
        yield (
            f"{run.named(item)} cannot step flat partitions of many weights, as ZeRO has them: take AdamW, SGD, or "
            f"{COMPILED}adam.DeepSpeedCPUAdam; {item.name} runs under DDP"
        )


def _precision(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    own = [item for item in run.selected if item.kind == "precision" and item.key != "trainer.precision"]
    for item in own:
        yield (
            f"{run.named(item)} and DeepSpeed both change the format of weights: take "
            "--trainer.precision=32-true or bf16-mixed"
        )
    word = _word(run)
    place = run.place("trainer.precision")
    setting = f"precision {word}{f' ({place})' if place else ''}"
    if word not in FORMATS:
        yield f"{setting} is not supported by DeepSpeed: take 32-true or bf16-mixed, which keeps the optimizer's weights in float32"
    elif FORMATS[word] == 16 and run.accelerator == "cpu" and not run.offline:
        yield f"{setting} is not supported by DeepSpeed on a CPU: take bf16-mixed or 32-true"
    elif FORMATS[word] == "bf16" and given["stage"] == 1 and given["offload_optimizer"] == "none":
        yield f"stage 1 would sum gradients in bfloat16 under {setting}: take stage 2, which sums them in float32"


def _word(run: Run) -> str | None:
    word = run.argument("trainer.precision")
    return None if word is None else str(word)


def _techniques(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    by_name = {item.name: item for item in run.selected}
    if given["offload_optimizer"] == "nvme":
        yield from _on_disk(run, by_name)
    average = by_name.get("ExponentialMovingAverage")
    if average and (given["stage"] == 3 or FORMATS.get(_word(run)) != 32):
        yield (
            f"{run.named(average)} averages full weights in float32, which the network only has in stages 1 and 2 "
            "with --trainer.precision=32-true"
        )


def _on_disk(run: Run, by_name: Mapping[str, Selected]) -> Iterator[str]:
    where = "are on the disk: set offload_optimizer to cpu"
    if monitor := by_name.get("WeightMonitor"):
        yield f"{run.named(monitor)} keeps the optimizer's weights of a step, which {where}"
    values = f"clips single values of gradients, which {where}, or clip their norm"
    if (clip := by_name.get("GradientClip")) and clip.arguments.get("method") == "value":
        yield f"{run.named(clip)}, method value, {values}"
    if (
        run.argument("trainer.gradient_clip_val")
        and run.argument("trainer.gradient_clip_algorithm") == "value"
    ):
        yield f"trainer.gradient_clip_algorithm value {values}"
