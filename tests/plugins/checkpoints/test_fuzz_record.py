"""Whatever a checkpoint says of itself, commands end with success, or with exit code 2 and at most 10 lines."""

import pytest
import tokenizers
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from core.__main__ import main
from plugins.checkpoints import checkpoint, finding
from tests.conftest import TINY
from tests.support.fuzzing import LOOSE, SCALARS, changed, ends_well, folder, mutations, places, values

pytestmark = pytest.mark.slow

__all__ = ["folder"]

FIELDS = ["config", "version", "ranks"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The content of a checkpoint of the tiny run, with a tokenizer, which `generate` asks for."""
    made = tmp_path_factory.mktemp("trained")
    (made / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    assert main(["fit", f"--config={made / 'tiny.yaml'}", f"--trainer.default_root_dir={made / 'run'}"]) == 0
    content = torch.load(finding.newest(made / "run"), weights_only=True)
    words = tokenizers.models.WordLevel({str(number): number for number in range(64)}, unk_token="0")
    content["ToyData"] = {"tokenizer": tokenizers.Tokenizer(words).to_str()}
    return content


def ends(content, command, capfd, folder):
    torch.save(content, folder / "evil.ckpt")
    ends_well([command, "--ckpt_path=evil.ckpt"], capfd, folder)


@pytest.mark.parametrize("command", ["check", "generate"])
def test_a_stored_config_with_anything_in_it(command, trained, folder, capfd):
    stored = yaml.safe_load(trained[checkpoint.RECORD]["config"])

    @settings(max_examples=150, **LOOSE)
    @given(mutations(stored))
    def mutated(config):
        record = {**trained[checkpoint.RECORD], "config": yaml.safe_dump(config)}
        ends({**trained, checkpoint.RECORD: record}, command, capfd, folder)

    mutated()


@pytest.mark.parametrize("command", ["check", "generate"])
def test_a_record_of_any_types(command, trained, folder, capfd):
    odd = st.sampled_from([value for value in SCALARS if not isinstance(value, complex)]) | values()

    @settings(max_examples=80, **LOOSE)
    @given(st.dictionaries(st.sampled_from(FIELDS), odd, min_size=1, max_size=3) | odd)
    def mutated(record):
        whole = {**trained[checkpoint.RECORD], **record} if isinstance(record, dict) else record
        ends({**trained, checkpoint.RECORD: whole}, command, capfd, folder)

    mutated()


def test_a_checkpoint_with_any_of_its_fields_changed(trained, folder, capfd):
    plain = {key: value for key, value in trained.items() if key not in ("state_dict", "optimizer_states")}
    there = [at for at in places(plain) if len(at) < 4]

    @settings(max_examples=150, **LOOSE)
    @given(st.sampled_from(there), st.sampled_from(["replace", "remove"]), values())
    def mutated(at, how, value):
        kept = {key: trained[key] for key in ("state_dict", "optimizer_states")}
        try:
            content = changed(plain, at, how, value)
        except TypeError:  # a value that JSON does not hold
            return
        ends({**content, **kept}, "check", capfd, folder)

    mutated()
