"""Compilation: the network's blocks, or network and loss as a whole, are fused into kernels by torch.compile."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from core import durable
from core.contracts import Network
from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import technique
from toolkit.further_blocks import further_blocks
from toolkit.local_paths import require_local_path
from toolkit.routing import RoutesTokens, all_routers
from toolkit.trials import say
from toolkit.updates import CompilesLoss, CompilesUpdate

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

FILE = "compile.json"
MOST_GRAPHS = 256
"""Graphs of one function. torch's own limit is 8, behind which it compiles nothing more; schedules have more lengths."""

SHARDING = ("FSDP", "HybridParallel", "FSDPStrategy", "ModelParallelStrategy")
"""Strategies that gather and exchange between the blocks in forward."""

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Where compiled code is kept: torch sets the second one below the first when it first compiles for a GPU, for all that follows."""

TORCH = str(Path(torch.__file__).parent)
LEAVING_OUT = re.compile(r"Call to `torch\.compiler\.disable\(\)`|function `disable` in file")
"""Of a function that says within a graph that another one is left out, whose call is the break: of two versions of torch."""

OWN_REASON = re.compile(r"wrapped with `torch\.compiler\.disable` \(reason: (.*)\)\n")

LENGTH_OF_A_RUN = ("data.batch_size", "data.sequence_length", "trainer.max_steps")
MANY_SHAPES = ("AdaptiveBatchSize", "BatchSizeRamp", "SequenceLengthSchedule")
"""Each shape would be compiled: their runs are not advised to."""

COMPILER_SECONDS = 60
SPEED = {"cpu": 1e11, "cuda": 4e14}
"""FLOPs a second of one process in steps, for an estimate: small networks on two cores, large ones in bf16 on an H100."""

SAVED = {"cpu": ((2e6, 0.2), (12e6, 0.1), (35e6, 0.08)), "cuda": ((2e8, 0.33), (float("inf"), 0.14))}
"""Up to how many parameters, and the share of a step that is saved. As measured (tests/benchmarks/RESULTS.md): on a CPU larger networks
gain less; GPT-2 124M on an H100. Above, as torchtitan published for Llama 3.1 8B: 6,667 tokens/s and 5,762 without."""

UNKNOWN = "has no update that could be compiled (toolkit.updates.CompilesUpdate)"

KEPT = {
    **dict.fromkeys(("AdamW", "SGD"), "steps with one kernel of torch's already"),
    **dict.fromkeys(
        ("AdamW8bit", "PagedAdamW8bit", "Lion8bit"),
        "steps with kernels of bitsandbytes, which cannot be compiled",
    ),
    **dict.fromkeys(("Muon", "SOAP"), "spends its step in products of matrices, which are kernels already"),
    "Adafactor": "reads norms of each tensor on the host, where every graph would break off",
    "TorchaoAdamW8bit": "compiles its step itself",
    "DeepSpeedZero": "steps the optimizer itself, on flat partitions of many weights",
}
"""Why the step of an optimizer, or under a strategy, is not compiled."""


@technique(
    paper="PyTorch 2, ASPLOS 2024, doi:10.1145/3620665.3640366; block by block: torchtitan, arXiv:2410.06511",
    after=("ActivationCheckpointing",),
    before=("ActivationOffload",),
    offers=("keeps_weights", "advice"),
    conflicts={
        "StochasticDepth": "it runs a block for other rows in each step, and each number of rows would be compiled"
    },
)
class Compile(Callback):
    """Compiles the network with torch.compile: operators are fused, with fewer passes over memory and less Python.

    Weights, names and checkpoints are those of a run without it, up to rounding: each can go on from the other's.
    Two compiled runs are the same to the last bit. Dropout draws other random numbers than without.
    Blocks that are alike share one graph, for each shape of a micro-batch. Compiled is what has gradients:
    validation and generation are not, nor are steps in which hooks listen to modules, as some monitors' do.

    The first step waits for the compiler. torch keeps what it compiled for later runs, in `cache`. After the first step a line
    says how many graphs there are and where the compiler had to break off; `compile.json` in the run folder
    lists them, with file and line.

    Args:
        scope: "blocks": each block of the network by itself, under every strategy, and what CausalLM, alone or within another
            objective, makes of logits that are whole. "whole": network and objective in one graph, which takes longer to
            compile, and needs all weights on each rank.
        dynamic: Whether one graph is made for all shapes; false: each shape has its own, which is faster.
        backend: What compiles. "aot_eager" and "eager" trace alone, and run operators as they are.
        optimizer: Whether the update of the optimizer is compiled, too: one graph for all weights. For AdEMAMix, Lion and
            ScheduleFreeAdamW, whose updates are many kernels; others are refused.
        cache: A folder for compiled code, such as one that all machines see. It is run as it is found there. None: where
            TORCHINDUCTOR_CACHE_DIR says, or torch's folder in the temporary one.

    Raises:
        ConfigError: If the network has no blocks, the optimizer cannot be compiled, or others may write to `cache`.

    Example:
        trainer:
          callbacks+:
            - class_path: Compile
              init_args: {scope: blocks}
    """

    def __init__(
        self,
        scope: Literal["blocks", "whole"] = "blocks",
        dynamic: bool = False,
        backend: Literal["inductor", "aot_eager", "eager"] = "inductor",
        cache: str | None = None,
        optimizer: bool = False,
    ) -> None:
        if cache is not None:
            require_local_path(cache, "Compile: cache")
        self.scope, self.dynamic, self.backend, self.cache = scope, dynamic, backend, cache
        self.optimizer = optimizer
        self._regions: list[Region] = []
        self._graphs: list[dict[str, Any]] = []
        self._told: int | None = None
        self._breaks_before = 0
        self._undo = ExitStack()
        self._stepped: Any = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what cannot be compiled with other parts of the run, and tools that the compiler lacks."""
        arguments = own.arguments
        for item in run.selected:
            if reason := _obstacle(item, arguments.get("scope", "blocks"), run.world_size):
                yield f"{item.name} {reason}"
            if arguments.get("optimizer") and (reason := _kept_as_it_is(item)):
                yield f"{item.name} {reason}: set optimizer to false"
        if run.offline:
            return
        if arguments.get("backend", "inductor") == "inductor":
            yield from _missing_tools(run.accelerator)
        cache = arguments.get("cache")
        if cache is not None and (reason := _unusable(Path(cache))):
            yield reason

    @classmethod
    def advice(cls, run: Run, network: Network) -> str | None:
        """Returns what a run without it would save, if that is several times what the compiler takes."""
        rows, length, steps = (run.argument(path) for path in LENGTH_OF_A_RUN)
        parts = run.argument("trainer.accumulate_grad_batches") or 1
        reshaped = any(item.name in MANY_SHAPES for item in run.selected)
        if run.offline or run.accelerator not in SPEED or reshaped:
            return None
        if not all(isinstance(number, int) and number > 0 for number in (rows, length, steps, parts)):
            return None
        parameters = sum(parameter.numel() for parameter in network.parameters())
        saved = next((share for most, share in SAVED[run.accelerator] if parameters <= most), 0.0)
        seconds = network.flops_per_token(length) * rows * length * parts * steps / SPEED[run.accelerator]
        if saved * seconds < 3 * COMPILER_SECONDS:
            return None
        published = run.accelerator == "cuda" and saved == SAVED["cuda"][-1][1]
        source = ", as published for Llama 3.1 8B" if published else ""
        gain = f"about {saved:.0%} of the time of these {steps:,} steps{source}"
        return f"Compile would save {gain}: --trainer.callbacks+=Compile"

    # -- what is compiled -------------------------------------------------------------------------

    def change_network(self, network: Network) -> None:
        """Wraps the blocks' `forward`: modules and their names stay."""
        if self.scope == "whole":
            return
        if not network.blocks:
            raise ConfigError(f"Compile: {type(network).__name__} has no blocks: take scope=whole.")
        compiled, apart, self._regions = self.compiled(), _leave_out_routers(network), []
        for block in [*network.blocks, *further_blocks(network)]:
            inner = [module for module in block.modules() if module is not block and module not in apart]
            block.forward = Region(block.forward, inner, compiled)  # type: ignore[method-assign]
            self._regions.append(block.forward)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Sets what torch has in settings of the process alone; `teardown` restores them."""
        from torch._dynamo import config, graph_break_reasons

        self._graphs, self._told, self._stepped = [], None, None
        self._breaks_before = len(graph_break_reasons)
        # DDP's splitting of graphs does not know activation checkpointing, and blocks are split already.
        self._undo.enter_context(
            config.patch(
                recompile_limit=MOST_GRAPHS, optimize_ddp=config.optimize_ddp and self.scope == "whole"
            )
        )
        if self.cache is not None:
            for name in CACHES:
                self._undo.callback(_restore, name, os.environ.pop(name, None))
            os.environ[CACHES[0]] = str(_own_folder(Path(self.cache)))

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Notes which hooks the strategy has added, and compiles the loss: strategies replace it."""
        if self.scope == "whole":
            modules = [*pl_module.network.modules(), *pl_module.objective.modules()]
            pl_module.compute_loss = Region(pl_module.compute_loss, modules, self.compiled())
            self._regions = [pl_module.compute_loss]
        else:
            loss = Region(_call, [], self.compiled())
            for part in pl_module.objective.modules():  # objectives may be within others
                if isinstance(part, CompilesLoss):
                    part.compile_loss(loss)
                    self._undo.callback(part.compile_loss, None)
        compiled = self.compiled()
        for region in self._regions:
            region.settle(compiled)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Compiles the update of the optimizer, before the first step: who searches a learning rate builds another one."""
        if self.optimizer and self._stepped is not trainer.optimizers[0]:
            self._stepped = optimizer = trainer.optimizers[0]
            if not isinstance(optimizer, CompilesUpdate):
                raise ConfigError(f"Compile: {type(optimizer).__name__} {UNKNOWN}: set optimizer to false.")
            # Of all shapes in one: it is bound by memory, and a network has many.
            build = partial(_build, self.backend, self._graphs)
            optimizer.compile_update(partial(torch.compile, backend=build, dynamic=True))

    def compiled(self) -> Callable[..., Any]:
        """Returns what calls a function with arguments, compiled; one for each fit, so that its graphs are counted anew."""
        return torch.compile(_call, backend=partial(_build, self.backend, self._graphs), dynamic=self.dynamic)

    # -- what is said of it -----------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Says what was compiled in the first step, which a pipeline computes with its last batch; later it is added to the file."""
        if len(self._graphs) != self._told and not is_accumulating(trainer):
            self._report(trainer)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Restores torch's settings, and the loss."""
        if self.scope == "whole" and self._regions:
            del pl_module.compute_loss
            self._regions = []
        self._undo.close()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Restores them where a run ends with an error, which has no `teardown`."""
        self.teardown(trainer, pl_module, "fit")

    def _report(self, trainer: Trainer) -> None:
        first, self._told = self._told is None, len(self._graphs)
        if not trainer.is_global_zero:
            return
        breaks = list(found_breaks(self._breaks_before))
        path = Path(trainer.default_root_dir, FILE)
        if first:
            say(trainer, self, f"{_summary(len(self._graphs), breaks)}{self._unheard()}; {path}")
        settings = {"scope": self.scope, "dynamic": self.dynamic, "backend": self.backend}
        settings["optimizer"] = self.optimizer
        text = json.dumps(settings | {"graphs": self._graphs, "breaks": breaks}, indent=1)
        try:
            durable.write(path, text + "\n")
        except OSError as error:  # the run continues
            print(f"Compile: {path} could not be written: {error}", file=sys.stderr)

    def _unheard(self) -> str:
        heard = sum(region.is_heard() for region in self._regions)
        if not heard:
            return ""
        what = f"{heard} of {len(self._regions)} blocks" if self.scope == "blocks" else "all"
        return f"; not compiled while hooks listen to modules: {what}"


class Region:
    """A function that is called compiled where it has gradients, and otherwise as it is.

    Args:
        plain: The function.
        modules: What it calls: hooks that are added to them later are not in the compiled code.
        compiled: Calls a function with arguments, compiled. One for all regions, so that equal ones share graphs; not
            made of the function, so that a copy of a module calls the copy.
    """

    def __init__(
        self, plain: Callable[..., Any], modules: Iterable[nn.Module], compiled: Callable[..., Any]
    ) -> None:
        self.plain, self.modules, self.compiled = plain, list(modules), compiled
        self._hooks: list[Any] = []
        self._settled = 0

    def settle(self, compiled: Callable[..., Any]) -> None:
        """Takes the hooks that there are now, those of the strategy, for a part of the function."""
        self.compiled = compiled
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._hooks = [getattr(module, kind) for module in self.modules for kind in kinds]
        self._settled = sum(map(len, self._hooks))

    def is_heard(self) -> bool:
        """Returns whether hooks have been added since."""
        return sum(map(len, self._hooks)) != self._settled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        if not torch.is_grad_enabled() or self.is_heard():
            return self.plain(*args, **kwargs)
        return self.compiled(self.plain, *args, **kwargs)


def _build(backend: str, found: list[dict[str, Any]], graph: Any, inputs: Any) -> Any:
    """Notes a graph that torch has traced, and hands it to the compiler."""
    from torch._dynamo import lookup_backend

    given = [v for v in inputs if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter)]
    operators = sum(node.op.startswith("call") for node in graph.graph.nodes)
    found.append({"operators": operators, "inputs": [str(list(v.shape)) for v in given]})
    return lookup_backend(backend)(graph, inputs)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _leave_out_routers(network: Network) -> list[nn.Module]:
    """Makes the compiler leave out routers, with their hooks: who balances experts listens to them in each step."""
    routers = all_routers(network) if isinstance(network, RoutesTokens) else []
    for router in routers:
        # where `nn.Module.compile` puts what is called in place of a module with its hooks; `disable` takes functions
        router._compiled_call_impl = torch.compiler.disable(
            router._call_impl, reason="routers are listened to"
        )  # type: ignore[assignment]
    return routers


def found_breaks(since: int) -> Iterator[dict[str, Any]]:
    """Yields where the compiler broke off a graph, each place once.

    `torch._dynamo.explain` reports the same, and would have to trace the network once more, with a batch.

    Args:
        since: How many of torch's own list to leave out.
    """
    from torch._dynamo import graph_break_reasons

    seen = set()
    for one in graph_break_reasons[since:]:
        # innermost, but for torch's own code
        stack = [frame for frame in one.user_stack if not frame.filename.startswith(TORCH)] or one.user_stack
        place = stack[-1] if stack else None
        file, line = (place.filename, place.lineno) if place else ("?", 0)
        if (file, line) not in seen and not LEAVING_OUT.search(one.reason):
            seen.add((file, line))
            yield {"file": file, "line": line, "code": place.line if place else "", "reason": one.reason}


def _summary(graphs: int, breaks: list[dict[str, Any]]) -> str:
    text = f"{graphs} graph{'' if graphs == 1 else 's'}, "
    if breaks:
        first, rest = breaks[0], len(breaks) - 1
        own = OWN_REASON.search(first["reason"])  # of a function that its author left out
        reason = own[1] if own else first["reason"].strip().partition("\n")[0]
        text += f"broken off at {first['file']}:{first['line']} ({reason})" + (
            f" and {rest} more place{'' if rest == 1 else 's'}" if rest else ""
        )
    else:
        text += "no breaks"
    return text


def _obstacle(item: Selected, scope: str, ranks: int) -> str | None:
    """Returns why a part of the run cannot be compiled, and what to do."""
    own, whole = item.arguments, scope == "whole"
    if whole and item.name in SHARDING:
        return "works between the blocks, which one graph does not let it do: take scope=blocks"
    if whole and item.name == "ActivationOffload":
        return "moves what each block keeps, which one graph does not let it do: take scope=blocks"
    if whole and item.name == "ActivationCheckpointing" and ranks > 1:
        return "is not known to what cuts one graph into DDP's buckets: take scope=blocks"
    if item.name == "DeepSpeedZero" and own.get("stage") == 3:
        return "gathers weights within the blocks in stage 3: take stage 1 or 2, or FSDP"
    if item.name == "HybridParallel" and (own.get("expert") or 1) > 1:
        return "sends tokens within the blocks, as many as are known only then, with expert above 1: leave Compile out"
    return None


def _kept_as_it_is(item: Selected) -> str | None:
    """Returns why the optimizer's update cannot be compiled with a part of the run."""
    if item.kind != "optimizers" or item.name in KEPT:
        return KEPT.get(item.name)
    known = isinstance(item.target, type) and issubclass(item.target, CompilesUpdate)
    return None if known else UNKNOWN


def _missing_tools(accelerator: str) -> Iterator[str]:
    """Yields which tools inductor needs and the machine lacks."""
    if accelerator == "cpu":
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            yield (
                f"backend=inductor compiles C++ for a CPU, and there is no compiler ({compiler}): apt install g++, or set CXX"
            )
    elif accelerator == "cuda":
        if find_spec("triton") is None:
            yield "backend=inductor makes kernels with triton, which is not installed: pip install triton"
        if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
            yield "backend=inductor needs a C compiler to start its kernels, and there is none: apt install gcc, or set CC"


def _own_folder(path: Path) -> Path:
    """Returns the absolute path of a folder that others cannot write to; makes it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Compile: cache {path} cannot be used: {error}") from None
    if reason := _unusable(path):
        raise ConfigError(f"Compile: {reason}")
    return path.resolve()


def _unusable(path: Path) -> str | None:
    try:
        open_to_all = path.exists() and path.stat().st_mode & 0o002
    except OSError as error:
        return f"cache {path} cannot be used: {error}"
    if not open_to_all:
        return None
    return f"cache {path} is open to everybody, and what is in it is run: chmod o-w {path}, or give another folder"


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
