"""llama.cpp, as an oracle for GGUF files: log-probabilities, greedy tokens and token ids."""

import ctypes
import functools

import numpy as np
import torch


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


def token_ids(path, texts):
    """Returns the ids of each text in the vocabulary of a file; special tokens are text, and none stands in front."""
    library = _library()
    model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
    assert model, path
    found, room = [], (ctypes.c_int32 * 10_000)()
    for text in texts:
        content = text.encode()
        vocabulary = library.llama_model_get_vocab(model)
        count = library.llama_tokenize(vocabulary, content, len(content), room, len(room), False, False)
        found.append(list(room[:count]))
    library.llama_model_free(model)
    return found


def log_probabilities(path, ids):
    """Returns what llama.cpp computes for a file after each of some tokens, (T, vocabulary), on one thread.

    By its C interface, in one pass; keys and values are float16.

    Args:
        path: The file.
        ids: The tokens.
    """
    library = _library()
    parameters = library.llama_model_default_params()
    model = library.llama_model_load_from_file(str(path).encode(), parameters)
    assert model, path
    options = library.llama_context_default_params()
    for place in range(3):  # n_ctx, n_batch, n_ubatch
        options.numbers[place] = len(ids)
    context = library.llama_init_from_model(model, options)
    assert context
    try:
        library.llama_set_n_threads(context, 1, 1)
        batch = library.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, number in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = number, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        assert library.llama_decode(context, batch) == 0
        width = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        found = np.ctypeslib.as_array(library.llama_get_logits(context), (len(ids), width))
        return torch.log_softmax(torch.from_numpy(found), dim=-1)
    finally:
        library.llama_free(context)
        library.llama_model_free(model)


def quantise(matrix, type_name):
    """Returns the bytes that llama.cpp makes of a float32 matrix, (rows, bytes)."""
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]
    block, width = gguf.GGML_QUANT_SIZES[kind]
    found = np.zeros((len(matrix), matrix.shape[1] // block * width), np.uint8)
    sizes = (ctypes.c_int64(0), *map(ctypes.c_int64, matrix.shape))
    _library().ggml_quantize_chunk(ctypes.c_int(kind), matrix.ctypes, found.ctypes, *sizes, None)
    return found


class _Parameters(ctypes.Structure):
    """A structure of which only the first numbers are known, and which is smaller than this."""

    _fields_ = (("numbers", ctypes.c_uint32 * 128),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


@functools.cache
def _library():
    """Returns the C library of llama.cpp, which the extension module of xllamacpp contains."""
    from xllamacpp import xllamacpp

    library, pointer = ctypes.CDLL(xllamacpp.__file__), ctypes.c_void_p
    for name, result, *kinds in (
        ("llama_backend_init", None),
        ("llama_model_default_params", _Parameters),
        ("llama_context_default_params", _Parameters),
        ("llama_model_load_from_file", pointer, ctypes.c_char_p, _Parameters),
        ("llama_init_from_model", pointer, pointer, _Parameters),
        ("llama_set_n_threads", None, pointer, ctypes.c_int32, ctypes.c_int32),
        ("llama_batch_init", _Batch, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
        ("llama_decode", ctypes.c_int32, pointer, _Batch),
        ("llama_model_get_vocab", pointer, pointer),
        ("llama_vocab_n_tokens", ctypes.c_int32, pointer),
        ("llama_tokenize", ctypes.c_int32, pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32,
         ctypes.c_bool, ctypes.c_bool),
        ("llama_get_logits", ctypes.POINTER(ctypes.c_float), pointer),
        ("llama_free", None, pointer),
        ("llama_model_free", None, pointer),
    ):  # fmt: skip
        function = getattr(library, name)
        function.restype, function.argtypes = result, kinds
    library.llama_log_set(_SILENT, None)
    library.llama_backend_init()
    return library
