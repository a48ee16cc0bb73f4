"""Every config that ships is parsed and checked; every technique has an overlay, and each overlay trains."""

import json
from pathlib import Path

import pytest

from conformance import Case
from conformance.runs import run
from conformance.workshop import text, workshop
from core import catalog
from tests.conformance.compatibility import entries, overlay_of
from tests.conformance.conftest import (
    bytes_tokenizer,
    evaluation_items,
    harness_folder,
    html_pages,
    instructions,
    labelled,
    labelled_words,
    litdata_texts,
    mds_samples,
    neox,
    numbered,
    parquet_file,
    preferences,
    problems,
    quality_model,
    repositories,
    reward_model,
    saved_dataset,
    scoring_checkpoint,
    single_answers,
    stack_exchange,
    stored_teacher,
    web_archive,
    wiki_dump,
    word_list,
)

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
OVERLAYS = sorted((CONFIGS / "techniques").glob("*.yaml"))
KINDS = [kind for kind in catalog.KINDS if kind not in ("commands", "datamodules")]
WITHOUT = {"InitialWeights", "StoredNetwork", "TokenPreparation"}
"""What a run does not choose by name."""

UNSCHEDULED = {"schedule_free_adamw"}
"""Overlays that take the schedule out."""

SHORTENED = {
    "batch_size_ramp": ["--callbacks.BatchSizeRamp.tokens_until_full=2048"],
    "slurm_engine": ["--data.engine.poll_seconds=0.1"],
    "random_restart": ["--callbacks.RandomRestart.num_steps=2"],
}
"""Overlay -> what fits it into a run of three steps."""


def own_files(path):
    """Returns the arguments that name a file of the user's, which the overlay cannot know."""
    found = {
        "pretrained": lambda: ["--model.network.path", neox(vocab_size=2048, length=256)],
        "pretrained_tokenizer": lambda: ["--data.tokenizer.path", bytes_tokenizer()],
        "harmful_content": lambda: ["--data.transforms", word_filter()],
        "decontaminate": lambda: ["--data.transforms", item_filter()],
        "quality_classifier": lambda: ["--data.transforms", quality_filter()],
        "perplexity_filter": lambda: ["--data.transforms", perplexity_filter()],
        "litdata_documents": lambda: ["--data.source", litdata_texts()],
        "mds_documents": lambda: ["--data.source", mds_samples()],
        "streaming": streamed_text,
        "json_lines_documents": lambda: ["--data.source", text()],
        "parquet_documents": lambda: ["--data.source", parquet_file()],
        "hugging_face_documents": lambda: ["--data.source", saved_dataset()],
        "warc_documents": lambda: ["--data.source", web_archive()],
        "wikipedia_dump": lambda: ["--data.source", wiki_dump()],
        "stack_exchange_dump": lambda: ["--data.source", stack_exchange()],
        "source_code": lambda: ["--data.source", repositories()],
        "html_documents": lambda: ["--data.source", html_pages()],
        "litdata": litdata_tokens,
        "distillation": lambda: ["--model.objective.teacher", stored_teacher(2048)],
        "kto": lambda: ["--data.source", single_answers()["source"]],
        **dict.fromkeys(
            ("dpo", "orpo", "reference_log_probabilities", "sim_po"),
            lambda: ["--data.source", preferences()["source"]],
        ),
        **dict.fromkeys(
            (
                "rollouts",
                "grpo",
                "ppo",
                "rejection_sampling",
                "reward_watch",
                "exact_answer",
                "regex_reward",
                "length_penalty",
                "weighted_rewards",
            ),
            lambda: ["--data.source", problems()],
        ),
        "answer_quality": lambda: [evaluated("questions", problems())],
        "lm_eval_harness": lambda: [evaluated("harness", harness_folder(), "folder")],
        "classification": lambda: [
            "--data.source",
            labelled()["source"],
            evaluated("reviews", labelled()["source"]),
        ],
        "learned_reward": lambda: with_reward("path", reward_model()),
        "refusal_reward": lambda: with_reward("files", f"[{word_list()}]"),
        "toxicity_reward": lambda: with_reward("files", f"[{word_list()}]"),
        "unit_test_reward": lambda: with_reward("isolated", "false"),
        "sequence_classification": lambda: ["--data.source", labelled()["source"]],
        "token_classification": lambda: ["--data.source", labelled_words()["source"]],
        "regression": lambda: ["--data.source", numbered()["source"]],
        "reward_model": lambda: ["--data.source", preferences()["source"]],
        "supervised_fine_tuning": lambda: ["--data.source", instructions()["source"]],
    }
    return [str(word) for word in found.get(path.stem, list)()]


