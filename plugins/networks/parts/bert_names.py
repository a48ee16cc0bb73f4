"""BERT in transformers: names and keys, with the head that predicts masked tokens and without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from toolkit.hugging_face import HuggingFaceForm, Rename

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
"""Names of transformers -> ours; the first of several is what is written."""


def _renames(prefix: str) -> tuple[Rename, ...]:
    layer = f"{prefix}encoder.layer.*"
    return (
        Rename("embed_tokens", f"{prefix}embeddings.word_embeddings"),
        Rename("embed_positions", f"{prefix}embeddings.position_embeddings"),
        Rename("embed_token_types", f"{prefix}embeddings.token_type_embeddings"),
        Rename("embed_norm", f"{prefix}embeddings.LayerNorm"),
        Rename("layers.*.attention.q_proj", f"{layer}.attention.self.query"),
        Rename("layers.*.attention.k_proj", f"{layer}.attention.self.key"),
        Rename("layers.*.attention.v_proj", f"{layer}.attention.self.value"),
        Rename("layers.*.attention.o_proj", f"{layer}.attention.output.dense"),
        Rename("layers.*.attention_norm", f"{layer}.attention.output.LayerNorm"),
        Rename("layers.*.mlp.up_proj", f"{layer}.intermediate.dense"),
        Rename("layers.*.mlp.down_proj", f"{layer}.output.dense"),
        Rename("layers.*.mlp_norm", f"{layer}.output.LayerNorm"),
    )


def _to_config(arguments: Mapping[str, Any], head: bool) -> dict[str, Any]:
    if arguments["head"] != head:
        raise ConfigError(f"BERT: head={arguments['head']} has no form in transformers' {_CLASSES[head]}.")
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {"hidden_act": names[arguments["activation"]], "initializer_range": 0.02}


def _to_arguments(config: Mapping[str, Any], head: bool) -> dict[str, Any]:
    if config["hidden_act"] not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: hidden_act is {config['hidden_act']!r}; BERT has {', '.join(ACTIVATIONS)}."
        )
    return {"activation": ACTIVATIONS[config["hidden_act"]], "head": head}


_CLASSES = {True: "BertForMaskedLM", False: "BertModel"}


def _form(head: bool, otherwise: HuggingFaceForm | None = None) -> HuggingFaceForm:
    renames = _renames("bert." if head else "")
    if head:
        renames += (
            Rename("head", "cls.predictions"),
            Rename("head.dense", "cls.predictions.transform.dense"),
            Rename("head.norm", "cls.predictions.transform.LayerNorm"),
        )
    return HuggingFaceForm(
        architecture=_CLASSES[head],
        model_type="bert",
        renames=renames,
        arguments={
            "vocab_size": "vocab_size",
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "intermediate_size",
            "max_position_embeddings": "max_sequence_length",
            "type_vocab_size": "token_types",
            "layer_norm_eps": "norm_eps",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
        | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1),
        constants={
            "is_decoder": False,
            "tie_word_embeddings": True,
            "position_embedding_type": "absolute",
        },
        to_config=lambda arguments: _to_config(arguments, head),
        to_arguments=lambda config: _to_arguments(config, head),
        otherwise=otherwise,
        copies=("cls.predictions.decoder.weight", "cls.predictions.decoder.bias") if head else (),
        left_out=("pooler.", "bert.pooler.", "cls.seq_relationship."),
    )


AS_MODEL = _form(head=False)
"""Without the head, as models for embeddings of texts are stored."""

AS_MASKED_LM = _form(head=True, otherwise=AS_MODEL)
