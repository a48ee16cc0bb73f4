"""Reading checkpoints: whole or not, the newest, what they say of themselves, and never by running code."""

import os
import random
from pathlib import Path

import pytest
import torch
import yaml

from core.checkpoints.checkpoint import RECORD, defect, load_network, newest, read, resolve, stored_config
from core.errors import ConfigError
from plugins.networks.gpt import GPT
from tests.conftest import Malicious

CONTENT = {"state_dict": {"w": torch.arange(300.0)}, "epoch": 1, "pytorch-lightning_version": "2.6.6"}


@pytest.fixture
def save(tmp_path):
    """Writes a checkpoint file of a given age in seconds."""

    def write(name, content=CONTENT, age=0):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
        os.utime(path, (1e9 - age, 1e9 - age))
        return path

    return write


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


# -- whole or not ----------------------------------------------------------------------------------


def test_a_whole_file_has_no_defect(save):
    assert defect(save("a.ckpt")) is None


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_recognised(share, save):
    path = save("a.ckpt")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert defect(path).startswith("cut off")
    path.write_bytes(data[:-1])
    assert defect(path)


def test_any_flipped_bit_is_found_or_does_no_harm(save):
    path = save("a.ckpt")
    data, chance = path.read_bytes(), random.Random(0)
    headers = [*range(100), *range(len(data) - 700, len(data))]
    found = 0
    for at in [*chance.sample(headers, 300), *chance.sample(range(len(data)), 150)]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        if defect(path) is None:  # padding between the parts
            assert torch.equal(read(path)["state_dict"]["w"], CONTENT["state_dict"]["w"])
        else:
            found += 1
    assert found > 200


def test_a_flipped_bit_in_a_weight_is_found(save):
    path = save("a.ckpt")
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(100.0, 110.0).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert "is damaged" in defect(path)


def test_what_is_no_checkpoint_is_named_as_such(tmp_path):
    (tmp_path / "a.ckpt").write_text("not a checkpoint")
    assert "not a checkpoint (16 bytes)" in defect(tmp_path / "a.ckpt")
    assert defect(tmp_path / "gone.ckpt") == "there is no such file"


def test_code_in_a_checkpoint_is_not_run(save, tmp_path):
    path = save("a.ckpt", {"state_dict": {}, "evil": Malicious(tmp_path / "executed")})
    assert "more than tensors and plain values" in defect(path)
    with pytest.raises(Exception, match="Weights only load failed"):
        read(path)
    assert not (tmp_path / "executed").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "executed").exists()  # the trap works


# -- the newest ------------------------------------------------------------------------------------


def test_the_newest_is_that_of_the_latest_time_whatever_its_name(save, tmp_path):
    save("run/checkpoints/step-9.ckpt", age=20)
    path = save("run/checkpoints/step-3.ckpt", age=10)
    assert newest(tmp_path / "run") == path


def test_the_runs_that_were_numbered_belong_to_the_root_and_no_others(save, tmp_path):
    save("run/a.ckpt", age=40)
    path = save("run-12/checkpoints/a.ckpt", age=30)
    for other in ("run-v2", "run2", "run-3-old", "other-2", "run-2x", "run-124"):
        save(f"{other}/a.ckpt")
    for name, root in (("run-12", "run"), ("run-124", "run-124")):  # the last is an experiment of that name
        (tmp_path / name / "config.yaml").write_text(f"trainer: {{default_root_dir: {tmp_path / root}}}")
    assert newest(tmp_path / "run", siblings=True) == path
    assert newest(tmp_path / "run").parent == tmp_path / "run"


def test_temporary_files_are_no_candidates(save, tmp_path):
    path = save("run/a.ckpt", age=10)
    save("run/.b.ckpt.tmp")
    save("run/.c.ckpt")
    assert newest(tmp_path / "run") == path


def test_broken_ones_are_named_and_passed_over(save, tmp_path, capsys):
    good = save("run/a.ckpt", age=30)
    broken = [save("run/b.ckpt", age=20), save("run/c.ckpt", age=10)]
    for path in broken:
        cut(path)
    assert newest(tmp_path / "run") == good
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is left aside")[0] for line in lines] == [str(path) for path in reversed(broken)]


def test_no_whole_checkpoint_is_an_error_that_says_what_to_do(save, tmp_path):
    cut(save("run/a.ckpt"))
    with pytest.raises(ConfigError, match=r"no whole checkpoint below .*run \(1 looked at\)"):
        newest(tmp_path / "run")
    with pytest.raises(ConfigError, match="0 looked at"):
        newest(tmp_path / "nowhere" / "run")


def test_ckpt_path_is_last_a_folder_or_a_file(save, tmp_path):
    old, new = save("run/a.ckpt", age=10), save("run/b.ckpt")
    root = tmp_path / "run"
    assert resolve("last", root) == new
    assert resolve(str(root), tmp_path / "elsewhere") == new
    assert resolve(str(old), tmp_path / "elsewhere") == old
    with pytest.raises(ConfigError, match=r"no such file\. Did you mean .*run/b\.ckpt\?"):
        resolve(str(root / "bb.ckpt"), root)
    cut(old)
    with pytest.raises(ConfigError, match="cut off"):
        resolve(str(old), root)


# -- what a checkpoint says of itself ----------------------------------------------------------------

SIZES = {"vocab_size": 11, "n_layer": 1, "n_head": 1, "n_embd": 8, "max_sequence_length": 4}
CONFIG = {"model": {"network": {"class_path": "plugins.networks.gpt.GPT", "init_args": SIZES}}}


@pytest.fixture
def complete():
    """The content of a checkpoint of a small network, and the network."""
    network = GPT(**SIZES)
    weights = {f"network.{name}": weight for name, weight in network.state_dict().items()}
    record = {"config": yaml.safe_dump(CONFIG), "version": "0"}
    data = {"tokenizer": '{"json": 1}', "end_of_text_id": 5}
    return {
        "state_dict": weights,
        RECORD: record,
        "Data": data,
        "pytorch-lightning_version": "2.6.6",
    }, network


def test_the_stored_configuration_is_read_and_absent_from_foreign_checkpoints(save, complete):
    assert stored_config(save("a.ckpt", complete[0])) == CONFIG
    assert stored_config(save("b.ckpt")) == {}


def test_a_network_is_rebuilt_with_its_weights_and_tokenizer(save, complete):
    content, network = complete
    rebuilt, tokenizer, end_of_text_id = load_network(save("a.ckpt", content))
    batch = {"input_ids": torch.tensor([[1, 2, 3]])}
    assert torch.equal(rebuilt(batch), network.eval()(batch))
    assert not rebuilt.training
    assert (tokenizer, end_of_text_id) == ('{"json": 1}', 5)


@pytest.mark.parametrize("missing", [RECORD, "Data"])
def test_a_network_without_config_or_tokenizer_is_not_rebuilt(missing, save, complete):
    del complete[0][missing]
    with pytest.raises(ConfigError, match="lacks its config or tokenizer"):
        load_network(save("a.ckpt", complete[0]))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_reading_leaves_tensors_on_the_disk(save):
    path = save("a.ckpt")
    content = read(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert content["state_dict"]["w"].device.type == "cpu"


def test_a_run_that_is_not_there_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "quickstart").mkdir()
    with pytest.raises(ConfigError, match=r"no such file\. Did you mean .*/quickstart\?"):
        resolve(str(tmp_path / "quikstart"), tmp_path)
    with pytest.raises(ConfigError, match=r"no such file\. `last`"):
        resolve(str(tmp_path / "nowhere" / "quikstart"), tmp_path)
