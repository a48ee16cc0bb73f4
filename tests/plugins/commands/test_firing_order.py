"""The order of hooks that `check` prints is the order in which a real run calls them."""

import pytest
import yaml
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping

from callbacks.periodic_checkpoint import PeriodicCheckpoint
from core.__main__ import main
from core.language_module import LanguageModule
from core.technique import technique
from plugins.commands.check import hooks
from tests.support.toy import ToyData

HOOKS = hooks()

CALLS = []


def noting(hook, function):
    def note(self, *arguments, **named):
        CALLS.append((hook, type(self).__name__))
        return function(self, *arguments, **named)

    return note


def noted(kind):
    """Makes each hook of a class note that it was called."""
    for hook in HOOKS:
        if hasattr(kind, hook):
            setattr(kind, hook, noting(hook, getattr(kind, hook)))
    return kind


@noted
@technique(paper="a test", after=("Early",))
class Late(Callback):
    """Stands first in the list."""


@noted
@technique(paper="a test", before=("Stopper",))
class Early(Callback):
    """Stands last in the list; can end the run with an error."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.fail_at:
            raise RuntimeError("as ordered")


@noted
@technique(paper="a test", after=("Keeper",))
class AfterSaving(Callback):
    """Comes behind the checkpoints, which Lightning puts last."""


@noted
class Stopper(EarlyStopping):
    """Is called late at the end of an epoch."""


@noted
class Keeper(PeriodicCheckpoint):
    """Saves."""


@noted
class NotedData(ToyData):
    """Has hooks, too."""


def printed_order(text):
    lines = text.partition("Hooks fire in this order:\n")[2].partition("\n\n")[0].splitlines()
    return {line.split()[0]: line.partition(line.split()[0])[2].strip().split(", ") for line in lines}


@pytest.fixture
def run(tiny, tmp_path, monkeypatch, capsys):
    """Runs a command on a tiny run with noted callbacks; returns (exit code, calls, what was printed)."""
    here = [
        {"class_path": f"{__name__}.{name}"} for name in ("AfterSaving", "Late", "Stopper", "Keeper", "Early")
    ]
    here[2]["init_args"] = {"monitor": "val/loss", "patience": 99}
    here[3]["init_args"] = {"every_n_steps": 2}
    tiny["trainer"] |= {"callbacks": here, "val_check_interval": 2, "limit_val_batches": 1, "max_steps": 4,
                        "num_sanity_val_steps": 1, "default_root_dir": "run"}  # fmt: skip
    tiny["data"] = {"class_path": f"{__name__}.NotedData"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    own = {
        hook for hook in HOOKS if getattr(LanguageModule, hook, 0) is not getattr(LightningModule, hook, 0)
    }
    for hook in own:
        monkeypatch.setattr(LanguageModule, hook, noting(hook, getattr(LanguageModule, hook)))

    def call(command, *words):
        CALLS.clear()
        code = main([command, "--config=run.yaml", *words])
        return code, list(CALLS), capsys.readouterr().out

    return call


def compare(calls, order):
    """Asserts of each hook that was called that the same were called in the same order, each time."""
    hooks = {hook for hook, _ in calls}
    for hook in hooks:
        names = [name for called, name in calls if called == hook and name != "RunRecord"]
        expected = [name for name in order[hook] if name != "RunRecord"]
        assert len(names) >= len(expected), hook
        assert names == (expected * len(names))[: len(names)], hook
    return hooks


def test_hooks_fire_in_the_order_that_check_prints(run):
    _, calls, text = run("check")
    order = printed_order(text)
    assert calls == []
    assert order["on_train_start"] == [
        "RunRecord",
        "Early",
        "Late",
        "Stopper",
        "Keeper",
        "AfterSaving",
        "LanguageModule",
    ]
    assert order["on_train_epoch_end"] == ["Early", "Late", "AfterSaving", "Stopper", "Keeper"]
    assert order["setup"][:3] == ["NotedData", "RunRecord", "Early"]

    code, calls, _ = run("fit")
    assert code == 0
    seen = compare(calls, order)
    code, later, _ = run("fit", "--ckpt_path=last", "--trainer.max_steps=8", "--callbacks.Early.fail_at=6")
    assert code == 1
    seen |= compare(later, order)
    assert seen == set(HOOKS) == set(order)

    start, end = (
        calls.index((hook, "AfterSaving")) for hook in ("on_sanity_check_start", "on_sanity_check_end")
    )
    first = dict.fromkeys(hook for hook, _ in calls[:start] + calls[end:])
    unordered = {"on_sanity_check_start", "on_load_checkpoint", "on_save_checkpoint", "on_exception"}
    assert [hook for hook in first if hook not in unordered] == [h for h in HOOKS if h not in unordered]


def test_every_hook_of_a_callback_in_fit_is_listed():
    others = ("on_test", "on_predict", "state_", "load_state_dict", "_")
    assert {name for name in vars(Callback) if not name.startswith(others)} == set(HOOKS)
