"""Loads a tokenizer from a file: tokenizer.json, GPT-2's vocabulary and merges, or a SentencePiece model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Implementation

from core.errors import ConfigError, nearest
from core.technique import technique
from datamodules.preparation import sentencepiece_model
from datamodules.preparation.library_tokenizer import END_OF_TEXT, LibraryTokenizer

MERGES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
"""The vocabulary's name -> that of its merges: as transformers and as OpenAI name them."""

ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]", "[SEP]")
"""Common names of the token that ends a text; the first that is there is taken."""


@technique(
    paper="the tokenizers library's tokenizer.json; GPT-2 (Radford et al., 2019); SentencePiece, arXiv:1808.06226"
)
class PretrainedTokenizer(LibraryTokenizer):
    """A tokenizer that somebody trained before, whatever its file.

    It is read when the run starts and not trained. Text is encoded as it stands: no tokens are put before
    or behind it, nothing is cut off or filled up, and what spells a special token is ordinary text.

    Args:
        path: A tokenizer.json; a vocab.json or merges.txt, which lie together (or encoder.json and vocab.bpe);
            a SentencePiece model (BPE or Unigram); or a folder that holds one of these.
        end_of_text: The token that ends a document; None: the `eos_token` of a tokenizer_config.json beside it,
            that of the SentencePiece model, or the first that is there of `<|endoftext|>`, `<|end_of_text|>`,
            `</s>`, `<eos>` and a few more.

    Raises:
        ConfigError: If there is no such file, it is damaged or of another kind, or no token ends a text.

    Example:
        data:
          init_args:
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
    """

    def __init__(self, path: str, end_of_text: str | None = None) -> None:
        files = _find(Path(path).expanduser())
        contents = [_bytes(file) for file in files]
        try:
            self._tokenizer, end = _read(files, contents)
        except Exception as error:  # the library raises nothing narrower
            what = str(error).partition("\n")[0][:200]
            raise ConfigError(
                f"{files[0]} cannot be read as a tokenizer: {what}.\nRead are a tokenizer.json, a vocab.json with "
                "its merges.txt, and a SentencePiece .model."
            ) from error
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text_id = self._end(files[0], end_of_text, end, vocabulary)
        self._digest = hashlib.sha256(
            b"".join(hashlib.sha256(content).digest() for content in contents)
        ).hexdigest()

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the digest of the file's content, and which id ends a text."""
        return {"sha256": self._digest, "end_of_text_id": self.end_of_text_id}

    def prepare(self, documents: Iterable[str]) -> None:
        """Does nothing: the tokenizer is there."""

    def _end(self, file: Path, wanted: str | None, told: str | None, vocabulary: Mapping[str, int]) -> int:
        """Returns the id that ends a text, one that no text is encoded to."""
        special = [
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        ]
        candidates = [wanted] if wanted is not None else [_configured(file), told, *ENDS]
        found = next((name for name in candidates if name in vocabulary), None)
        shown = ", ".join(special[:8]) or "none"
        if found is None:
            what = (
                f"has no token {wanted!r}.{nearest(wanted, set(special))}"
                if wanted
                else "does not say which token ends a text."
            )
            raise ConfigError(
                f"PretrainedTokenizer: {file} {what}\nSet end_of_text to one of its tokens. Special ones: {shown}."
            )
        if vocabulary[found] in self.encode_batch([found, f"a {found} b"])[0]:
            raise ConfigError(
                f"PretrainedTokenizer: {file} encodes the text {found!r} as its token {found!r}, which would end a "
                f"document in mid-text.\nSet end_of_text to another of its tokens. Special ones: {shown}."
            )
        return vocabulary[found]


def _find(path: Path) -> list[Path]:
    """Returns the file, or vocabulary and merges."""
    if path.is_dir():
        names = ["tokenizer.json", *MERGES, "tokenizer.model"]
        found = [path / name for name in names if (path / name).is_file()] or sorted(path.glob("*.model"))
        if not found:
            raise ConfigError(
                f"PretrainedTokenizer: {path} holds no tokenizer.json, no vocab.json with merges.txt and no "
                "SentencePiece .model."
            )
        path = found[0]
    if not path.is_file():
        around = path.parent if path.parent.is_dir() else Path()
        hint = nearest(path.name, {entry.name for entry in around.iterdir()})
        raise ConfigError(
            f"PretrainedTokenizer: there is no file or folder {path}.{hint}\nLooked from {Path.cwd()}; nothing is downloaded."
        )
    pair = next((pair for pair in MERGES.items() if path.name in pair), None)
    if pair is None:
        return [path]
    for name in pair:
        if not path.with_name(name).is_file():
            raise ConfigError(
                f"PretrainedTokenizer: beside {path} there is no {name}; {pair[0]} and {pair[1]} belong together."
            )
    return [path.with_name(name) for name in pair]


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error


def _read(files: list[Path], contents: list[bytes]) -> tuple[Implementation, str | None]:
    """Returns the tokenizer, and the token that ends a text where its file says so."""
    if len(contents) == 2:
        return _gpt2(json.loads(contents[0]), contents[1].decode()), None
    if files[0].suffix != ".json":
        model = sentencepiece_model.read(contents[0])
        return sentencepiece_model.convert(model), model.end_of_text
    described = json.loads(contents[0])
    if not isinstance(described, dict) or "model" not in described:
        raise ValueError("it is JSON, but not a tokenizer's: it lacks the key 'model'")
    for part in ("truncation", "padding", "post_processor"):  # these change texts or add to them
        described[part] = None
    if described["model"].get("type") == "Unigram":
        _forbid_special(described)
    return Implementation.from_str(json.dumps(described)), None


def _gpt2(vocabulary: dict[str, int], merges: str) -> Implementation:
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    tokenizer = Implementation(models.BPE(vocabulary, [tuple(line.split(" ")) for line in lines]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if END_OF_TEXT in vocabulary:
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def _forbid_special(described: dict[str, Any]) -> None:
    """Makes pieces that stand for no text so unlikely that no text is segmented into them."""
    special = {token["content"] for token in described.get("added_tokens") or () if token["special"]}
    if described["model"].get("byte_fallback"):
        special |= {f"<0x{byte:02X}>" for byte in range(256)}
    for pair in described["model"]["vocab"]:
        if pair[0] in special:
            pair[1] = sentencepiece_model.NEVER


def _configured(file: Path) -> str | None:
    """Returns the `eos_token` of a tokenizer_config.json that lies beside a file."""
    try:
        token = json.loads(file.with_name("tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token
