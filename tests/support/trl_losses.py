"""Losses of trl's trainers on one batch: stored with their gradients, so that tests need no trl.

`python -m tests.support.trl_losses` (with trl 1.16 installed) writes them again.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

STORED = Path(__file__).with_suffix(".json")

PAIRS, T, VOCAB = 4, 7, 11
BETA, SMOOTHING, GAMMA, WEIGHT = 0.3, 0.1, 0.5, 0.2


def batch():
    """Returns a batch of ours, in float64: logits and labels of pairs of answers, the references of the rows, desirable or not."""
    random = np.random.default_rng(7)
    labels = random.integers(VOCAB, size=(2 * PAIRS, T))
    for row in labels:
        row[: random.integers(1, 3)] = -100
        row[random.integers(5, T + 1) :] = -100
    logits, taught = (torch.from_numpy(random.normal(size=(2 * PAIRS, T, VOCAB)) * 2) for _ in range(2))
    moved = torch.from_numpy(random.normal(size=2 * PAIRS) * 3 + 2)
    reference = log_probabilities(logits, torch.from_numpy(labels)).sum(1) - moved
    return {
        "logits": logits,
        "taught": taught,
        "labels": torch.from_numpy(labels),
        "reference": reference[:, None].repeat(1, T),
        "desirable": torch.tensor([True, False, True, True]).repeat_interleave(2)[:, None].repeat(1, T),
    }


def log_probabilities(logits, labels):
    """Returns those of the labels, (B, T); 0 where they are ignored."""
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen.where(labels >= 0, 0.0)


def of_trl():
    """Returns name -> (loss, gradient by the log-probability of each position, in the order of our rows)."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    given = batch()
    labels = given["labels"]
    start = log_probabilities(given["logits"], labels)
    found = {kind: _dpo(given, start, kind) for kind in ("sigmoid", "ipo", "hinge", "robust")}
    found["kto"] = _kto(given, start)

    def by_means(loss):
        leaf = start.clone().requires_grad_()
        means = leaf.sum(1) / (labels >= 0).sum(1)
        value = loss(means[::2], means[1::2])
        return value.item(), torch.autograd.grad(value, leaf)[0].tolist()

    plain = SimpleNamespace(
        beta=2.0, simpo_gamma=GAMMA, alpha=0.0, label_smoothing=0.0, loss_type="simpo", accelerator=_here()
    )
    found["simpo"] = by_means(lambda *means: CPOTrainer.cpo_loss(plain, *means)[0].mean())
    # trl computes the odds in float32: the stored gradients are as exact as that
    plain = SimpleNamespace(beta=WEIGHT, accelerator=_here())
    found["orpo_odds"] = by_means(lambda *means: -ORPOTrainer.odds_ratio_loss(plain, *means)[0].mean())
    return found | _gkd(given)


def _gkd(given):
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    found = {}
    for name, beta in {"forward": 0, "reverse": 1, "jensen_shannon": 0.5}.items():
        leaf = given["logits"].clone().requires_grad_()
        value = GKDTrainer.generalized_jsd_loss(leaf, given["taught"], given["labels"], beta, 1.5)
        found[name] = value.item(), torch.autograd.grad(value, leaf)[0].sum(1).tolist()
    return found


def _here():
    same = lambda value: value  # noqa: E731
    return SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)


def _dpo(given, start, kind):
    from trl.trainer.dpo_trainer import DPOTrainer

    order = [*range(0, 2 * PAIRS, 2), *range(1, 2 * PAIRS, 2)]  # all chosen ones first
    leaf, labels = start.clone().requires_grad_(), given["labels"]
    reference = given["reference"][:, 0]
    inputs = {
        "input_ids": F.pad(labels[order], (1, 0)),
        "attention_mask": torch.ones(2 * PAIRS, T + 1),
        "completion_mask": F.pad((labels[order] >= 0).long(), (1, 0)),
        "ref_chosen_logps": reference[::2],
        "ref_rejected_logps": reference[1::2],
    }
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=_here(), aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[kind], loss_weights=[1.0],
        beta=BETA, label_smoothing=SMOOTHING, use_weighting=False, _metrics=_Metrics(), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    value = DPOTrainer._compute_loss(trainer, _model(leaf[order]), inputs, False)
    return value.item(), torch.autograd.grad(value, leaf)[0].tolist()


def _kto(given, start):
    from trl.trainer.kto_trainer import KTOTrainer

    leaf, labels = start.clone().requires_grad_(), given["labels"][::2]
    sums, reference = start.sum(1), given["reference"][:, 0]
    inputs = {
        "input_ids": F.pad(labels, (1, 0)),
        "attention_mask": torch.ones(PAIRS, T + 1),
        "completion_mask": F.pad((labels >= 0).long(), (1, 0)),
        "label": given["desirable"][::2, 0],
        "ref_logps": reference[::2],
        "ref_KL_logps": reference[1::2],
    }
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=_here(), aux_loss_enabled=False, precompute_ref_logps=True,
        calculate_KL=True, loss_type="kto", beta=BETA, desirable_weight=1.0, undesirable_weight=1.5,
        _compute_kl_logps=lambda model, batch: sums[1::2], _metrics=_Metrics(), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    value = KTOTrainer._compute_loss(trainer, _model(leaf[::2]), inputs, False)
    return value.item(), torch.autograd.grad(value, leaf)[0].tolist()


class Given:
    """A network that returns the logits of the batch."""

    vocab_size = VOCAB

    def __call__(self, batch):
        return batch["logits"]

    def logits(self, hidden):
        return hidden


def ours(objective, **more):
    """Returns loss and figures of an objective on the batch, and the gradient of the mean loss by the logits, (B, T, V)."""
    given = batch() | more
    leaf = given["logits"].clone().requires_grad_()
    loss, figures = objective.loss(Given(), given | {"logits": leaf})
    return loss, figures, torch.autograd.grad(loss.mean, leaf)[0]


def stored(name):
    """Returns trl's loss, and its gradient by the logits, (B, T, V): from the one by log-probabilities."""
    value, gradient = json.loads(STORED.read_text())["losses"][name]
    given = batch()
    leaf = given["logits"].clone().requires_grad_()
    total = (log_probabilities(leaf, given["labels"]) * torch.tensor(gradient, dtype=leaf.dtype)).sum()
    return value, torch.autograd.grad(total, leaf)[0]


class _Metrics(dict):
    def __missing__(self, key):
        self[key] = _Metrics() if key == "eval" else []
        return self[key]


def _model(log_probs):
    """Returns what trl calls as a model with a fused head."""
    nothing = torch.zeros_like(log_probs)
    said = SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing > 0)
    return lambda **kwargs: said


if __name__ == "__main__":
    import trl

    text = json.dumps({"trl": trl.__version__, "losses": of_trl()})
    STORED.write_text(text.replace("]]], ", "]]],\n") + "\n", encoding="utf-8")
