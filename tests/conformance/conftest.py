"""With which arguments our own techniques are tried where those of their examples are too large for a test."""

from core.testing import Case

ROTARY = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "max_sequence_length": 16,
          "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}  # fmt: skip
SINUSOIDAL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16, "position": "sinusoidal",
              "norm_position": "post", "tie_embeddings": False, "bias": False}  # fmt: skip


def pytest_leyden_cases():
    return [
        Case("GPT", ROTARY),
        Case("GPT", SINUSOIDAL),
        Case("PeriodicCheckpoint", {"every_n_steps": 3}),
        Case("ProgressBar", config={"trainer": {"enable_progress_bar": True}}),
        Case("TextSamples", {"num_samples": 1, "every_n_steps": 3, "max_new_tokens": 4}),
        Case("WarmupCosine", {"warmup_steps": 3}),
    ]
