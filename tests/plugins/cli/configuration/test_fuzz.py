"""Whatever a config holds, `check` ends with success, or with exit code 2 and at most 10 lines."""

import os

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.cli.configuration.config_files import compose
from tests.conftest import TINY
from tests.support.fuzzing import LOOSE, NAMES, SCALARS, ends_well, folder, mutations, places

__all__ = ["folder"]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("base", ["tiny", "quickstart"])
def test_a_config_with_anything_in_it(base, folder, capfd):
    whole = TINY if base == "tiny" else compose(["quickstart"]).values
    examples = int(os.environ.get("LEYDEN_FUZZ", "200"))

    @settings(max_examples=examples, **LOOSE)
    @given(mutations(whole))
    def mutated(config):
        (folder / "evil.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
        ends_well(["check", "--config=evil.yaml"], capfd, folder)

    mutated()


def test_a_config_of_any_text(folder, capfd):
    text = yaml.safe_dump(TINY)
    pieces = st.sampled_from(["&a ", "*a", "<<: ", "!!python/name:os.system ", "? ", "- ", "[", "]", "{", "}", "\t", "%", "\x00",
                              "---\n", ": ", "|", ">", "'", '"', "\\", "\ufeff", "!!set ", "!!binary "])  # fmt: skip

    @settings(max_examples=300, **LOOSE)
    @given(
        st.lists(st.tuples(st.integers(0, len(text)), pieces | st.text(max_size=3)), min_size=1, max_size=4)
    )
    def mutated(insertions):
        broken = text
        for at, piece in insertions:
            broken = broken[:at] + piece + broken[at:]
        (folder / "evil.yaml").write_bytes(broken.encode("utf-8", "surrogatepass"))
        ends_well(["check", "--config=evil.yaml"], capfd, folder)

    mutated()


def test_options_of_any_value(folder, capfd):
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    keys = [".".join(map(str, at)) for at in places(TINY) if not any(isinstance(key, int) for key in at)]
    words = st.sampled_from(
        [*keys, "trainer.callbacks+", "callbacks.-X", "callbacks.LossCurve.x", "trust", "ckpt_path", "config"]
    )
    texts = st.sampled_from([*NAMES, *(str(value) for value in SCALARS)]) | st.text(max_size=20)

    @settings(max_examples=200, **LOOSE)
    @given(st.lists(st.builds(lambda key, text: f"--{key}={text}", words, texts), min_size=1, max_size=3))
    def mutated(options):
        ends_well(["check", "--config=tiny.yaml", *options], capfd, folder)

    mutated()
