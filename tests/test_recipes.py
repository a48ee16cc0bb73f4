"""The recipes pass preflight on a laptop, have the sizes they are named for, and run shrunken."""

import csv
import math
import re

import pytest
import yaml

from conformance.runs import run
from conformance.workshop import workshop
from tests.conftest import HOUSE
from tests.support import tuning_files

RECIPES = {  # -> parameters: GPT-2's and Llama 3's published numbers, GPT-3's by its table 2.1
    "gpt2_124m": 124_439_808 + 47 * 768,  # the vocabulary is rounded up from 50,257 to 50,304
    "gpt2_1558m_fsdp": 1_557_611_200 + 47 * 1600,
    "llama_70b_hsdp_tensor": 70_553_706_496,
    "gpt3_13b_zero3_offload": (50257 + 2048 + 2 + 40 * 13) * 5120 + 40 * 12 * 5120**2,
    # BERT's, and the pooler and head of the objective are not the network's
    "bert_classification": (30522 + 512 + 2 + 2) * 768 + 12 * (12 * 768**2 + 13 * 768),
    "gpt3_175b_3d": (50257 + 2048 + 2 + 96 * 13) * 12288 + 96 * 12 * 12288**2,
}
TUNING = {
    "sft": tuning_files.chats,
    "multi_task": tuning_files.tasks,
    "qlora_8b": tuning_files.chats,
    "continual_pretraining": tuning_files.corpora,
    "dpo": tuning_files.pairs,
    "grpo": tuning_files.problems,
    "ppo": tuning_files.problems,
    "reward_ppo": tuning_files.pairs,
}
"""Recipe that starts from weights -> what writes the files that it names."""

FIRST = {"reward_ppo": ("reward_model", "runs/reward")}
"""Recipe -> the one that comes before, and the folder of its run."""

FOLDER = HOUSE / "configs" / "recipes"


def test_each_recipe_is_here():
    names = {*RECIPES, *TUNING, *(before for before, _ in FIRST.values())}
    assert {path.stem for path in FOLDER.glob("*.yaml")} == names
    assert {path.stem for path in FOLDER.glob("shrunken/*.yaml")} == names | {"shrink", "shrink_tuning"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_preflight_elsewhere(name):
    done = run(["check", "--offline", f"--config=recipes/{name}"], workshop())
    assert done.code == 0, done.error_text
    [count] = re.findall(r"(?:GPT|BERT): ([\d,]+) parameters", done.stdout)
    assert int(count.replace(",", "")) == RECIPES[name]


def test_elsewhere_sizes_are_still_held_against_each_other():
    words = ["check", "--offline", "--config=recipes/gpt3_175b_3d", "--trainer.num_nodes=100"]
    done = run(words, workshop())
    assert done.code == 2
    assert "HybridParallel" in done.stderr
    assert "800" in done.stderr
    assert len(done.stderr.splitlines()) <= 10


def sentences():
    """Writes sentences with classes, as SST-2 has them."""
    path = workshop() / "sst2.tsv"
    lines = [f"the film number {n} is {('bad', 'good')[n % 2]}\t{n % 2}" for n in range(100)]
    path.write_text("\n".join(["sentence\tlabel", *lines]), encoding="utf-8")
    return path


@pytest.mark.ci
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_shrunken(name, tmp_path):
    shrunken = yaml.safe_load((FOLDER / "shrunken" / f"{name}.yaml").read_text(encoding="utf-8"))
    words = ["fit", f"--config=recipes/{name}", f"--config=recipes/shrunken/{name}"]
    words += [f"--trainer.default_root_dir={tmp_path / 'run'}", f"--data.cache_dir={workshop() / 'recipes'}"]
    if name == "bert_classification":
        words.append(f"--data.source={sentences()}")
    done = run(words, tmp_path, ranks=shrunken["trainer"]["devices"])
    assert done.code == 0, done.error_text
    check_losses(tmp_path / "run")


def check_losses(folder):
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss < 2 * math.log(512) for loss in losses)
    assert list((folder / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tuning_files.base_folder(folder)
    return folder / tuning_files.BASE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name != "sft")) for name in TUNING]
)
def test_a_recipe_for_fine_tuning_passes_preflight_and_runs_shrunken(name, base, tmp_path):
    for published in (tuning_files.BASE, "Llama-3.1-8B"):
        (tmp_path / published).symlink_to(base)
    TUNING[name](tmp_path)
    runs = [FIRST[name]] if name in FIRST else []
    for recipe, folder in [*runs, (name, "run")]:
        words = [f"--config=recipes/{recipe}"]
        done = run(["check", "--offline", *words, "--model.weights=null"], tmp_path, cwd=tmp_path)
        assert done.code == 0, done.error_text
        words += [f"--config=recipes/shrunken/{recipe}", f"--trainer.default_root_dir={tmp_path / folder}"]
        cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = run(["fit", *words], tmp_path, cwd=tmp_path, environments=[cache])
        assert done.code == 0, done.error_text
        check_losses(tmp_path / folder)
