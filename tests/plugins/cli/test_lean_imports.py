"""A command imports torchmetrics only as far as Lightning needs it; users of the package see no difference."""

import subprocess
import sys

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


def test_torchmetrics_loads_itself_when_it_is_used():
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