def evaluated(name, source, argument="source"):
    return f"--callbacks.Evaluate.evaluations.{name}.init_args.{argument}={source}"


def with_reward(argument, value):
    return ["--data.source", problems(), f"--callbacks.Rollouts.reward.init_args.{argument}={value}"]


def litdata_tokens():
    from datamodules.preparation.writers.token_shards import TokenShards

    folder = workshop() / "litdata-tokens"
    TokenShards().write([range(1, 200)] * 3, folder, 256)
    return [
        "--data.source",
        folder,
        "--data.tokenizer.path",
        bytes_tokenizer(),
        "--model.network.vocab_size=320",
    ]


def streamed_text():
    return [
        "--data.source",
        mds_samples(),
        "--data.tokenizer.path",
        bytes_tokenizer(),
        "--model.network.vocab_size=320",
    ]


def word_filter():
    return json.dumps([{"class_path": "HarmfulContent", "init_args": {"files": [word_list()]}}])


def item_filter():
    options = {"sets": [evaluation_items()], "fields": ["question"]}
    return json.dumps([{"class_path": "Decontaminate", "init_args": options}])


def quality_filter():
    return json.dumps([{"class_path": "QualityClassifier", "init_args": {"path": quality_model()}}])


def perplexity_filter():
    return json.dumps([{"class_path": "PerplexityFilter", "init_args": {"path": scoring_checkpoint()}}])


def absent(path):
    """Returns which package or device an overlay's technique needs is not there, or None."""
    found = (Case(entry).absent() for entry in entries(*KINDS) if overlay_of(entry) == path)
    return next(filter(None, found), None)


def name(path):
    return str(path.relative_to(CONFIGS).with_suffix(""))


def test_each_technique_has_an_overlay_and_each_overlay_a_technique():
    expected = {overlay_of(entry) for entry in entries(*KINDS) if entry.name not in WITHOUT}
    assert set(OVERLAYS) == expected


@pytest.mark.parametrize("path", OVERLAYS, ids=name)
def test_an_overlay_names_its_technique(path):
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    [entry] = [e for e in entries(*KINDS) if overlay_of(e) == path]
    assert first == f"# {entry.name}: {entry.summary()}"
    assert second == f"# fit --config quickstart --config {name(path)}"
    assert entry.name in path.read_text(encoding="utf-8").partition("\n")[2]


# the recipes are for machines that are not here: tests/test_recipes.py
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name(path), marks=[pytest.mark.ci] * (path in OVERLAYS))
        for path in sorted(CONFIGS.rglob("*.yaml"))
        if "recipes" not in path.parts
    ],
)
def test_every_config_is_parsed_and_preflighted(path):
    words = ["--config=quickstart", f"--config={name(path)}"]
    done = run(["check", *words[path.name == "quickstart.yaml" :], *own_files(path)], workshop())
    if missing := absent(path):
        assert done.code == 2
        assert missing in done.error_text
        return
    assert done.code == 0, done.error_text
    assert "Nothing was started or written." in done.stdout


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """Where the quickstart's data is kept; prepared by the first run."""
    return workshop() / "quickstart-data"


@pytest.mark.slow  # the kit trains with each technique's example in the default tests
@pytest.mark.parametrize("path", OVERLAYS, ids=name)
def test_every_overlay_trains_on_the_quickstart(path, prepared):
    if missing := absent(path):
        pytest.skip(missing)
    folder = workshop() / f"overlay-{path.stem}"
    words = ["--config=quickstart", f"--config={name(path)}", f"--data.cache_dir={prepared}"]
    words += [
        "--trainer.max_steps=3",
        "--trainer.limit_val_batches=1",
        "--callbacks.TextSamples.max_new_tokens=4",
    ]
    if path.stem not in UNSCHEDULED:
        words.append("--model.lr_scheduler.warmup_steps=1")
    words += [f"--trainer.default_root_dir={folder}", *SHORTENED.get(path.stem, [])]
    done = run(["fit", *words, *own_files(path)], folder)
    assert done.code == 0, done.error_text
    assert "Trained to step 3" in done.stdout, done.stdout[-1000:]
