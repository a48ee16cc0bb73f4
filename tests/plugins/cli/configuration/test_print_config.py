"""`--print_config`: a comment above each option, and what is printed reads back as the same values."""

import pytest
import yaml

from core.__main__ import main
from core.errors import ConfigError
from plugins.cli.configuration.print_config import annotated


@pytest.fixture
def printed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        with pytest.raises(SystemExit) as end:
            main(["fit", *map(str, words)])
        assert end.value.code == 0
        return capsys.readouterr().out

    return call


def above(text, line):
    """Returns the lines of comment above the only line that is this one but for its indent and dash."""
    lines = [each.strip().removeprefix("- ") for each in text.splitlines()]
    [at] = [number for number, each in enumerate(lines) if each == line]
    comment = []
    while lines[at - 1 - len(comment)].startswith("# "):
        comment.insert(0, lines[at - 1 - len(comment)][2:])
    return " ".join(comment)


def test_every_option_of_the_quickstart_has_its_sentence_and_every_technique_its_summary(printed):
    text = printed("--config", "quickstart", "--print_config")
    assert above(text, "n_layer: 4") == "Number of blocks."
    assert above(text, "lr: 0.004") == "Peak learning rate."
    assert above(text, "every_n_steps: 200") == "Optimizer steps between checkpoints."
    assert above(text, "max_steps: 400") == "Stop training after this number of steps."
    assert above(text, "decay_embeddings: true").startswith("Whether embedding weights")
    assert above(text, "class_path: callbacks.progress_bar.ProgressBar").startswith("Shows step, loss")
    assert above(text, "class_path: plugins.networks.gpt.GPT").startswith("A decoder-only transformer")
    assert above(text, "class_path: datamodules.preparation.readers.text_documents.TextDocuments")
    assert above(text, "ckpt_path: null").startswith("Path/URL of the checkpoint")
    assert above(text, "comment: ''") == ""  # TensorBoard's own: Lightning's docstring has no word on it
    assert max(map(len, text.splitlines())) <= 110


def test_what_is_printed_reads_back_with_and_without_comments(printed, tmp_path):
    given = ["--config", "quickstart", "--trainer.callbacks+=LearningRateMonitor", "--data.source=a\n\n  b\n"]
    commented, plain = printed(*given, "--print_config"), printed(*given, "--print_config=plain")
    assert yaml.safe_load(commented) == yaml.safe_load(plain)
    assert [line for line in plain.splitlines() if line.lstrip().startswith("#")] == plain.splitlines()[:1]
    assert [line for line in commented.splitlines() if not line.lstrip().startswith("#")] == [
        line for line in plain.splitlines() if not line.lstrip().startswith("#")
    ]
    (tmp_path / "printed.yaml").write_text(commented, encoding="utf-8")
    assert printed("--config", "printed", "--print_config=plain") == plain


def test_flags_of_jsonargparse_work_beside_ours(printed):
    short = printed("--config", "quickstart", "--print_config=skip_default")
    assert "detect_anomaly" not in short
    assert above(short, "n_layer: 4") == "Number of blocks."
    assert printed("--config", "quickstart", "--print_config=plain,skip_default") == "".join(
        f"{line}\n" for line in short.splitlines() if not line.lstrip().startswith("#") or "==" in line
    )


def test_texts_of_several_lines_stay_what_they_are():
    text = 'ckpt_path: "one\n\n  # two"\nmodel:\n  decay_embeddings: |\n    # three\n      four\n  objective: x\n'
    commented = annotated(text)
    assert yaml.safe_load(commented) == yaml.safe_load(text)
    assert commented.count("\n") == text.count("\n") + 4  # ckpt_path, model, decay_embeddings, objective


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--print_config=plane"], "no flag 'plane'. Did you mean plain?"),
        (["--print_config=skip_default,x"], "There are plain, skip_default, skip_unset."),
        (["--model.network.n_layr=3", "--print_config=plain"], "Did you mean n_layer?"),
    ],
)
def test_a_mistake_prints_no_configuration(words, message, capsys):
    assert main(["fit", "--config", "quickstart", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_class_that_cannot_be_found_has_no_comment():
    text = "model:\n  network:\n    class_path: no.such.Net\n"
    assert "class_path: no.such.Net" in annotated(text)
    with pytest.raises(ConfigError, match="not YAML"):
        annotated("{")
