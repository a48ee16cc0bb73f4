"""The command `check`: every problem by itself and all in one message, what runs, and when hooks fire."""

import os

import pytest
import yaml
from lightning.pytorch import Callback

from conformance.runs import run
from core.__main__ import main
from core.technique import Device, Feature, Package, WorldSize, technique
from plugins.networks.gpt import GPT
from tests.support.offers import offering

HERE = __name__


@technique(paper="a test", needs=(Package("leyden-no-such-thing>=2"),))
class LacksPackage(Callback):
    """Needs a package that nobody has."""


@technique(paper="a test", needs=(Package("PyYAML>=900"),))
class LacksVersion(Callback):
    """Needs a package that is newer than the one there is."""


@technique(paper="a test", needs=(Device("cuda", capability=(9, 0)),))
class LacksDevice(Callback):
    """Needs a GPU."""


@technique(paper="a test", needs=(WorldSize(at_least=2),))
class LacksCompany(Callback):
    """Needs two processes."""


@technique(paper="a test", needs=(Feature("exact_resume"),))
class LacksFeature(Callback):
    """Needs what `ToyData` does not offer."""


@technique(paper="a test", api=">=99,<100")
class FromTomorrow(Callback):
    """Written for another core."""


@technique(paper="a test", conflicts={"PeriodicCheckpoint": "both write, at the same time"})
class Jealous(Callback):
    """Stands no other that saves."""


@technique(paper="a test", conflicts={"DDP": "it has hooks of its own", "MixedPrecision": "too coarse"})
class Choosy(Callback):
    """Stands neither a strategy nor a precision that is named by a word."""


@technique(paper="a test", owns=("gradient_clipping", "learning_rate"))
class Owner(Callback):
    """Clips and sets the rate."""


@technique(paper="a test", after=("Second", "EarlyStopping"), before=("PeriodicCheckpoint",))
class First(Callback):
    """Comes first, or not."""


@technique(paper="a test", after=("First",))
class Second(Callback):
    """Closes the circle."""


class Sized(GPT):
    """A network whose arguments have names of their own."""

    def __init__(self, longest: int = 8, ids: int = 64) -> None:
        super().__init__(ids, 1, 2, 16, longest)


def place(name):
    return f"{HERE}.{name}"


@pytest.fixture
def check(tiny, tmp_path, monkeypatch, capsys):
    """Runs `check` in a folder of its own on the tiny run; returns (exit code, lines of errors, lines printed)."""

    def call(*names, words=(), **changes):
        for key, value in changes.items():
            tiny[key.partition("_")[0]][key.partition("_")[2]] = value
        tiny["trainer"]["callbacks"] += [{"class_path": place(name)} for name in names]
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny, sort_keys=False), encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        code = main(["check", "--config=run.yaml", *words])
        message = capsys.readouterr()
        assert os.listdir(tmp_path) == ["run.yaml"]
        assert len(message.err.splitlines()) <= 10
        return code, message.err.splitlines(), message.out.splitlines()

    return call


def line_of(word, folder):
    """Returns "run.yaml:N" for the line of the config that holds a word."""
    lines = (folder / "run.yaml").read_text(encoding="utf-8").splitlines()
    return f"run.yaml:{next(n for n, line in enumerate(lines, 1) if word in line)}"


