"""`generate --tensor_parallel`: ranks that share the weights draw what one process draws."""

import multiprocessing
import os
import threading
import time

import pytest
import torch

from conformance.runs import free_port
from core.__main__ import main
from core.errors import ConfigError
from plugins.commands import generate_ranks
from plugins.commands.generate_shards import read_shards, shard_network
from plugins.networks.gemma3 import Gemma3
from plugins.networks.llama import Llama
from plugins.networks.olmo2 import OLMo2
from plugins.networks.qwen3 import Qwen3
from tests.support.found_on_ranks import found_on_ranks
from tests.support.stored_networks import MLP, lively_network, store
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling

SMALL = {**MLP, "n_layer": 2}
EVEN = SMALL | {"vocab_size": 64}
NETWORKS = {  # name -> class, arguments, whether the checkpoint is a folder, the largest share of a rank
    "tied": (Llama, EVEN, True, 0.51),
    "untied": (Llama, EVEN | {"tie_embeddings": False}, False, 0.62),  # the embedding is whole
    "odd vocabulary": (Llama, SMALL, False, 0.57),
    "norms of heads": (Qwen3, EVEN | {"head_dim": 12}, False, 0.51),
    "norms over heads": (OLMo2, EVEN, False, 0.55),
    "windows, capped": (
        Gemma3,
        EVEN | {"head_dim": 12, "sliding_window": 8, "final_soft_cap": 3.0},
        False,
        0.57,
    ),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [7], [2, 7, 1, 8, 2]]
SAMPLINGS = [Sampling(0), Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3)]


def texts(network):
    """Returns the ids of a padded batch, greedy and sampled."""
    found = []
    for sampling in SAMPLINGS:
        rows = [[] for _ in PROMPTS]
        decoding = Decoding(network, PROMPTS, max_new_tokens=8, sampling=sampling, seeds=[4, 5, 6])
        for token in decoding:
            rows[token.row].append(token.id)
        found.append(rows)
    return found


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Checkpoints of all networks in a folder, and what one process draws from each of them."""
    root, found = tmp_path_factory.mktemp("stored"), {}
    for name, (network_class, arguments, folder, _) in NETWORKS.items():
        network = lively_network(network_class, arguments).eval()
        store(network, arguments, root / name, sharded=folder)
        found[name] = texts(network)
    return root, found


def draw(rank, port, root):
    """Returns of each network what it draws and its end, its share of the weights, and the data types of the last one."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    drawn, shares = {}, {}
    with generate_ranks.connected(2, "cpu"):
        for name, (network_class, arguments, *_) in NETWORKS.items():
            network, _, end = shard_network(read_shards(root / name), root / name, torch.device("cpu"), None)
            drawn[name] = [texts(network), end]
            whole = sum(parameter.nbytes for parameter in network_class(**arguments).parameters())
            own = sum(
                (p.to_local() if hasattr(p, "to_local") else p).untyped_storage().nbytes()
                for p in network.parameters()
            )
            shares[name] = own / whole
        network, *_ = shard_network(
            read_shards(root / "tied"), root / "tied", torch.device("cpu"), torch.bfloat16
        )
        kinds = {str(parameter.dtype) for parameter in network.parameters()}
        return drawn, shares, [*kinds], len(texts(network)[0][0])


@pytest.mark.ci
def test_two_ranks_with_half_of_the_weights_draw_what_one_process_draws(stored, tmp_path):
    root, expected = stored
    for drawn, shares, kinds, length in found_on_ranks(draw, 2, tmp_path, free_port(), root):
        assert drawn == {name: [rows, 0] for name, rows in expected.items()}
        assert all(0.5 <= shares[name] < most for name, (*_, most) in NETWORKS.items()), shares
        assert (kinds, length) == (["torch.bfloat16"], 8)


WORDS = ["generate", "--max_new_tokens", "12", "--temperature", "1.2", "--ckpt_path"]


@pytest.mark.ci
def test_the_command_starts_its_ranks_of_which_one_writes(stored, tmp_path, capfd):
    (tmp_path / "prompts.txt").write_text("abc\nq\nhello world\n")
    words = [*WORDS, str(stored[0] / "tied"), "--prompts", str(tmp_path / "prompts.txt"), "--n", "2"]
    assert main(words) == 0
    alone = capfd.readouterr().out
    assert len(alone.splitlines()) == 6
    assert main([*words, "--tensor_parallel", "2", "--output", str(tmp_path / "texts.jsonl")]) == 0
    assert (tmp_path / "texts.jsonl").read_text() == alone
    assert not multiprocessing.active_children()


@pytest.mark.ci
def test_heads_that_the_ranks_do_not_divide_are_one_line(stored, capfd):
    assert main([*WORDS, str(stored[0] / "untied"), "--tensor_parallel", "3"]) == 2
    error = capfd.readouterr().err
    assert error.splitlines() == [
        "--tensor_parallel 3: tensor is 3, which does not divide the 4 attention heads of Llama."
    ]


@pytest.mark.ci
def test_a_rank_that_is_killed_ends_all_with_one_message(stored, tmp_path, capfd):
    killed = []

    def kill():
        while not killed:
            time.sleep(0.2)
            for process in multiprocessing.active_children():
                if process.name == "rank 1":
                    time.sleep(1)
                    process.kill()
                    killed.append(process.pid)

    threading.Thread(target=kill, daemon=True).start()
    output = tmp_path / "texts.jsonl"
    words = ["--tensor_parallel", "2", "--max_new_tokens", "100000", "--output", str(output)]
    assert main([*WORDS, str(stored[0] / "tied"), "--prompt", "abc", *words]) == 1
    error = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("#")]
    assert error == ["Rank 1 was killed by SIGKILL: often out of memory. All 2 ranks have ended."]
    assert not output.exists()
    assert not multiprocessing.active_children()


def print_to_nobody(arguments):
    """On rank 0 what it does behind `| head`; the other one waits for it, as in a collective."""
    if os.environ["RANK"] == "0":
        raise BrokenPipeError
    time.sleep(60)


@pytest.mark.ci
def test_output_that_nobody_reads_anymore_is_no_error():
    with pytest.raises(BrokenPipeError):
        generate_ranks.start(2, print_to_nobody, [])
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("ranks", "device", "said"),
    [
        (3, "cpu", "--tensor_parallel 3: 2 processes were launched."),
        (2, "cuda:1", "--tensor_parallel 2: give --device cpu or cuda, not cuda:1."),
        (2, "mps", "give --device cpu or cuda, not mps"),
    ],
)
def test_ranks_that_cannot_be(ranks, device, said, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught, generate_ranks.connected(ranks, device):
        pass
    assert said in str(caught.value)
