"""Configurations changed at random, and what every command promises for them."""

import json
import signal
import sys

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from core.__main__ import main

POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "pwned"]}}
NAMES = ["GPT", "AdamW", "LossCurve", "os.system", "this.X", "torch.nn.Linear", "torch.os.system", "no.such.Class", "torch",
         "lightning.pytorch.callbacks.LambdaCallback", "torch.optim.lr_scheduler.LambdaLR", ".", "a.", "Tensor",
         "lightning.pytorch.Trainer", "torch.hub.load", "torch.Tensor"]  # fmt: skip
SCALARS = [None, True, False, 0, 1, -1, 1e-300, 1e308, float("inf"), float("nan"), "", " ", "null",
           "1e3", "²", "\N{BELL}", "é" * 300, "x" * 5_000, "../..", "/", "/dev/null", "~", "$HOME", "${run_folder}",
           "--config", "a,b", "[1, 2", "{", "*x", "10:00", "auto", "cuda", "16-mixed", "ddp", "[" * 3_000, "- " * 500,
           json.dumps(POPEN)]  # fmt: skip


LARGE = [2**31, 2**63, 2**70, 10**30]
"""Not for every place: a config may ask for a billion layers or devices, and would get them."""

COUNTED = {"max_steps", "max_epochs", "seed_everything", "seed", "lr", "every_n_steps", "log_every_n_steps", "warmup_steps",
           "val_check_interval", "cache_bytes", "keep", "num_sanity_val_steps", "limit_val_batches"}  # fmt: skip


def values():
    """Values that do not belong, nested up to two deep."""
    plain = st.sampled_from(SCALARS) | st.integers(-3, 40) | st.floats() | st.text(max_size=20)
    named = st.sampled_from(NAMES).map(lambda name: {"class_path": name})
    given_ = st.builds(lambda name, args: {"class_path": name, "init_args": args}, st.sampled_from(NAMES), st.dictionaries(
        st.sampled_from(["x", "lr", "n_layer", "lr_lambda", "on_train_start"]), plain | named, max_size=2))  # fmt: skip
    single = plain | st.sampled_from(NAMES) | named | given_ | st.just(POPEN)
    keys = st.text(max_size=8) | st.integers(0, 3)
    return single | st.lists(single, max_size=3) | st.dictionaries(keys, single, max_size=3)


def places(value, at=()):
    """Yields the path of keys of everything in a configuration."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def changed(config, at, how, value):
    """Returns a copy of a configuration with one place changed."""
    config = json.loads(json.dumps(config))
    holder = config
    for key in at[:-1]:
        holder = holder[key]
    if how == "replace":
        holder[at[-1]] = value
    elif how == "remove":
        del holder[at[-1]]
    elif isinstance(holder, list):
        holder.append(value)
    else:
        holder[f"{at[-1]}{'+' if how == 'append' else 'x'}"] = value
    return config


def mutations(config):
    """Returns a strategy of the configuration with one to three places changed."""
    how = st.sampled_from(["replace", "replace", "replace", "remove", "append", "add"])

    @st.composite
    def mutated(draw):
        result = config
        for _ in range(draw(st.integers(1, 3))):
            if there := sorted(places(result), key=str):
                at = draw(st.sampled_from(there))
                value = st.sampled_from(LARGE) if at[-1] in COUNTED and draw(st.booleans()) else values()
                result = changed(result, at, draw(how), draw(value))
        return result

    return mutated()


def ends_well(words, capfd, folder):
    """Asserts that a command succeeds or complains as it promises, and that nothing of a stranger has run."""
    capfd.readouterr()
    signal.setitimer(signal.ITIMER_VIRTUAL, 30)  # of CPU time; an alarm is pytest-timeout's
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    err = capfd.readouterr().err
    complaint = [line for line in err.splitlines() if "Warning" not in line]
    assert code in (0, 2), err
    assert "Traceback" not in err
    assert code == 0 or 1 <= len(complaint) <= 10, err
    assert code == 0 or len(err) < 20_000
    assert not (folder / "pwned").exists()
    assert "this" not in sys.modules


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to stand in, in which a run writes nothing for good."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    before = signal.signal(signal.SIGVTALRM, _hangs)
    yield tmp_path
    signal.signal(signal.SIGVTALRM, before)


def _hangs(*_):
    raise AssertionError("it takes more than 30 seconds")


LOOSE = {"deadline": None, "suppress_health_check": list(HealthCheck)}
