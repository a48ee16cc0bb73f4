"""A checkpoint of a small network as an import leaves it: with a tokenizer of bytes and a chat template."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.networks.llama import Llama
from tests.support.stored_networks import content_of, lively_network

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SIZES = {"vocab_size": 320, "n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 32, "intermediate_size": 64}


def bytes_tokenizer():
    """Returns the JSON of a tokenizer of 256 bytes and a few special tokens."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer.to_str()


def store_chat(path, template=CHATML, window=256):
    """Writes the checkpoint; returns its path."""
    sizes = SIZES | ({"max_sequence_length": window} if window else {})
    content = content_of(lively_network(Llama, sizes), sizes)
    content["PretrainDataModule"] |= {"tokenizer": bytes_tokenizer()}
    if template is not None:
        config = {
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": template,
        }
        generation = {"eos_token_id": [0, 2]}
        content["hugging_face"] = {
            "tokenizer_config.json": json.dumps(config),
            "generation_config.json": json.dumps(generation),
        }
    plugin = AtomicCheckpoint()
    plugin.save_checkpoint(content, path)
    plugin.teardown()
    return path
