"""Loads a tokenizer from a file: tokenizer.json, GPT-2's vocabulary and merges, SentencePiece's model, tiktoken's ranks, GGUF."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Implementation

from core.errors import ConfigError, nearest
from core.technique import technique
from datamodules.preparation.tokenizers import sentencepiece_model, tiktoken_ranks
from datamodules.preparation.tokenizers.library_tokenizer import END_OF_TEXT, LibraryTokenizer
from datamodules.preparation.tokenizers.unigram_encoder import UnigramEncoder
from toolkit.bounded import MOST_BYTES, parse_json
from toolkit.generation.prompts import is_library_error, leading_ids
from toolkit.gguf_tokenizers import from_metadata, names_of_special
from toolkit.prepared import is_remote, stored_vocab_size
from toolkit.selection import Run, Selected

GGUF = ".gguf"

MERGES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
"""File name of the vocabulary -> that of its merges, as in transformers and as in OpenAI's release."""

ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]", "[SEP]")
"""Common names of the token that ends a text; the first that exists is used."""


@technique(
    paper="the tokenizers library's tokenizer.json; GPT-2 (Radford et al., 2019); SentencePiece, arXiv:1808.06226"
)
class PretrainedTokenizer(LibraryTokenizer):
    """A tokenizer that was trained before, in any of the common file formats.

    It is read when the run starts and not trained. There is no truncation or padding, and the spelling of a special
    token is ordinary text. A document begins with the tokens that the tokenizer's post-processor puts in front of a
    text (Llama's BOS, BERT's [CLS]) and ends with `end_of_text` alone, whatever it puts behind. A prompt of
    `generate` begins as a document does.

    Args:
        path: A tokenizer.json; a vocab.json with merges.txt (or encoder.json with vocab.bpe) in the same folder;
            a SentencePiece model (BPE or Unigram, with the ids of sentencepiece 0.2.3); a file of tiktoken's ranks;
            a folder that holds one of these; or a GGUF file with BPE of bytes or of SentencePiece.
        end_of_text: The token that ends a document. None: the `eos_token` of a tokenizer_config.json in the same
            folder or of the GGUF file, else that of the SentencePiece model, else the first that exists of `<|endoftext|>`,
            `<|end_of_text|>`, `</s>`, `<eos>` and a few more.
        add_special_tokens: Whether documents begin as the post-processor says; where there is no tokenizer.json, as
            `add_bos_token` in the tokenizer_config.json says. False: nothing stands in front of them.
        special_tokens_in_text: Whether a text that spells a special token, such as `<|user|>`, becomes that token.
        pattern: Of tiktoken's ranks: how texts are cut before merging, `r50k_base`, `p50k_base`, `cl100k_base` (Llama 3,
            Qwen) or `o200k_base`, or a regular expression. None: as the file's name says.

    Attributes:
        path: As given; a chat template may lie beside it.

    Raises:
        ConfigError: If there is no such file, it is damaged or of another kind, or no token ends a text.

    Example:
        data:
          init_args:
            tokenizer: {class_path: PretrainedTokenizer, init_args: {path: tokenizer.json}}
    """

    def __init__(
        self,
        path: str,
        end_of_text: str | None = None,
        add_special_tokens: bool = True,
        special_tokens_in_text: bool = False,
        pattern: str | None = None,
    ) -> None:
        self.path = path
        files = _find(Path(path).expanduser())
        contents = [_of_gguf(file) if file.suffix == GGUF else _bytes(file) for file in files]
        try:
            self._tokenizer, end, self._encoder = _read(files, contents, pattern, end_of_text)
            if not add_special_tokens:
                self._tokenizer.post_processor = None
            elif files[0].suffix not in (".json", GGUF) or len(files) > 1:
                _begin(self._tokenizer, files[0])
            self._leading = leading_ids(self._tokenizer)
        except BaseException as error:  # the library raises nothing narrower, and panics over some files
            if not is_library_error(error):
                raise
            what = str(error).partition("\n")[0][:300]
            raise ConfigError(
                f"{files[0]} cannot be read as a tokenizer: {what}.\nRead are a tokenizer.json, a vocab.json with "
                "its merges.txt, a SentencePiece .model, and tiktoken's ranks."
            ) from error
        if special_tokens_in_text and self._encoder:
            raise ConfigError(
                f"PretrainedTokenizer: special_tokens_in_text is not known for {files[0]}, a Unigram model of SentencePiece."
                "\nMark special tokens as user-defined symbols when it is trained, or use a tokenizer.json."
            )
        self.special_tokens_in_text = special_tokens_in_text
        self._tokenizer.encode_special_tokens = not special_tokens_in_text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text_id = self._end(files[0], end_of_text, end, vocabulary)
        self._digest = hashlib.sha256(
            b"".join(hashlib.sha256(content).digest() for content in contents)
        ).hexdigest()
        self._options = {"pattern": pattern} if pattern else {}

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields the three sizes if prepared data were made with a vocabulary of another size."""
        source = run.argument("data.source")
        if run.offline or own.key != "data.init_args.tokenizer" or is_remote(source):
            return
        stored = stored_vocab_size(source)
        size = cls(**own.arguments).vocab_size if stored else stored
        if stored and stored != size:
            network = run.argument("model.network.vocab_size") or "that of its default"
            yield (
                f"{run.named(own)}: the vocabularies differ: {stored:,} token ids in the data of {source}, {size:,} in the "
                f"tokenizer {own.arguments['path']}; the network's vocab_size is {network}.\n"
                f"Prepare the data with this tokenizer, or give {Path(str(source)) / 'tokenizer.json'} as its path."
            )

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the digest of the file's content, which id ends a text, and what else decides the ids."""
        how: dict[str, Any] = {"encoder": "UnigramEncoder"} if self._encoder else {}
        how |= {"leading": self._leading} if self._leading else {}
        how |= {"special_tokens_in_text": True} if self.special_tokens_in_text else {}
        return {"sha256": self._digest, "end_of_text_id": self.end_of_text_id, **how, **self._options}

    def prepare(self, documents: Iterable[str]) -> None:
        """Does nothing: the tokenizer is trained already."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text; with a SentencePiece model, the ids that SentencePiece gives."""
        return self._encoder(texts) if self._encoder else super().encode_batch(texts)

    def encoder(self) -> Callable[[Sequence[str]], list[list[int]]] | None:
        """Returns the encoder of a Unigram model of SentencePiece, else None."""
        return self._encoder

    def _end(self, file: Path, wanted: str | None, stored: str | None, vocabulary: Mapping[str, int]) -> int:
        """Returns the id that ends a text; no text is encoded to it."""
        special = [
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        ]
        candidates = [wanted] if wanted is not None else [_token(file, "eos_token"), stored, *ENDS]
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
        as_text = not self.special_tokens_in_text
        if as_text and vocabulary[found] in self.encode_batch([found, f"a {found} b"])[0]:
            raise ConfigError(
                f"PretrainedTokenizer: {file} encodes the text {found!r} as its token {found!r}, which would end a "
                f"document in mid-text.\nSet end_of_text to another of its tokens. Special ones: {shown}."
            )
        return vocabulary[found]


