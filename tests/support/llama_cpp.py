"""llama.cpp, as an oracle for GGUF files: log-probabilities, greedy tokens and token ids."""

import json
import math
import urllib.request


class LlamaCpp:
    """A file that is loaded, on one thread, with keys and values in float32."""

    def __init__(self, path, length=256):
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path, options.n_ctx, options.n_parallel = str(path), length, 1
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        options.n_gpu_layers, options.warmup, options.verbosity = 0, False, -1
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(options)

    def log_probabilities(self, ids, vocab_size):
        """Returns those of the token after these, by id."""
        request = {
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": vocab_size,
            "n_probs": vocab_size,
        }
        done = self.server.handle_completions({**request, "cache_prompt": True})
        [step] = done["choices"][0]["logprobs"]["content"]
        return {one["id"]: one["logprob"] for one in step["top_logprobs"]}

    def greedy(self, ids, count):
        """Returns the next tokens."""
        request = {"prompt": ids, "max_tokens": count, "temperature": 0, "logprobs": 1, "n_probs": 1}
        done = self.server.handle_completions({**request, "ignore_eos": True})
        return [step["id"] for step in done["choices"][0]["logprobs"]["content"]]

    def perplexity(self, ids, vocab_size, first=1, every=1):
        """Returns that of some tokens of a text, each given all before it."""
        places = range(first, len(ids), every)
        found = [self.log_probabilities(ids[:place], vocab_size)[ids[place]] for place in places]
        return math.exp(-sum(found) / len(found))

    def encode(self, text):
        """Returns the ids of a text; the spelling of a special token is ordinary text."""
        content = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
        request = urllib.request.Request(
            f"{self.server.listening_address}/tokenize", content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["tokens"]
