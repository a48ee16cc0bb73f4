"""Reading checkpoints: whole or not, the newest, what they say of themselves, and never by running code."""

import os
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from core.errors import ConfigError
from plugins.checkpoints.checkpoint import RECORD, defect, read_checkpoint, stored_config
from plugins.checkpoints.finding import newest, of_folder, resolve
from plugins.checkpoints.stored_network import load_network
from plugins.networks.gpt import GPT
from tests.conftest import Malicious
from toolkit.checkpoint_names import step_named

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
            assert torch.equal(read_checkpoint(path)["state_dict"]["w"], CONTENT["state_dict"]["w"])
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
        read_checkpoint(path)
    assert not (tmp_path / "executed").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "executed").exists()  # the trap works


# -- what claims more than it is ----------------------------------------------------------------------


def test_a_zip_bomb_is_refused_before_it_is_read(save, tmp_path):
    """Half a gigabyte of zeros in half a megabyte."""
    path, zeros = save("a.ckpt"), b"\0" * 2**24
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("archive/data/1", "w", force_zip64=True) as member,
    ):
        for _ in range(32):
            member.write(zeros)
    assert path.stat().st_size < 2**22
    assert "is compressed, which torch.save does not do" in defect(path)
    with pytest.raises(ConfigError, match="is compressed"):
        resolve(str(path), tmp_path)


def test_members_that_share_their_bytes_are_refused(save):
    path = save("a.ckpt", {**CONTENT, "state_dict": {f"w{i}": torch.arange(300.0) + i for i in range(50)}})
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\x05\x06")
    count, size, start = struct.unpack("<HII", data[end + 10 : end + 20])
    directory = bytes(data[start : start + size])
    more = directory * 40
    head = struct.pack("<HHHHIIH", 0, 0, count * 41, count * 41, size * 41, start, 0)
    path.write_bytes(data[: start + size] + more + b"PK\x05\x06" + head)
    assert "it claims to hold" in defect(path)


def test_a_tensor_that_was_expanded_beyond_its_file_is_refused(save):
    content = {**CONTENT, "state_dict": {"w": torch.zeros(1).expand(10**6, 10**6)}}
    assert "its tensors take 4,000,000,000,000 bytes" in defect(save("a.ckpt", content))
    assert defect(save("b.ckpt", {**CONTENT, "state_dict": {"w": torch.zeros(1).expand(10**4)}})) is None


@pytest.mark.ci
def test_values_that_multiply_are_refused(save):
    """Ten lists of ten lists of ten: small in the file, a billion when it is walked through."""
    value = ["x"]
    for _ in range(30):
        value = [value] * 10
    assert "values, or more than 64 levels" in defect(save("a.ckpt", {**CONTENT, "extra": value}))
    deep = []
    for _ in range(200):
        deep = [deep]
    assert "more than 64 levels" in defect(save("b.ckpt", {**CONTENT, "extra": deep}))


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").symlink_to("/dev/zero")
    for name in ("a", "b"):
        assert defect(tmp_path / f"{name}.ckpt") == "it is not a regular file"
    folder = tmp_path / "c.ckpt"
    folder.mkdir()
    os.mkfifo(folder / "complete")
    assert defect(folder) == "complete is not a regular file"
    assert of_folder(tmp_path) is None


# -- the newest ------------------------------------------------------------------------------------


def at(step):
    return {**CONTENT, "global_step": step}


def test_the_newest_is_that_of_the_highest_step_whatever_its_time(save, tmp_path):
    """A copied folder has the times of the copying."""
    path = save("run/checkpoints/step-10.ckpt", at(10), age=20)
    save("run/checkpoints/step-9.ckpt", at(9), age=10)
    save("run/checkpoints/step-8.ckpt", age=5)
    assert newest(tmp_path / "run") == of_folder(tmp_path / "run") == path