PROBLEMS = {
    "LacksPackage": "leyden-no-such-thing is not installed: pip install 'leyden-no-such-thing>=2'",
    "LacksVersion": "PyYAML>=900 is needed, ",
    "LacksDevice": "a CUDA device of compute capability 9.0 or more is needed, this run is on CPU: "
    "set --trainer.accelerator=cuda on a machine that has one",
    "LacksCompany": "at least 2 processes are needed, this run has 1: "
    "set --trainer.devices or --trainer.num_nodes",
    "LacksFeature": "nothing in this run offers exact_resume: select "
    f"{' or '.join(sorted(offering('exact_resume', 'datamodules')))}",
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_missing_is_told_with_its_place(name, check, tmp_path):
    code, message, _ = check(name)
    assert code == 2
    assert message[0] == "This selection cannot run, 1 problem:"
    assert message[1].startswith(f"- {name} ({line_of(name, tmp_path)}): {PROBLEMS[name]}")
    assert len(message) == 2


def test_what_the_options_of_the_trainer_give_is_not_missing(check):
    assert check("LacksCompany", words=["--trainer.devices=2"])[0] == 0


def test_a_technique_for_another_core_is_refused(check, tmp_path):
    code, message, _ = check("FromTomorrow")
    where = line_of("FromTomorrow", tmp_path)
    assert (code, message[1:]) == (2, [
        f"- FromTomorrow ({where}) was written for core API >=99,<100, this is 1.4: pip install --upgrade leyden"
    ])  # fmt: skip


def test_a_conflict_is_told_with_both_places_and_the_way_out(check, tmp_path):
    code, message, _ = check(words=[f"--trainer.callbacks+={place('Jealous')}"])
    both = (
        f"Jealous (--trainer.callbacks+) and PeriodicCheckpoint ({line_of('PeriodicCheckpoint', tmp_path)})"
    )
    assert code == 2
    assert message[1:] == [
        f"- {both} exclude each other, keep one (--callbacks.-Jealous or --callbacks.-PeriodicCheckpoint): "
        "both write, at the same time"
    ]
    assert (
        check(words=[f"--trainer.callbacks+={place('Jealous')}", "--callbacks.-PeriodicCheckpoint"])[0] == 0
    )


def test_a_conflict_with_what_a_word_of_the_trainer_means_is_told_too(check, tmp_path):
    code, message, _ = check("Choosy", words=["--trainer.precision=bf16-mixed"], trainer_strategy="ddp")
    choosy = f"Choosy ({line_of('Choosy', tmp_path)})"
    strategy = f"DDP ({line_of('strategy', tmp_path)})"
    assert code == 2
    assert message[1:] == [
        f"- {choosy} and {strategy} exclude each other, keep one (--callbacks.-Choosy): it has hooks of its own",
        f"- {choosy} and MixedPrecision (--trainer.precision) exclude each other, keep one "
        "(--callbacks.-Choosy): too coarse",
    ]


def test_the_same_callback_twice_is_told_with_both_places(check, tmp_path):
    code, message, _ = check(
        "Owner", words=[f"--trainer.callbacks+={place('Owner')}"], model_lr_scheduler=None
    )
    where = f"({line_of('Owner', tmp_path)}, --trainer.callbacks+)"
    assert code == 2
    assert message[1] == f"- Owner is 2 times in trainer.callbacks {where}; keep one."


def test_two_owners_are_told_options_of_the_trainer_included(check, tmp_path):
    code, message, _ = check("Owner", words=["--trainer.gradient_clip_val=1.0"])
    owner = f"Owner ({line_of('Owner', tmp_path)})"
    schedule = f"WarmupCosine ({line_of('lr_scheduler', tmp_path)})"
    clip = "trainer.gradient_clip_val (--trainer.gradient_clip_val; =null turns it off)"
    assert code == 2
    assert message[1:] == [
        f"- {owner} and {clip} would both control the gradient clipping; keep one.",
        f"- {owner} and {schedule} would both control the learning rate; keep one.",
    ]


def test_a_circle_is_told_before_anything_is_built(check, tmp_path):
    code, message, _ = check("First", "Second")
    both = ", ".join(f"{name} ({line_of(name, tmp_path)})" for name in ("First", "Second"))
    assert (code, message[1:]) == (2, [
        f"- {both} ask to come before each other in a circle; take one out of trainer.callbacks."
    ])  # fmt: skip


def test_too_many_processes_are_refused_before_they_fill_the_memory(check):
    many = max(8, os.cpu_count()) + 91
    code, message, _ = check(words=[f"--trainer.devices={many}"])
    assert code == 2
    assert message[1].startswith(f"- {many} processes on {os.cpu_count()} cores would fill the memory")
    assert check(words=["--trainer.devices=4"])[0] == 0


SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_PROCID": "0",
         "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}  # fmt: skip
LAUNCHED = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
    "srun": {**SLURM, "SLURM_STEP_NUM_TASKS": "2"},
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_processes_that_were_launched_in_another_number_are_refused(launcher, check, monkeypatch):
    for name, value in LAUNCHED[launcher].items():
        monkeypatch.setenv(name, value)
    code, message, _ = check()
    assert code == 2
    assert message[1:] == [
        "- 2 processes were launched, --trainer.devices x --trainer.num_nodes is 1: "
        "give them the launcher's numbers, on one machine --trainer.devices=2"
    ]
    assert check(words=["--trainer.devices=2"])[0] == 0


def test_a_launcher_that_gives_no_number_is_refused(check, monkeypatch):
    for name, value in {**LAUNCHED["torchrun"], "WORLD_SIZE": "four"}.items():
        monkeypatch.setenv(name, value)
    code, message, _ = check()
    assert (code, message[1:]) == (
        2,
        ["- WORLD_SIZE is 'four' in the environment, not a number of processes"],
    )


@pytest.mark.parametrize(
    ("environment", "enough"),
    [
        ({}, False),
        ({"MASTER_ADDR": "a"}, False),
        ({"MASTER_ADDR": "a", "NODE_RANK": "0"}, True),
        ({**LAUNCHED["torchrun"], "WORLD_SIZE": "3"}, True),
        ({**SLURM, "SLURM_NTASKS": "3", "SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "1"}, True),
    ],
)
def test_several_machines_need_a_launcher(environment, enough, check, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, message, _ = check(words=["--trainer.num_nodes=3"])
    assert code == (0 if enough else 2), message
    if not enough:
        assert message[1].startswith(
            "- trainer.num_nodes is 3, but nothing launched this run on other machines."
        )
        assert "torchrun --nnodes=3 --nproc_per_node=1 " in message[1]


@pytest.mark.ci
def test_one_process_in_an_allocation_for_several_is_left_alone(check, monkeypatch):
    for name, value in SLURM.items():  # a batch script that calls no srun
        monkeypatch.setenv(name, value)
    assert check()[0] == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--trainer.max_steps=2"], "schedule has only 2 steps. Set --model.lr_scheduler.warmup_steps to less"),
        (["--model.lr_scheduler.warmup_steps=6"], "warmup_steps is 6, and the schedule has only 6 steps"),
        (["--trainer.max_steps=50", "--model.lr_scheduler=WarmupCosine", "--model.lr_scheduler.warmup_steps=60"],
         "- WarmupCosine (--model.lr_scheduler.warmup_steps): warmup_steps is 60"),
        (["--model.lr_scheduler.total_steps=2"], "warmup_steps is 2, and the schedule has only 2 steps"),
        (["--model.lr_scheduler.total_steps=7"], "- WarmupCosine (--model.lr_scheduler.total_steps): total_steps "
         "is 7, and the run has only 6 steps"),
        (["--trainer.accumulate_grad_batches=0"], "--trainer.accumulate_grad_batches: trainer.accumulate_grad_batches "
         "is 0, not a finite number from 1 upwards"),
        (["--trainer.val_check_interval=0"], "--trainer.val_check_interval: trainer.val_check_interval is 0, not a number "
         "of optimizer steps from 1 upwards: to train without validation, set --trainer.limit_val_batches=0"),
        ([f"--trainer.max_steps={10**50}"], "trainer.max_steps is more than 1,000,000,000,000: set it to"),
        (["--trainer.log_every_n_steps=0"], "trainer.log_every_n_steps is 0"),
        (["--trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val is -1"),
        (["--trainer.gradient_clip_val=.inf"], "trainer.gradient_clip_val is inf"),
        (["--trainer.callbacks+=LearningRateFinder"], "LearningRateFinder (--trainer.callbacks+) and WarmupCosine"),
        (["--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.1"],
         "and WarmupCosine"),
        (["--trainer.accumulate_grad_batches=2", "--trainer.callbacks+=GradientAccumulationScheduler",
          "--trainer.callbacks.scheduling={0: 2}"], "would both control the gradient accumulation; keep one."),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together_are_refused(words, expected, check):
    code, message, _ = check(words=words)
    assert code == 2
    assert len(message) == 2
    assert expected in message[1]


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.max_steps=3"],
        ["--model.lr_scheduler.total_steps=6"],
        ["--trainer.max_steps=50", "--model.lr_scheduler.total_steps=5"],  # the rate stays at its end
        ["--trainer.max_steps=1"],  # one step is a trial
        ["--trainer.max_steps=-1", "--trainer.max_epochs=1"],  # its length is known later
        ["--trainer.max_steps=2", "--trainer.fast_dev_run=true"],
        ["--model.lr_scheduler=null", "--trainer.max_steps=2"],
        ["--data.sequence_length=8", "--data.vocab_size=60"],
    ],
)
def test_arguments_that_go_together_pass(words, check):
    assert check(words=words)[:2] == (0, [])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--data.sequence_length=17"],
            "--model.network.max_sequence_length=17 or --data.sequence_length=16.",
        ),
        (["--data.vocab_size=65"], "The data's tokenizer has 65 tokens, the network's vocab_size is 64."),
    ],
)
def test_data_that_does_not_fit_the_network_is_refused(words, expected, check):
    code, message, _ = check(words=words)
    assert (code, len(message)) == (2, 2)
    assert expected in "\n".join(message)


