"""A tiny network and how it is trained in one process."""

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from core.contracts import IGNORED_LABEL
from core.language_module import LanguageModule
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM

VOCAB = 61


def tiny_gpt(**changes):
    options = dict(vocab_size=VOCAB, n_layer=2, n_head=2, n_embd=16, max_sequence_length=24)
    return GPT(**(options | changes))


def uneven_batches(count, rows=2, length=12, seed=0):
    """Batches whose share of ignored labels runs from none to nearly all."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(count):
        ids = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[:, 1 + (index * 5) % (length - 1) :] = IGNORED_LABEL
        batches.append({"input_ids": ids[:, :-1], "labels": labels})
    return batches


def module(network=tiny_gpt, **changes):
    options = dict(objective=CausalLM(), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5))
    return LanguageModule(network, **(options | changes))


def trainer(tmp_path, **changes):
    options = dict(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path, log_every_n_steps=1,
    )  # fmt: skip
    return Trainer(**(options | changes))


def fit(tmp_path, trained, batches, callbacks=(), ckpt_path=None, **changes):
    torch.manual_seed(0)
    runner = trainer(tmp_path, callbacks=list(callbacks), **changes)
    runner.fit(trained, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return runner


class Record(Callback):
    """Keeps the gradients and figures of each optimizer step."""

    def __init__(self):
        self.gradients, self.figures = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append([p.grad.clone() for p in pl_module.network.parameters()])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.logging_step:
            self.figures.append({k: float(v) for k, v in trainer.callback_metrics.items()})


class CountWaits(TorchDispatchMode):
    """Counts the reads of a tensor's value by the host: on a GPU each one waits for the device."""

    def __init__(self):
        super().__init__()
        self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
