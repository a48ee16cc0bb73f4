"""LanguageModule against plain PyTorch: token weights, groups, seeds, figures, what a resume restores."""

import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from callbacks.periodic_checkpoint import PeriodicCheckpoint
from core.contracts import IGNORED_LABEL
from core.contracts.modules import check_fit
from core.errors import ConfigError
from core.training.seeding import mix
from plugins.objectives.balanced_routing import BalancedRouting
from plugins.objectives.causal_lm import CausalLM
from plugins.optimizers.adamw import AdamW
from plugins.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from plugins.schedules.warmup_cosine import WarmupCosine
from tests.support.remembering import RememberingGPT
from tests.support.tiny_training import (
    VOCAB,
    CountWaits,
    Record,
    fit,
    module,
    tiny_gpt,
    trainer,
    uneven_batches,
)
from tests.support.toy import ToyData


def summed_loss(network, batches):
    return sum(
        torch.nn.functional.cross_entropy(
            network.logits(network(b)).flatten(0, 1), b["labels"].flatten(), reduction="sum"
        )
        for b in batches
    )


@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradient_is_that_of_all_label_tokens_of_the_step(tmp_path, accumulation):
    batches, record, trained = uneven_batches(accumulation), Record(), module()
    fit(tmp_path, trained, batches, [record], max_steps=1, accumulate_grad_batches=accumulation)

    torch.manual_seed(0)
    reference = tiny_gpt()
    tokens = sum(int((b["labels"] != IGNORED_LABEL).sum()) for b in batches)
    loss = summed_loss(reference, batches) / tokens
    loss.backward()
    loss = loss.detach()
    largest = max(float(p.grad.abs().max()) for p in reference.parameters())
    for found, parameter in zip(record.gradients[0], reference.parameters(), strict=True):
        # both sum the same float32 terms in another order: a few units of the last place of the largest
        torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6 * largest)
    figures = record.figures[0]
    assert figures["train/loss"] == pytest.approx(float(loss), rel=1e-6)
    assert figures["train/perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert figures["train/tokens"] == tokens
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    assert figures["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


class Breaking(Callback):
    """Ends a run between the micro-batches of a step."""

    def on_train_batch_end(self, trainer, pl_module, *batch):
        raise ArithmeticError


def test_a_step_that_an_error_broke_off_has_no_part_in_the_next_run(tmp_path):
    batches, found, expected = uneven_batches(3), Record(), Record()
    for trained, callbacks, record in ((module(), [Breaking()], found), (module(), [], expected)):
        if callbacks:
            with pytest.raises(ArithmeticError):
                fit(tmp_path, trained, batches, callbacks, max_steps=1, accumulate_grad_batches=3)
        fit(tmp_path, trained, batches, [record], max_steps=1, accumulate_grad_batches=3)
    assert all(map(torch.equal, found.gradients[0], expected.gradients[0]))


def test_an_incomplete_last_accumulation_is_weighed_by_its_own_tokens(tmp_path):
    batches, record = uneven_batches(5), Record()
    fit(tmp_path, module(), batches, [record], max_epochs=1, accumulate_grad_batches=3)
    assert len(record.figures) == 2

    torch.manual_seed(0)
    reference = tiny_gpt()
    for step, part in enumerate((batches[:3], batches[3:])):
        reference.zero_grad()
        (summed_loss(reference, part) / sum((b["labels"] != IGNORED_LABEL).sum() for b in part)).backward()
        for found, parameter in zip(record.gradients[step], reference.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.5 * parameter.grad


def test_validation_loss_is_the_mean_over_tokens_not_over_batches(tmp_path):
    batches, trained = uneven_batches(4), module()
    torch.manual_seed(0)
    [figures] = trainer(tmp_path).validate(trained, DataLoader(batches, batch_size=None), verbose=False)
    with torch.no_grad():
        mean = summed_loss(trained.network, batches) / sum(
            (b["labels"] != IGNORED_LABEL).sum() for b in batches
        )
    assert figures["val/loss"] == pytest.approx(float(mean), rel=1e-6)
    assert figures["val/perplexity"] == pytest.approx(math.exp(float(mean)), rel=1e-5)


class PerPair(CausalLM):
    loss_unit = "nats/pair"


def test_a_loss_that_is_not_per_token_has_no_perplexity(tmp_path):
    record, trained = (
        Record(),
        module(objective=BalancedRouting(PerPair())),
    )  # in validation the inner one alone
    [figures] = trainer(tmp_path).validate(
        trained, DataLoader(uneven_batches(2), batch_size=None), verbose=False
    )
    assert sorted(figures) == ["val/loss"]
    fit(tmp_path, module(objective=PerPair()), uneven_batches(1), [record], max_steps=1)
    assert "train/loss" in record.figures[0]
    assert "train/perplexity" not in record.figures[0]


class WaitsPerStep(Callback):
    """Notes how often the host waited during each training batch."""

    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.counter = CountWaits()
        self.counter.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.counter.__exit__(None, None, None)
        self.found.append((pl_module.logging_step, self.counter.waits))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_that_is_not_logged_never_waits_for_the_device(tmp_path, accumulation):
    waits = WaitsPerStep()
    trained = module(
        optimizer=lambda groups: AdamW(groups), lr_scheduler=lambda o: WarmupCosine(o, warmup_steps=2)
    )
    fit(tmp_path, trained, uneven_batches(12), [waits], max_steps=6 // accumulation, log_every_n_steps=3,
        accumulate_grad_batches=accumulation, gradient_clip_val=1.0)  # fmt: skip
    assert [count for logged, count in waits.found if not logged] == [0] * (6 - 2 // accumulation)
    assert all(count > 0 for logged, count in waits.found if logged)


def test_norms_and_biases_are_not_decayed_and_embeddings_by_choice():
    for decay_embeddings in (True, False):
        trained = module(decay_embeddings=decay_embeddings)
        trained.network = tiny_gpt(tie_embeddings=True, position="learned")
        decayed, undecayed = trained.parameter_groups()
        names = {id(p): n for n, p in trained.named_parameters()}
        assert undecayed["weight_decay"] == 0
        assert "weight_decay" not in decayed
        kept = {names[id(p)] for p in undecayed["params"]}
        small = {n for n, p in trained.named_parameters() if p.ndim < 2}
        embeddings = {
            names[id(m.weight)] for m in trained.network.modules() if isinstance(m, torch.nn.Embedding)
        }
        assert len(embeddings) == 2
        assert kept == (small if decay_embeddings else small | embeddings)
        assert len(decayed["params"]) + len(undecayed["params"]) == len(list(trained.parameters()))


class DrawsNumbers(Callback):
    """A technique that uses torch's generator as it likes."""

    def on_train_batch_end(self, *args):
        torch.rand(17)


def test_what_a_callback_draws_does_not_change_dropout(tmp_path):
    losses = []
    for callbacks in ([], [DrawsNumbers()]):
        record = Record()
        fit(
            tmp_path,
            module(lambda: tiny_gpt(dropout=0.3)),
            uneven_batches(4),
            [*callbacks, record],
            max_steps=4,
        )
        losses.append([figures["train/loss"] for figures in record.figures])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


def test_seeds_differ_between_batches_epochs_and_ranks():
    seeds = {mix(seed, epoch, batch, rank) for seed in (0, 1) for epoch in range(5) for batch in range(50)
             for rank in range(4)}  # fmt: skip
    assert len(seeds) == 2 * 5 * 50 * 4
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_settings_that_the_user_wrote_win_over_the_checkpoint(tmp_path):
    def trained(lr, decay):
        return module(
            optimizer=lambda groups: AdamW(groups, lr=lr, weight_decay=decay),
            lr_scheduler=lambda o: WarmupCosine(o, warmup_steps=2),
        )

    batches = uneven_batches(10)
    runner = fit(tmp_path, trained(1e-3, 0.1), batches, max_steps=4)
    runner.save_checkpoint(tmp_path / "four.ckpt")
    record, resumed = Record(), trained(5e-3, 0.3)
    runner = fit(tmp_path, resumed, batches, [record], tmp_path / "four.ckpt", max_steps=5)
    group = runner.optimizers[0].param_groups[0]
    assert record.figures[0]["train/lr"] == pytest.approx(5e-3 * 0.1, rel=1e-12)  # the last step of five
    assert group["weight_decay"] == 0.3
    assert runner.optimizers[0].state[group["params"][0]]["step"] == 5  # the moments are the checkpoint's


def test_sums_since_the_last_logged_step_survive_a_stop(tmp_path):
    batches = uneven_batches(6)
    whole, rest = Record(), Record()
    fit(tmp_path, module(), batches, [whole], max_steps=6, log_every_n_steps=4)
    runner = fit(tmp_path, module(), batches, max_steps=2, log_every_n_steps=4)
    runner.save_checkpoint(tmp_path / "two.ckpt")
    fit(tmp_path, module(), batches[2:], [rest], tmp_path / "two.ckpt", max_steps=6, log_every_n_steps=4)
    assert rest.figures[0]["train/loss"] == whole.figures[0]["train/loss"]
    assert rest.figures[0]["train/tokens"] == whole.figures[0]["train/tokens"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"vocab_size": 62}, "--model.network.vocab_size=64"),
        ({"sequence_length": 25}, "--data.sequence_length=24"),
    ],
)
def test_data_that_does_not_fit_the_network_is_refused(data, message):
    trained = module()
    trained.network = tiny_gpt()
    with pytest.raises(ConfigError, match=message):
        check_fit(trained.network, type("Data", (), data)())


def test_a_run_that_is_bounded_by_epochs_resumes_in_mid_epoch(tmp_path):
    """Counting the steps of an epoch builds the loader before the checkpoint's position is known."""

    def run(folder, **options):
        trained = module(
            partial(tiny_gpt, vocab_size=64, dropout=0.2),
            optimizer=AdamW,
            lr_scheduler=partial(WarmupCosine, warmup_steps=2),
        )
        torch.manual_seed(0)
        runner = trainer(tmp_path, max_epochs=2, accumulate_grad_batches=3, **options)
        runner.fit(trained, datamodule=ToyData(rows=40), ckpt_path=folder)
        return trained.state_dict()

    save = PeriodicCheckpoint(every_n_steps=3, keep=-1, dirpath=str(tmp_path / "saved"))
    whole = run(None, enable_checkpointing=True, callbacks=[save])
    assert [path.name[5:13] for path in sorted((tmp_path / "saved").iterdir())] == [
        "00000003",
        "00000006",
        "00000008",
    ]
    for path in sorted((tmp_path / "saved").iterdir())[:2]:
        resumed = run(path)
        assert all(torch.equal(resumed[name], whole[name]) for name in whole), path.name


def test_the_default_optimizer_and_clipping_run_in_mixed_precision(tmp_path):
    record = Record()
    fit(tmp_path, module(optimizer=AdamW), uneven_batches(3), [record], max_steps=3, gradient_clip_val=1.0,
        precision="bf16-mixed")  # fmt: skip
    assert len(record.figures) == 3


@pytest.mark.parametrize("grows", [False, True], ids=["a dict", "a tensor that grows"])
@pytest.mark.parametrize("optimizer", [AdamW, ScheduleFreeAdamW])
def test_what_a_network_saves_beside_its_weights_comes_back(tmp_path, optimizer, grows):
    sizes = dict(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=16, max_sequence_length=24)
    first, second = (module(partial(RememberingGPT, grows, **sizes), optimizer=optimizer) for _ in range(2))
    runner = fit(tmp_path, first, uneven_batches(2), max_steps=1)
    first.network.calls.number = 7
    runner.save_checkpoint(tmp_path / "one.ckpt")
    fit(tmp_path, second, uneven_batches(2), (), tmp_path / "one.ckpt", max_steps=2)
    assert second.network.calls.number == 7


def test_a_checkpoint_of_another_network_is_refused_by_name(tmp_path):
    runner = fit(tmp_path, module(), uneven_batches(2), max_steps=1)
    runner.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(ConfigError, match="The checkpoint holds another network: network"):
        fit(
            tmp_path,
            module(partial(tiny_gpt, n_layer=1)),
            uneven_batches(2),
            (),
            tmp_path / "two.ckpt",
            max_steps=2,
        )


def test_settings_hold_for_parameters_by_name():
    options = {
        "*.q_proj.weight": {"weight_decay": 0.5},
        "network.layers.1.*": {"lr": 0.25},
        "network.layers.1.mlp.*": {"lr": 0.5, "weight_decay": 0.0},
    }
    trained = module(parameter_options=options)
    trained.network = tiny_gpt()
    groups = trained.parameter_groups()
    names = {id(p): n for n, p in trained.named_parameters()}
    found = {}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        found |= {names[id(p)]: settings for p in group["params"]}
    assert set(found) == set(names.values())
    assert found["network.layers.0.attention.q_proj.weight"] == {"weight_decay": 0.5}
    assert found["network.layers.1.attention.q_proj.weight"] == {"weight_decay": 0.5, "lr": 0.25}
    assert found["network.layers.1.attention.q_proj.bias"] == {"weight_decay": 0.0, "lr": 0.25}
    assert found["network.layers.1.mlp.up_proj.weight"] == {"weight_decay": 0.0, "lr": 0.5}
    assert found["network.layers.0.mlp.up_proj.weight"] == {}
    assert found["network.norm.weight"] == {"weight_decay": 0.0}
    assert len(groups) == len({tuple(sorted(settings.items())) for settings in found.values()})
    hidden = {name for name, p in trained.named_parameters() if hasattr(p, "hidden_matrix")}
    assert hidden == {name for name, p in trained.named_parameters() if p.ndim == 2 and "layers." in name}


def test_a_pattern_that_matches_nothing_is_refused():
    trained = module(parameter_options={"network.embed_token.weight": {"weight_decay": 0.0}})
    trained.network = tiny_gpt()
    with pytest.raises(ConfigError, match=r"Did you mean network\.embed_tokens\.weight\?"):
        trained.parameter_groups()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loss_and_the_gradient_norm_of_a_step_are_there_for_callbacks(tmp_path, accumulation):
    class Figures(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.seen = float(pl_module.step_loss), float(pl_module.gradient_norm(optimizer))
            optimizer.param_groups[0]["params"][0].grad.zero_()
            assert float(pl_module.gradient_norm(optimizer)) == self.seen[1]  # once a step

    batches, record, figures = uneven_batches(accumulation), Record(), Figures()
    fit(tmp_path, module(), batches, [figures, record], max_steps=1, accumulate_grad_batches=accumulation)
    logged = record.figures[0]
    assert figures.seen == pytest.approx((logged["train/loss"], logged["train/grad_norm"]), rel=1e-6)
