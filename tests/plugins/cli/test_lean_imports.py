"""A command imports what it uses; users of the packages that it did not need see no difference."""

import os
import subprocess
import sys

import pytest

USE = """
import sys
from plugins.cli.lean_imports import defer_torchmetrics
defer_torchmetrics()
import lightning.pytorch
package = sys.modules["torchmetrics"]
assert "torchmetrics.functional" not in sys.modules
assert not {"transformers", "torchvision"} & set(sys.modules)
from torchmetrics import Metric, __version__
assert Metric is sys.modules["lightning.pytorch.core.module"].Metric
import torchmetrics
assert torchmetrics is package and not hasattr(torchmetrics, "__wrapped__")
from torchmetrics import *
assert issubclass(MeanMetric, Metric) and torchmetrics.text.Perplexity()
assert "torchmetrics.functional" in sys.modules and torchmetrics.__version__ == __version__
"""

PART_FIRST = """
from plugins.cli.lean_imports import defer_torchmetrics
defer_torchmetrics()
from torchmetrics.PART import NAME
import lightning.pytorch, torchmetrics
assert issubclass(NAME, torchmetrics.Metric) and NAME.__mro__[-4] is torchmetrics.Metric
assert isinstance(torchmetrics.MetricCollection([torchmetrics.MeanMetric()])["MeanMetric"], torchmetrics.Metric)
"""


@pytest.mark.slow  # torchmetrics comes by itself in each run that uses it
@pytest.mark.parametrize(
    "use",
    [
        USE,
        # as a command of others may do
        PART_FIRST.replace("PART", "aggregation").replace("NAME", "SumMetric"),
        PART_FIRST.replace("PART", "metric").replace("NAME", "Metric"),
    ],
    ids=["Lightning first", "a part first", "metric first"],
)
def test_torchmetrics_loads_itself_when_it_is_used(use):
    done = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WITHOUT = """
unused = {"boto3", "matplotlib", "sympy", "torch._dynamo", "torch.distributed.tensor", "torchvision", "transformers", "triton"}
assert not unused & set(sys.modules), unused & set(sys.modules)
"""

CHECK = f"""
import sys
from core.__main__ import main
assert main(["check", "--config=quickstart"]) == 0
{WITHOUT}
import torch
from lightning.fabric.wrappers import OptimizedModule, _unwrap_compiled
module = torch.nn.Linear(1, 1)
assert not isinstance(module, OptimizedModule) and _unwrap_compiled(module) == (module, None)
compiled = torch.compile(module)
assert isinstance(compiled, OptimizedModule) and _unwrap_compiled(compiled)[0] is module
import torch._dynamo.config
assert torch._dynamo.OptimizedModule is type(compiled) and torch._dynamo.config is sys.modules["torch._dynamo.config"]

from torchmetrics import MeanMetric, MetricCollection
metric = MeanMetric()
metric.update(1.0)
figure, axes = metric.plot()
both = MetricCollection({{"a": MeanMetric(), "b": MeanMetric()}})
both.update(1.0)
assert both.plot(ax=axes, together=True)[1] is axes
try:
    both.plot(ax="no axes", together=True)
except ValueError:
    print("refused")
"""


@pytest.mark.ci
def test_check_needs_neither_compiler_nor_plots_and_both_load_when_they_are_used(tmp_path):
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("refused\n")


FIT = f"""
import sys
from core.__main__ import main
sizes = ["--data.tokenizer.vocab_size=300", "--model.network.vocab_size=300", "--data.batch_size=2"]
lengths = ["--trainer.max_steps=2", "--trainer.val_check_interval=1", "--model.lr_scheduler.warmup_steps=0"]
text = ["--data.source=text.txt", "--data.sequence_length=32", "--data.validation_fraction=0.2"]
assert main(["fit", "--config=quickstart", *sizes, *lengths, *text]) == 0
{WITHOUT}"""


@pytest.mark.ci
def test_a_run_that_compiles_nothing_ends_without_the_compiler_and_what_it_needs(tmp_path):
    lines = (
        f"Line {number} says that {number * 7} is {'even' if number % 2 else 'odd'}."
        for number in range(3000)
    )
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FIT], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr


COMPILED = """
import sys
from plugins.cli.lean_imports import defer_compiler_and_plots
defer_compiler_and_plots()
import torch

def stepped(optimize):
    weight = torch.nn.Parameter(torch.arange(4.0))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(3):
        (weight**2).sum().backward()
        assert torch.is_grad_enabled()
        optimize(optimizer)
        optimizer.zero_grad()
    return weight.detach()

eager = stepped(lambda optimizer: optimizer.step())
assert "torch._dynamo" not in sys.modules

graphs = []
def counting(graph, inputs):
    graphs.append(graph)
    return graph

compiled = stepped(torch.compile(lambda optimizer: optimizer.step(), backend=counting))
assert len(graphs) == 1 and torch.allclose(eager, compiled)

weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight])
torch.compile(lambda: optimizer.zero_grad(set_to_none=False), backend=counting)()
assert len(graphs) == 1 and not weight.grad.any()
"""


@pytest.mark.ci
def test_optimizers_step_without_the_compiler_and_are_compiled_as_ever():
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


S3 = """
import sys
if "absent" in sys.argv:
    sys.modules["boto3"] = None
from plugins.cli.lean_imports import defer_compiler_and_plots
defer_compiler_and_plots()
from tensorboard.compat.tensorflow_stub.io import gfile
if "absent" in sys.argv:
    assert not gfile.S3_ENABLED
else:
    assert gfile.S3_ENABLED and "boto3" not in sys.modules
    client = gfile.boto3.client
    import boto3
    assert client is boto3.client
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "words", [pytest.param([], marks=pytest.mark.slow), ["absent"]], ids=["installed", "absent"]
)
def test_tensorboard_writes_to_s3_where_boto3_is_installed(words):
    pytest.importorskip("boto3")
    done = subprocess.run([sys.executable, "-c", S3, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


KERNELS = """
import sys
from plugins.cli.lean_imports import defer_compiler_and_plots
defer_compiler_and_plots()
from torch.utils.flop_counter import flop_registry, register_flop_formula
assert "triton" not in sys.modules

import triton.language
kernel = triton.language.sigmoid
register_flop_formula(kernel)(lambda *sizes: 1)
assert kernel in flop_registry
try:
    register_flop_formula(sys.exit)(lambda *sizes: 1)
except ValueError:
    print("refused")
"""


@pytest.mark.slow
def test_formulas_of_flops_are_still_taken_for_kernels_of_triton():
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", KERNELS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


STUB = """
import sys, types
sys.modules["triton"] = types.ModuleType("triton")
from plugins.cli.lean_imports import defer_compiler_and_plots
defer_compiler_and_plots()
import torch.utils.flop_counter
"""


@pytest.mark.ci
def test_a_module_that_stands_for_triton_already_is_left_to_torch():
    """Projects put one there where triton cannot be installed; it has no spec."""
    done = subprocess.run([sys.executable, "-c", STUB], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
