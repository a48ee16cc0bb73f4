import pickle

import pyarrow
import pytest

from core.errors import ConfigError
from datamodules.preparation.transforms.harmful_content import HarmfulContent


@pytest.fixture
def listed(tmp_path):
    def make(*words, **limits):
        path = tmp_path / "words.txt"
        path.write_text("\n".join(words), encoding="utf-8")
        return HarmfulContent([str(path)], **{"min_count": 1, "max_share": 0.0, **limits})

    return make


@pytest.mark.parametrize(
    ("min_count", "max_share", "dropped"),
    [(1, 0.0, True), (2, 0.0, True), (3, 0.0, False), (1, 0.19, True), (1, 0.2, False), (3, 0.19, False)],
)
def test_both_limits_have_to_be_reached(listed, min_count, max_share, dropped):
    text = "bad one two three four bad five six seven eight"
    reason = listed("bad", min_count=min_count, max_share=max_share).reason(text)
    assert reason == ("harmful words" if dropped else None)


def test_files_and_their_fingerprint(tmp_path):
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    first.write_text("\ufeff# a comment\nBad\n\n", encoding="utf-8")
    second.write_text("worse\r\nbad\r\n", encoding="utf-8")
    both = HarmfulContent([str(first), str(second)], 1, 0.0)
    assert [both.reason(text) is None for text in ("bad", "worse", "a comment")] == [False, False, True]
    assert both.fingerprint() == HarmfulContent([str(second)], 1, 0.0).fingerprint()
    assert both.fingerprint() != HarmfulContent([str(first)], 1, 0.0).fingerprint()
    again = pickle.loads(pickle.dumps(both))
    batch = pyarrow.record_batch({"text": ["fine", "Worse!"], "source": ["s"] * 2, "id": list("12")})
    dropped = []
    assert again.apply(batch, lambda *what: dropped.append(what))["id"].to_pylist() == ["1"]
    assert dropped == [("harmful words", [1])]


def test_mistakes(tmp_path, listed):
    for content, message in (
        ("", "has no words"),
        ("# x", "has no words"),
        ("a " * 33, "line 1 has 33 words"),
    ):
        with pytest.raises(ConfigError, match=message):
            listed(content)
    with pytest.raises(ConfigError, match="No such file"):
        HarmfulContent([str(tmp_path / "none.txt")])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8, at byte 3"):
        HarmfulContent([str(tmp_path / "latin.txt")])
    with pytest.raises(ConfigError, match="is empty"):
        HarmfulContent([])
    for limits in ({"min_count": 0}, {"max_share": 1.5}):
        with pytest.raises(ConfigError, match="it is"):
            listed("bad", **limits)


@pytest.mark.slow  # seconds
@pytest.mark.timeout(120)  # the square of a megabyte takes hours
def test_time_is_linear_in_hostile_text(listed):
    words = listed("a " * 32, *("a " * n + "b" for n in range(1, 31)), "\u4e00" * 31 + "\u4e01")
    for piece in ("a ", "a b ", "\u4e00", "\u0301", "a\u0301", "\u0e31", "_", " "):
        words.reason((piece * (1 << 20))[: 1 << 20])
