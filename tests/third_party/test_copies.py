"""Third-party copies of GradientClip, SpikeRollback and FSDP, written with public names alone, train as ours do."""

import json
import sys
from pathlib import Path

import pytest

from conformance.case import tiny, with_text
from conformance.runs import run
from conformance.workshop import workshop, write_config
from core import catalog
from tests.support.installing import copied, install
from tests.support.same_run import SAVED, TOLERANCE, differences, one_process, same_bits, weights_apart
from tests.support.same_run import fit as fit_same

pytestmark = pytest.mark.ci

HERE = Path(__file__).resolve().parent
PACKAGES = ("acme_clip", "acme_rollback", "acme_fsdp")


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """Lets this process, and those that it starts, see the packages."""
    folder = copied(tmp_path_factory.mktemp("copies"), *(HERE / name for name in PACKAGES))
    site = str(install(folder / "site", *(folder / name for name in PACKAGES)))
    sys.path.insert(0, site)
    catalog.entries.cache_clear()
    yield
    sys.path.remove(site)
    catalog.entries.cache_clear()


def assert_same(found, expected):
    """Compares two runs to the last bit: figures of all steps, final weights, the optimizer's state."""
    for done in (found, expected):
        assert done.code == 0, done.error_text
    assert found.record["losses"] == expected.record["losses"]
    one, other = found.checkpoint(), expected.checkpoint()
    for part in ("state_dict", "optimizer_states"):
        assert same_bits(one[part], other[part])


def assert_same_end(found, expected):
    """Compares the end of two runs to the last bit, of which one was resumed."""
    assert found.code == 0, found.error_text
    one, other = found.checkpoint(), expected.checkpoint()
    for part in ("state_dict", "optimizer_states"):
        assert same_bits(one[part], other[part])


@pytest.mark.parametrize(
    "options", [{"limit": 0.25}, {"method": "adaptive", "limit": None, "z": 0.1, "warmup_steps": 2}]
)
def test_a_copy_of_gradient_clip_trains_as_ours(options):
    runs = [
        fit_same(
            {
                "trainer": {
                    "gradient_clip_val": None,
                    "callbacks": [{"class_path": name, "init_args": options}],
                }
            },
            1,
        )
        for name in ("AcmeClip", "GradientClip")
    ]
    assert_same(*runs)
    assert runs[0].record["figures"] == runs[1].record["figures"]


def rolled_back(name):
    """Trains 8 steps, the fifth of which is spoilt; returns the run and its rollbacks."""
    folder, step = workshop() / f"copy-{name}", 8 * 16
    guard = {"window": 3, "sigma": 50.0, "rewind_steps": 2, "skip_batches": 5, "snapshot_every_n_steps": 2}
    spoilt = {"first": 4 * step, "last": 5 * step, "gradient": 1e4}
    callbacks = [
        {"class_path": "conformance.recorder.Recorder", "init_args": {"folder": str(folder)}},
        {"class_path": "tests.support.poison.Poison", "init_args": spoilt},
        {"class_path": name, "init_args": guard | {"lr_factor": 0.5}},
        {"class_path": "conformance.recorder.Saver", "init_args": {"folder": str(folder), "save_at": 4}},
    ]
    trainer = {
        "default_root_dir": str(folder),
        "callbacks": callbacks,
        "log_every_n_steps": 2,
        "accumulate_grad_batches": 2,
        "limit_train_batches": 1.0,
        "plugins": [{"class_path": "AtomicCheckpoint"}],
    }
    network = {"init_args": {"n_layer": 1, "max_sequence_length": 16}}
    values = {"trainer": trainer, "model": {"network": network}, "data": {"init_args": {"batch_size": 4}}}
    done = run(["fit", f"--config={write_config(folder.name, with_text(tiny([values]), {}))}"], folder)
    assert done.code == 0, done.error_text
    [written] = folder.glob("*_rollbacks.json")
    return done, json.loads(written.read_text(encoding="utf-8"))


def test_a_copy_of_spike_rollback_trains_as_ours():
    (found, events), (expected, rollbacks) = map(rolled_back, ("AcmeRollback", "SpikeRollback"))
    assert [(each["step"], each["rewound_to_step"]) for each in rollbacks] == [(5, 2)]
    assert events == rollbacks
    assert_same(found, expected)


def test_a_copy_of_fsdp_trains_as_ours_and_as_one_process():
    found, expected = (
        fit_same({"trainer": {"strategy": {"class_path": name, "init_args": {"stage": 3}}}}, 2)
        for name in ("AcmeFSDP", "FSDP")
    )
    assert_same(found, expected)
    assert found.record["figures"] == expected.record["figures"]
    assert max(differences(found, one_process({})).values()) < TOLERANCE


def test_the_copy_of_fsdp_saves_and_resumes_parts_bitwise():
    """Each rank writes its own parts and reads them again, with `SavesParts` and `ReadsParts`, as ours does."""
    plugins = [{"class_path": "ShardedCheckpoint"}]
    copy = {
        "trainer": {"strategy": {"class_path": "AcmeFSDP", "init_args": {"stage": 3}}, "plugins": plugins}
    }
    found = fit_same(copy, 2, name="acme-parts")
    assert found.code == 0, found.error_text
    path = found.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    assert len(list(path.glob("__*.distcp"))) == 2
    again = fit_same(copy, 2, f"--ckpt_path={path}", name="acme-parts-resumed")
    assert_same_end(again, found)
    ours = {"trainer": {"strategy": {"class_path": "FSDP", "init_args": {"stage": 3}}, "plugins": plugins}}
    assert_same_end(fit_same(ours, 2, f"--ckpt_path={path}", name="acme-parts-to-ours"), found)


def test_checkpoints_of_the_copy_of_fsdp_are_those_of_one_process():
    copy = {"trainer": {"strategy": {"class_path": "AcmeFSDP", "init_args": {"stage": 3}}}}
    found = fit_same(copy, 2)
    path = f"--ckpt_path={found.folder / 'checkpoints' / f'step-{SAVED}.ckpt'}"
    again = fit_same(copy, 2, path, name="acme-resumed")
    assert again.code == 0, again.error_text
    assert same_bits(again.checkpoint()["state_dict"], found.checkpoint()["state_dict"])
    alone = fit_same({"trainer": {"strategy": "auto"}}, 1, path, name="acme-to-one")
    assert weights_apart(alone, one_process({})) < TOLERANCE