def _find(path: Path) -> list[Path]:
    """Returns the file, or vocabulary and merges."""
    if path.is_dir():
        names = ["tokenizer.json", *MERGES, "tokenizer.model"]
        found = [path / name for name in names if (path / name).is_file()] or [
            *sorted(path.glob("*.model")),
            *sorted(path.glob("*.tiktoken")),
        ]
        if not found:
            raise ConfigError(
                f"PretrainedTokenizer: {path} holds no tokenizer.json, no vocab.json with merges.txt, no "
                "SentencePiece .model and no .tiktoken."
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


def _of_gguf(file: Path) -> bytes:
    if (found := from_metadata(_read_gguf(file))) is None:
        raise ConfigError(f"PretrainedTokenizer: {file} holds no tokenizer.")
    return found.encode()


def _read_gguf(file: Path) -> Any:
    # It loads torch, without which `prepare` starts faster and takes 600 MB less. jsonargparse runs what stands
    # under TYPE_CHECKING, so that the name of the type is not there either.
    from toolkit.gguf_files import read_gguf

    return read_gguf(file)


def _bytes(file: Path) -> bytes:
    try:
        with open(file, "rb") as stream:
            if (
                file.stat().st_size <= MOST_BYTES
                and len(content := stream.read(MOST_BYTES + 1)) <= MOST_BYTES
            ):
                return content
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    raise ConfigError(f"{file} cannot be read as a tokenizer: it has more than {MOST_BYTES >> 20} MiB.")


def _read(
    files: list[Path], contents: list[bytes], pattern: str | None, end_of_text: str | None
) -> tuple[Implementation, str | None, UnigramEncoder | None]:
    """Returns the tokenizer, the end-of-text token if its file names one, and the encoder to use in its place."""
    if len(contents) == 2:
        return _gpt2(json.loads(contents[0]), contents[1].decode()), None, None
    is_json = files[0].suffix in (".json", GGUF)
    if not is_json and tiktoken_ranks.is_ranks(contents[0]):
        return tiktoken_ranks.convert(contents[0], files[0].stem, pattern, end_of_text), None, None
    if not is_json:
        model = sentencepiece_model.read_sentencepiece_model(contents[0])
        encoder = UnigramEncoder(model) if model.kind == sentencepiece_model.UNIGRAM else None
        return sentencepiece_model.convert(model), model.end_of_text, encoder
    described = json.loads(contents[0])
    if not isinstance(described, dict) or "model" not in described:
        raise ValueError("it is JSON, but not a tokenizer's: it lacks the key 'model'")
    for part in ("truncation", "padding"):  # these change texts
        described[part] = None
    if described["model"].get("type") == "Unigram":
        _forbid_special(described)
    return Implementation.from_str(json.dumps(described)), None, None


def _gpt2(vocabulary: dict[str, int], merges: str) -> Implementation:
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    pairs = [(first, second) for first, second in (line.split(" ") for line in lines)]
    tokenizer = Implementation(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if END_OF_TEXT in vocabulary:
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def _forbid_special(described: dict[str, Any]) -> None:
    """Makes special pieces so unlikely that no text is segmented into them."""
    special = {token["content"] for token in described.get("added_tokens") or () if token["special"]}
    if described["model"].get("byte_fallback"):
        special |= {f"<0x{byte:02X}>" for byte in range(256)}
    for pair in described["model"]["vocab"]:
        if pair[0] in special:
            pair[1] = sentencepiece_model.NEVER


def _begin(tokenizer: Implementation, file: Path) -> None:
    """Lets texts begin with the `bos_token` of a tokenizer_config.json that has `add_bos_token`."""
    name = _token(file, "bos_token") if _config(file).get("add_bos_token") is True else None
    if name is None:
        return
    if (id := tokenizer.token_to_id(name)) is None:
        raise ValueError(f"its tokenizer_config.json begins texts with {name!r}, which is none of its tokens")
    tokenizer.post_processor = processors.TemplateProcessing(single=[name, "$A"], special_tokens=[(name, id)])


def _config(file: Path) -> Mapping[str, Any]:
    """Returns the tokenizer_config.json in the same folder as a file; empty if there is none that can be read."""
    config = file.with_name("tokenizer_config.json")
    try:
        found = parse_json(_bytes(config), unique=False) if config.is_file() else None
    except (ConfigError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _token(file: Path, role: str) -> str | None:
    """Returns the `eos_token`, or another one, of a GGUF file, or of a tokenizer_config.json beside a file."""
    if file.suffix == GGUF:
        return names_of_special(_read_gguf(file)).get(role.removesuffix("_token"), (None, None))[1]
    token = _config(file).get(role)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