def test_the_tokenizer_of_a_data_module_is_held_against_the_network(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--config=quickstart", "--data.tokenizer.vocab_size=2049"]) == 2
    message = capsys.readouterr().err.splitlines()
    assert len(message) == 2
    assert "The data's tokenizer has 2,049 tokens, the network's vocab_size is 2,048." in message[0]


@pytest.mark.parametrize(("size", "code"), [("longest=15", 2), ("ids=63", 2), ("longest=16", 0)])
def test_sizes_that_only_the_built_network_tells_are_checked_before_the_data_is_prepared(size, code, check):
    assert check(words=[f"--model.network.{size}"], model_network={"class_path": place("Sized"), "init_args": {
        "longest": 16, "ids": 64}})[0] == code  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--trainer.strategy=ddpp"], "--trainer.strategy: there is no strategy named 'ddpp'. Did you mean ddp?"),
        (["--trainer.num_nodes=0"], "--trainer.num_nodes: `num_nodes` must be a positive integer, but got 0."),
        (["--trainer.accelerator=tpu"], "--trainer.accelerator: accelerator is tpu"),
    ],
)  # fmt: skip
def test_what_the_trainer_says_against_its_options_comes_with_the_rest(words, expected, check):
    code, message, _ = check("LacksFeature", words=words)
    assert (code, message[0]) == (2, "This selection cannot run, 2 problems:")
    assert message[1].startswith(f"- {expected}")
    assert "exact_resume" in message[2]


