"""PerplexityFilter: perplexities against float64 logits of each prefix, what it drops and counts, any workers, and refusals."""

import csv
import json
import math
import pickle

import pyarrow
import pytest
import torch

from core.__main__ import main
from core.errors import ConfigError
from datamodules.preparation.transforms.perplexity_filter import PerplexityFilter, windows
from plugins.checkpoints.stored_network import load_network
from plugins.networks.bert import BERT
from plugins.networks.gpt import GPT
from tests.support.corpus import contents
from tests.support.stored_networks import PLAIN, lively_network, store

SIZE = PLAIN | {"max_sequence_length": 16}
TEXTS = ["the lamp is on", "a", "theth " * 20, "Over the hills and far away " * 5, "zq" * 40]
END = 0


@pytest.fixture(scope="module", params=["file", "folder"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "a.ckpt"
    return store(lively_network(GPT, SIZE), SIZE, path, sharded=request.param == "folder")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return store(lively_network(GPT, SIZE), SIZE, tmp_path_factory.mktemp("plain") / "a.ckpt")


def direct(path, text, tokens, window):
    """Returns the perplexity in float64, each token from a prefix of its own."""
    from tokenizers import Tokenizer

    network, tokenizer, end = load_network(path)
    ids = [end, *Tokenizer.from_str(tokenizer).encode(text).ids[:tokens]]
    network, losses = network.double(), []
    for place in range(1, len(ids)):
        if place <= window:
            begin = 0
        else:  # windows begin every half window
            step = window - window // 2
            begin = -(-(place - window) // step) * step
        with torch.no_grad():
            logits = network.logits(network({"input_ids": torch.tensor([ids[begin:place]])})[0, -1])
        losses.append(-logits.log_softmax(-1)[ids[place]].item())
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize(("tokens", "window"), [(1000, 16), (1000, 5), (20, 16), (1, 2), (1000, 4096)])
def test_the_perplexity_is_that_of_each_token_after_its_window(checkpoint, tokens, window):
    stage = PerplexityFilter(str(checkpoint), tokens=tokens, window=window)
    for text in TEXTS:
        expected = direct(checkpoint, text, tokens, min(window, 16))
        assert stage.perplexity(text) == pytest.approx(expected, rel=1e-5)  # float32 logits


def test_each_token_is_scored_once_with_half_a_window_before_it():
    for tokens in range(1, 60):
        for length in range(2, 20):
            scored = []
            for begin, end, last in windows(tokens, length):
                assert 0 < end - begin <= length
                scored += range(end - last, end)
                assert begin == 0 or end - last - begin >= length // 2
            assert scored == list(range(tokens))


def applied(stage, texts):
    """Returns what is kept, and the rows dropped for each reason."""
    dropped = {}
    columns = [pyarrow.array(texts, pyarrow.large_string())] * 3
    kept = stage.apply(pyarrow.record_batch(columns, ["text", "source", "id"]),
                       lambda reason, rows: dropped.update({reason: rows}))  # fmt: skip
    return kept, dropped


def test_what_is_out_of_range_is_dropped_and_all_is_counted(plain):
    values = [PerplexityFilter(str(plain)).perplexity(text) for text in TEXTS]
    low, high = sorted(values)[1], sorted(values)[3]
    stage = pickle.loads(pickle.dumps(PerplexityFilter(str(plain), high, low, column="perplexity")))
    kept, dropped = applied(stage, [*TEXTS, "é"])  # the tokenizer has no token for it
    assert dropped == {
        "perplexity too low": [values.index(min(values))],
        "perplexity too high": [values.index(max(values))],
        "no tokens": [5],
    }
    assert kept["text"].to_pylist() == [
        text for text, value in zip(TEXTS, values, strict=True) if low <= value <= high
    ]
    assert kept["perplexity"].to_pylist() == [value for value in values if low <= value <= high]
    counts = stage.take_counts()
    assert sum(counts.values()) == len(TEXTS)
    power = int(math.log2(values[0]))
    assert counts[f"perplexity {2**power:g} to {2 ** (power + 1):g}"] >= 1
    assert not stage.take_counts()


def test_no_bit_depends_on_neighbours_threads_or_what_came_before(plain):
    together = applied(PerplexityFilter(str(plain), column="p"), TEXTS)[0]["p"].to_pylist()
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(3)
    try:
        stage = PerplexityFilter(str(plain), column="p")
        from datamodules.preparation.transforms import perplexity_filter

        perplexity_filter._scorer.cache_clear()
        alone = [applied(stage, [text])[0]["p"].to_pylist() for text in TEXTS[::-1]]
        assert torch.get_num_threads() == 3
        assert torch.equal(torch.get_rng_state(), random)  # a run prepares on one rank, or on none
    finally:
        torch.set_num_threads(threads)
    assert [value for [value] in alone[::-1]] == together


def test_the_checkpoint_is_part_of_the_fingerprint(plain, tmp_path):
    first = PerplexityFilter(str(plain), 100.0).fingerprint()
    assert first["max_perplexity"] == 100
    copy = tmp_path / "b.ckpt"
    copy.write_bytes(plain.read_bytes())
    assert PerplexityFilter(str(copy), 100.0).fingerprint() == first
    other = store(GPT(**SIZE), SIZE, tmp_path / "c.ckpt")
    assert PerplexityFilter(str(other), 100.0).fingerprint() != first


@pytest.fixture
def corpus(tmp_path):
    """150 documents in several tasks, of which little is scored."""
    lines = [
        json.dumps({"text": f"{text} number {'abc' * number} {'further words ' * 1000}"}) + "\n"
        for number in range(30)
        for text in TEXTS
    ]
    (tmp_path / "in").mkdir()
    for part in range(3):
        (tmp_path / "in" / f"{part}.jsonl").write_text("".join(lines[part::3]))
    return tmp_path / "in"


@pytest.mark.slow  # workers import torch, and the kit runs it in another process
def test_prepare_gives_the_same_folder_with_any_number_of_workers(plain, corpus, tmp_path):
    stage = {
        "class_path": "PerplexityFilter",
        "init_args": {"path": str(plain), "max_perplexity": 220.0, "tokens": 20},
    }
    for workers in (1, 2):
        words = [f"--data.source={corpus}", f"--output={tmp_path / str(workers)}", "--data.reader=JSONLinesDocuments",
                 f"--data.engine.workers={workers}", "--data.tokenizer.vocab_size=300", f"--data.transforms={json.dumps([stage])}"]  # fmt: skip
        assert main(["prepare", "--config=data/text", *words]) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    report = json.loads((tmp_path / "1" / "report.json").read_text())
    [dropped] = [counts for name, counts in report["dropped"].items() if "PerplexityFilter" in name]
    assert 0 < dropped["perplexity too high"] < 150


def test_sweep_filters_sweeps_it(plain, corpus, tmp_path, capsys):
    words = [f"--data.source={corpus}", "--data.reader=JSONLinesDocuments", f"--output={tmp_path / 'swept'}"]
    stage = {"class_path": "PerplexityFilter", "init_args": {"path": str(plain), "tokens": 20}}
    words.append(f"--data.transforms={json.dumps([stage])}")
    assert (
        main(
            [
                "sweep-filters",
                "--config=data/text",
                "--transform",
                "PerplexityFilter.max_perplexity=1:400:5",
                *words,
            ]
        )
        == 0
    )
    [table] = (tmp_path / "swept").glob("*.csv")
    shares = [float(row["documents"]) for row in csv.DictReader(table.open())]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] > shares[1]


def test_mistakes_are_explained(plain, tmp_path):
    def refused(said, *arguments, **options):
        with pytest.raises(ConfigError, match=said) as caught:
            PerplexityFilter(*arguments, **options).perplexity("the lamp")
        assert len(str(caught.value).splitlines()) <= 5

    refused("which is none", str(plain), 10.0, 20.0)
    refused("which is none", str(plain), 0.5)
    refused("which is none", str(plain), math.nan)
    refused("window is 1", str(plain), window=1)
    refused("tokens is 0", str(plain), tokens=0)
    refused("nothing", str(tmp_path / "nothing"))
    refused("no tokenizer", str(store(GPT(**SIZE), SIZE, tmp_path / "a.ckpt", data=False)))
    encoder = {"vocab_size": 61, "n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16}
    refused("sees later tokens", str(store(BERT(**encoder), encoder, tmp_path / "b.ckpt")))
    broken = GPT(**SIZE)
    torch.nn.init.constant_(next(broken.parameters()), math.nan)
    refused("gives NaN", str(store(broken, SIZE, tmp_path / "c.ckpt")))
