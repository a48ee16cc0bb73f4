"""Refusals and toxic answers, by lists and by a classifier that is trained for it."""

import json

import pytest

from core.__main__ import main
from core.errors import ConfigError
from plugins.rewards.refusal_reward import RefusalReward
from plugins.rewards.toxicity_reward import ToxicityReward
from toolkit.rewards import Sample


def sample(answer, **record):
    return Sample("a prompt", answer, [1], True, record)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A list of phrases, and a classifier of friendly and rude texts trained by the command."""
    folder = tmp_path_factory.mktemp("safety")
    (folder / "refusals.txt").write_text("# phrases\nI cannot help with\nI'm sorry, but\n", encoding="utf-8")
    words = {"good": "kind gentle warm calm clear", "bad": "nasty vile rude awful mean"}
    for name, some in words.items():
        lines = [" ".join(some.split()[(n * step) % 5] for step in range(1, 2 + n % 7)) for n in range(200)]
        lines = [f"the {number} {line} one" for number, line in enumerate(lines)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    command = [
        "train-quality-filter",
        "--reader",
        "JSONLinesDocuments",
        "--output",
        str(folder / "filter.safetensors"),
    ]
    command += ["--good", str(folder / "good.jsonl"), "--bad", str(folder / "bad.jsonl"), "--buckets", "4096"]
    assert main(command) == 0
    return folder


def test_a_refusal_is_right_where_the_record_says_so(files):
    refuses = RefusalReward([str(files / "refusals.txt")], field="harmful")
    texts = ["I CANNOT help, with that.", "Here it is.", "Sure. " * 40 + "I cannot help with more."]
    assert refuses.score([sample(text, harmful=True) for text in texts]) == [1, 0, 0]
    assert refuses.score([sample(text, harmful=False) for text in texts]) == [0, 1, 1]
    assert RefusalReward([str(files / "refusals.txt")]).score([sample(text) for text in texts]) == [0, 1, 1]


def test_a_trained_classifier_tells_them_apart(files):
    model = str(files / "filter.safetensors")
    kind, rude = ToxicityReward(model=model).score(
        [sample("a warm and gentle word"), sample("vile, nasty, mean")]
    )
    assert -1 <= rude < -0.9
    assert -0.1 < kind <= 0
    assert RefusalReward(model=model).score([sample("gentle and warm"), sample("vile and nasty")]) == [1, 0]


def test_a_listed_word_is_certain(files):
    (files / "words.txt").write_text("darn\n")
    texts = [sample("Darn!"), sample("darning socks"), sample("")]
    assert ToxicityReward([str(files / "words.txt")]).score(texts) == [-1, 0, 0]
    both = ToxicityReward([str(files / "words.txt")], str(files / "filter.safetensors"))
    found = both.score([sample("darn gentle"), sample("vile")])
    assert found[0] == -1 < found[1] < -0.5


def test_mistakes(files):
    for kind in (RefusalReward, ToxicityReward):
        with pytest.raises(ConfigError, match=f"{kind.__name__} needs `files`"):
            kind()
        with pytest.raises(ConfigError, match=f"{kind.__name__}.files: .*No such file"):
            kind([str(files / "none.txt")])
        with pytest.raises(ConfigError, match="cannot be used as a quality filter"):
            kind(model=str(files / "refusals.txt"))
    with pytest.raises(ConfigError, match="'harmful' of a record is 'yes'; it has to be true or false"):
        RefusalReward([str(files / "refusals.txt")], field="harmful").score([sample("a", harmful="yes")])
    with pytest.raises(ConfigError, match="characters is 0"):
        RefusalReward([str(files / "refusals.txt")], characters=0)