ALL = ("LacksPackage", "LacksVersion", "LacksDevice", "LacksCompany", "LacksFeature", "FromTomorrow", "Jealous",
       "Owner", "First", "Second")  # fmt: skip


def test_all_problems_come_in_one_message_with_exit_code_2_and_nothing_is_written(tiny, write_yaml, tmp_path):
    tiny["trainer"]["callbacks"] += [{"class_path": place(name)} for name in ALL]
    path = write_yaml("run.yaml", tiny)
    wrong = ["--trainer.max_steps=2", "--trainer.gradient_clip_val=1"]
    for command in ("check", "fit"):
        done = run([command, f"--config={path}", *wrong], tmp_path, cwd=tmp_path)
        assert done.code == 2
        lines = done.stderr.splitlines()
        # five needs, API, conflict, two owners, circle, schedule
        assert lines[0] == "This selection cannot run, 11 problems:"
        assert len(lines) == 10
        assert lines[-1] == "- ... and 3 more"
        assert os.listdir(tmp_path) == ["run.yaml"]


# -- what runs ---------------------------------------------------------------------------------------


def test_what_the_trainer_adds_is_in_the_table(check):
    code, _, printed = check(
        trainer_strategy="ddp", trainer_precision="bf16-mixed", trainer_logger=True,
        trainer_enable_model_summary=True,
    )  # fmt: skip
    assert code == 0
    rows = {line.split()[0]: line.split()[-1] for line in printed if "lightning " in line}
    logger = next(name for name in rows if name.endswith("Logger"))
    summary = next(name for name in rows if name.endswith("ModelSummary"))
    assert rows == {
        "MixedPrecision": "trainer.precision",
        logger: "trainer.logger", summary: "default",
    }  # fmt: skip
