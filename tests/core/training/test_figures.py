"""`log_figures` knows the optimizer step; gradients have the scale and time that CONTRIBUTING.md states."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn.functional import cross_entropy

from conformance.recorder import Figures
from core.training.figures import log_figures
from tests.support.tiny_training import fit, module, tiny_gpt, uneven_batches


class Everywhere(Callback):
    """Logs in each hook of a batch, and copies the gradients of the first step there."""

    def __init__(self):
        self.gradients = {}

    def look(self, hook, trainer, pl_module):
        log_figures(trainer, {f"own/{hook}": torch.tensor(2.5)})
        weight = pl_module.network.embed_tokens.weight
        if trainer.global_step == 0 and weight.grad is not None:
            self.gradients[hook] = weight.grad.clone()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert not pl_module.logging_step
        self.look("on_before_optimizer_step", trainer, pl_module)

    def on_after_backward(self, trainer, pl_module):
        self.look("on_after_backward", trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        if pl_module.logging_step:
            log_figures(trainer, {"own/on_train_batch_end": 1, "own/integer": 3})


@pytest.fixture(params=[1, 2])
def run(request, tmp_path):
    """Micro-batches of a step, what was logged, the callback, the network at first, the batches, the trainer."""
    torch.manual_seed(0)
    network, batches, times = tiny_gpt(), uneven_batches(6), request.param
    first = {name: value.clone() for name, value in network.state_dict().items()}
    callback, logger = Everywhere(), Figures(str(tmp_path))
    runner = fit(
        tmp_path, module(lambda: network), batches, [callback], logger=logger, max_epochs=1,
        accumulate_grad_batches=times, gradient_clip_val=1e-3,
    )  # fmt: skip
    return times, logger.logged, callback, first, batches, runner


def test_figures_are_logged_under_the_optimizer_step(run):
    times, logged, *_, runner = run
    steps = [str(step) for step in range(1, 6 // times + 1)]
    for name in ("own/on_before_optimizer_step", "own/on_train_batch_end", "train/loss"):
        assert [step for step, figures in logged.items() if name in figures] == steps
    assert logged["1"]["own/integer"] == 3.0
    left = runner.callback_metrics["own/on_before_optimizer_step"]
    assert left.dtype == torch.float64
    assert left == 2.5


def test_gradients_are_those_of_the_mean_per_token_of_the_step_before_clipping(run):
    times, _, callback, first, batches, _ = run
    network = tiny_gpt()
    network.load_state_dict(first)
    ids, labels = (torch.cat([batch[key] for batch in batches[:times]]) for key in ("input_ids", "labels"))
    logits = network.logits(network({"input_ids": ids}))
    cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    expected = network.embed_tokens.weight.grad
    torch.testing.assert_close(callback.gradients["on_before_optimizer_step"], expected)
    unfinished = callback.gradients["on_after_backward"]
    assert torch.allclose(unfinished, expected, rtol=1e-4) == (times == 1)
