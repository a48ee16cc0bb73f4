"""Files of tiktoken's ranks, of tokenizers that are trained here."""

import base64
import json

from datamodules.preparation.tokenizers.tiktoken_ranks import _byte_letters


def ranks_of(tokenizer):
    """Returns token -> rank of a BPETokenizer: bytes, then merges in the order in which they were found."""
    letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
    vocabulary = json.loads(tokenizer.to_json())["model"]["vocab"]
    return {bytes(letters[one] for one in token): id - 1 for token, id in vocabulary.items() if id}


def write_ranks(path, ranks):
    """Writes the file; returns its path."""
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path
