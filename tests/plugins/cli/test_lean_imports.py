"""A command imports torchmetrics only as far as Lightning needs it; users of the package see no difference."""

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


@pytest.mark.ci
@pytest.mark.parametrize(
    "use",
    [
        USE,
        # as a command of others may do
        pytest.param(
            PART_FIRST.replace("PART", "aggregation").replace("NAME", "SumMetric"), marks=pytest.mark.slow
        ),
        pytest.param(PART_FIRST.replace("PART", "metric").replace("NAME", "Metric"), marks=pytest.mark.slow),
    ],
    ids=["Lightning first", "a part first", "metric first"],
)
def test_torchmetrics_loads_itself_when_it_is_used(use):
    done = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CHECK = """
import sys
from core.__main__ import main
assert main(["check", "--config=quickstart"]) == 0
assert not {"torch._dynamo", "matplotlib", "transformers", "torchvision"} & set(sys.modules)

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
both = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})
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