def test_the_record_decides_where_a_name_says_another_step(save, tmp_path):
    save("run/checkpoints/step-900.ckpt", at(3))
    path = save("run/checkpoints/step-20.ckpt", at(20), age=9)
    assert newest(tmp_path / "run") == path
    best = save("run/checkpoints/best.ckpt", at(25), age=30)
    assert newest(tmp_path / "run") == best
    assert step_named(Path("step-²²²²²²²².ckpt")) is None
    save("run/checkpoints/step-²²²²²²²².ckpt", at(2))
    assert newest(tmp_path / "run") == best


def test_what_was_gone_back_behind_is_taken_where_there_is_no_other(save, tmp_path):
    behind = save("run/checkpoints/step-00000200.abandoned.ckpt", at(200))
    assert newest(tmp_path / "run") == behind
    path = save("run/checkpoints/step-00000110.ckpt", at(110), age=9)
    assert newest(tmp_path / "run") == path


def test_folders_below_are_not_searched(save, tmp_path):
    """--ckpt_path / would go on with somebody else's run."""
    save("people/ann/run/checkpoints/step-1.ckpt", at(1))
    for folder in (tmp_path, tmp_path / "people", tmp_path / "people" / "ann"):
        with pytest.raises(ConfigError, match="neither a run folder nor a folder of checkpoints") as error:
            resolve(str(folder), tmp_path)
        assert (str(tmp_path / "people" / "ann" / "run") in str(error.value)) == (folder.name == "ann")
    run = tmp_path / "people" / "ann" / "run"
    for folder in (run, run / "checkpoints"):
        assert resolve(str(folder), tmp_path).name == "step-1.ckpt"


def test_checkpoints_lie_where_the_record_says_but_within_the_run(save, tmp_path):
    run = tmp_path / "run"
    for place in ("a/b", "../other"):
        save(f"run/{place}/step-1.ckpt", at(1))
        items = [{"class_path": "X", "init_args": {"dirpath": f"${{run_folder}}/{place}"}}]
        (run / "config.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": items}}))
        found = of_folder(run)
        assert (found == run / "a/b/step-1.ckpt") if place == "a/b" else found is None


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
    assert [line.split(" is skipped")[0] for line in lines] == [str(path) for path in reversed(broken)]


def test_no_whole_checkpoint_is_an_error_that_says_what_to_do(save, tmp_path):
    cut(save("run/a.ckpt"))
    with pytest.raises(ConfigError, match=r"no complete checkpoint in .*run \(1 looked at\)"):
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


def test_a_network_is_rebuilt_though_its_file_has_moved_since(save, complete):
    content, network = complete
    content[RECORD]["config"] = content[RECORD]["config"].replace("plugins.networks.gpt.", "core.gpt.")
    assert "core.gpt.GPT" in content[RECORD]["config"]
    path = save("a.ckpt", content)
    assert load_network(path)[0].state_dict().keys() == network.state_dict().keys()
    assert stored_config(path) == CONFIG


@pytest.mark.parametrize(
    ("missing", "words"), [(RECORD, "it lacks its config"), ("Data", "has no tokenizer")]
)
def test_a_network_without_config_or_tokenizer_is_not_rebuilt(missing, words, save, complete):
    del complete[0][missing]
    with pytest.raises(ConfigError, match=words):
        load_network(save("a.ckpt", complete[0]))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_reading_leaves_tensors_on_the_disk(save):
    path = save("a.ckpt")
    content = read_checkpoint(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert content["state_dict"]["w"].device.type == "cpu"


def test_a_run_that_is_not_there_is_answered_with_the_nearest_that_has_checkpoints(save, tmp_path):
    (tmp_path / "quikstart-compared").mkdir()
    with pytest.raises(ConfigError, match=r"no such file\. `last`"):
        resolve(str(tmp_path / "quikstart"), tmp_path)
    save("quickstart/a.ckpt")
    with pytest.raises(ConfigError, match=r"no such file\. Did you mean .*/quickstart\?"):
        resolve(str(tmp_path / "quikstart"), tmp_path)
    with pytest.raises(ConfigError, match=r"no such file\. `last`"):
        resolve(str(tmp_path / "nowhere" / "quikstart"), tmp_path)
