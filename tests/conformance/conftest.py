"""With which arguments our own techniques are tried where those of their examples are too large for a test."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from core.testing import Case
from core.testing.workshop import workshop

ROTARY = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "max_sequence_length": 16,
          "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}  # fmt: skip
SINUSOIDAL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16, "position": "sinusoidal",
              "norm_position": "post", "tie_embeddings": False, "bias": False}  # fmt: skip


def pytest_leyden_cases():
    return [
        Case("GPT", ROTARY),
        Case("GPT", SINUSOIDAL),
        Case("PretrainedTokenizer", {"path": bytes_tokenizer()}),
        Case("PeriodicCheckpoint", {"every_n_steps": 3}),
        Case("ProgressBar", config={"trainer": {"enable_progress_bar": True}}),
        Case("TextSamples", {"num_samples": 1, "every_n_steps": 3, "max_new_tokens": 4}),
        Case("UnigramTokenizer", {"vocab_size": 257}),
        Case("WarmupCosine", {"warmup_steps": 3}),
        Case("WordPieceTokenizer", {"vocab_size": 530}),
    ]


def bytes_tokenizer():
    """Returns the path of a tokenizer.json whose tokens are the end of a text and the 256 bytes."""
    path = workshop() / "bytes" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    vocabulary = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(vocabulary[:1])
    tokenizer.save(str(path))
    return str(path)
