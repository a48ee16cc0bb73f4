"""The quickstart, shortened: what it prints, what it leaves behind, and that the lines it prints work."""

import math
import re
import shlex

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conformance.runs import run
from datamodules.packing.best_fit import BestFit
from tests.conftest import begun

pytestmark = pytest.mark.ci


def forked(folder, *words):
    """Runs a command in a process that has imported everything, in the folder."""
    environment = {"XDG_CACHE_HOME": str(folder / "cache")}
    done = run(words, folder, cwd=folder, environments=[environment])
    assert done.code == 0, done.error_text
    return done


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    short = ["--trainer.max_steps=60", "--trainer.val_check_interval=30"]
    return folder, begun(folder, "fit", "--config", "quickstart", *short).stdout


def figure(printed, label):
    [line] = [line for line in printed.splitlines() if line.startswith(label)]
    return float(line.removeprefix(label).split()[0])


def test_the_model_beats_the_unigram_entropy_of_the_same_text(quickstart):
    _, printed = quickstart
    unigram = figure(printed, "Unigram entropy, same text")
    loss = figure(printed, "Validation loss")
    assert 6 < unigram < 7
    assert loss < unigram - 0.3
    message = dict(
        re.findall(r"^(Validation loss|Unigram entropy).*perplexity ([\d.,]+)$", printed, re.MULTILINE)
    )
    for name, nats in (("Validation loss", loss), ("Unigram entropy", unigram)):
        assert float(message[name].replace(",", "")) == pytest.approx(
            math.exp(nats), rel=1e-3
        )  # of rounded nats


def test_the_run_folder_holds_what_was_promised(quickstart):
    folder, printed = quickstart
    made = folder / "runs" / "quickstart"
    assert (made / "checkpoints" / "step-00000060.ckpt").stat().st_size > 1_000_000
    assert Image.open(made / "loss_curve.png").size > (400, 300)
    events = EventAccumulator(str(made)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(10, 61, 10))
    texts = [name for name in events.Tags()["tensors"] if name.startswith("samples/")]
    assert len(texts) == 3
    assert (made / "metrics.csv").read_text(encoding="utf-8").count("\n") == 7
    assert "${run_folder}" in (made / "config.yaml").read_text(encoding="utf-8")
    samples = (made / "samples.txt").read_text(encoding="utf-8")
    assert len(samples) > 200
    assert "step 60/60" in printed
    assert "tokens/s" in printed


def test_the_two_lines_that_say_what_to_type_next_work(quickstart):
    folder, printed = quickstart
    generate, resume = (line.strip() for line in printed.splitlines() if line.startswith("  python -m core "))
    words = shlex.split(generate)[3:]
    one, two = (forked(folder, *words, "--max_new_tokens=20").stdout for _ in range(2))
    assert one == two
    assert len(one) > 20
    resumed = forked(folder, *shlex.split(resume)[3:-1], "70", "--trainer.limit_val_batches=1").stdout
    assert "From checkpoint: runs/quickstart/checkpoints/step-00000060.ckpt" in resumed
    assert (folder / "runs" / "quickstart" / "checkpoints" / "step-00000070.ckpt").exists()


def test_best_fit_leaves_less_than_one_per_cent_empty_and_says_so(quickstart):
    folder, _ = quickstart
    short = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--model.lr_scheduler.warmup_steps=1"]
    message = forked(folder, "fit", "--config", "quickstart", "--data.packing=BestFit", *short).stderr
    [share] = re.findall(r"^Padding in rows of 256 tokens: ([\d.]+)%$", message, re.MULTILINE)
    [prepared] = (folder / "cache" / "leyden").iterdir()
    rows = BestFit().batches(prepared / "train", sequence_length=256, batch_size=1, pad=True)
    padding = 1 - len(rows.store) / (256 * len(rows))
    assert float(share) == pytest.approx(100 * padding, abs=0.005)
    assert padding < 0.01


def test_the_users_own_text_trains_with_the_same_config(tmp_path):
    (tmp_path / "notes").mkdir()
    for number in range(12):
        (tmp_path / "notes" / f"{number}.md").write_text(f"# Note {number}\n" + "words and words. " * 120)
    smaller = ["--data.sequence_length=32", "--trainer.max_steps=2", "--model.lr_scheduler.warmup_steps=1"]
    message = forked(tmp_path, "fit", "--config", "quickstart", "--data.source=notes", *smaller).stderr
    assert "24 documents" in message  # the end of each note is a document of the validation split
    assert (tmp_path / "runs" / "quickstart" / "checkpoints" / "step-00000002.ckpt").exists()
