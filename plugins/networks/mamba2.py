"""Mamba-2: a state space in each block, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.networks.parts.arguments import check_arguments
from plugins.networks.parts.block import MixerBlock
from plugins.networks.parts.decoder import Layer
from plugins.networks.parts.hybrid_decoder import HybridDecoder
from plugins.networks.parts.initialisation import Init
from plugins.networks.parts.norms import new_norm
from plugins.networks.parts.state_space import StateSpace
from toolkit.hugging_face import HuggingFaceForm, Rename


def _to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    width = arguments["expand"] * arguments["n_embd"]
    return {"num_heads": width // arguments["head_dim"]}


def _to_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    low, high = config.get("time_step_limit") or (0.0, float("inf"))
    if float(low) > 0 or float(high) != float("inf"):
        raise ConfigError(f"config.json: time_step_limit is {[low, high]}; Mamba2 is read without limits.")
    return {}


@technique(paper="Mamba-2, arXiv:2405.21060")
class Mamba2(HybridDecoder):
    """Mamba-2 and all of its shape; the defaults are Mamba-2 130M's.

    In generation a block keeps a state of `expand` * C * `state_size` numbers in place of keys and values. There is no
    tensor parallelism: norms are over all features of a group, and one projection has all parts.

    Args:
        vocab_size: Rows of the token embedding and of the head.
        n_layer: Number of blocks.
        n_embd: Width C.
        max_sequence_length: Largest T; nothing in the network depends on it.
        expand: Width of the state space in multiples of C.
        head_dim: Features of a head, a divisor of `expand` * C.
        state_size: Features of B and C: rows of a head's state.
        n_groups: Groups of heads that share B and C, a divisor of the number of heads.
        conv_kernel: Tokens that the short convolution sees.
        norm_eps: Epsilon of the norms.
        tie_embeddings: Whether the head uses the weight of the token embedding.
        bias: Whether the projections have biases.
        conv_bias: Whether the convolution has one.
        init: Of matrices. "llama": N(0, 0.02); "gpt2": N(0, 0.02 / sqrt(2 n_layer)) for the one per block that adds to
            the residual stream; "small": N(0, sqrt(2 / (5 C))), and N(0, 2 / (n_layer sqrt(C))) for that one.
        init_std: Patterns of module names -> standard deviation, over `init`: `{embed_tokens: 0.01}`.

    Raises:
        ConfigError: If a value is out of range or a size does not divide another.

    Example:
        model:
          network:
            class_path: Mamba2
            init_args: {n_layer: 6, n_embd: 256, head_dim: 64, state_size: 64}
    """

    deferred_init = True

    hugging_face = HuggingFaceForm(
        architecture="Mamba2ForCausalLM",
        model_type="mamba2",
        renames=(
            Rename("embed_tokens", "backbone.embeddings"),
            Rename("layers.*", "backbone.layers.*"),
            Rename("norm", "backbone.norm_f"),
            Rename("lm_head", "lm_head"),
        ),
        arguments={
            "vocab_size": "vocab_size",
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "expand": "expand",
            "head_dim": "head_dim",
            "state_size": "state_size",
            "n_groups": "n_groups",
            "conv_kernel": "conv_kernel",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
            "use_bias": "bias",
            "use_conv_bias": "conv_bias",
        },
        defaults={
            "expand": 2,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
            "use_bias": False,
            "use_conv_bias": True,
        },
        constants={"hidden_act": "silu"},
        to_config=_to_config,
        to_arguments=_to_arguments,
    )

    def __init__(
        self,
        vocab_size: int = 50288,
        n_layer: int = 24,
        n_embd: int = 768,
        max_sequence_length: int = 1048576,
        expand: int = 2,
        head_dim: int = 64,
        state_size: int = 128,
        n_groups: int = 1,
        conv_kernel: int = 4,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = True,
        bias: bool = False,
        conv_bias: bool = True,
        init: Init = "llama",
        init_std: dict[str, float] | None = None,
    ):
        check_arguments(Mamba2, locals() | {"n_head": 1})
        heads, rest = divmod(expand * n_embd, head_dim)
        if rest:
            raise ConfigError(
                f"Mamba2: head_dim={head_dim} does not divide expand * n_embd={expand * n_embd}."
            )
        if heads % n_groups:
            raise ConfigError(f"Mamba2: n_groups={n_groups} does not divide the {heads} heads.")
        super().__init__(
            vocab_size=vocab_size,
            n_embd=n_embd,
            n_head=heads,
            n_kv_head=heads,
            head_dim=head_dim,
            max_sequence_length=max_sequence_length,
            layers=[Layer()] * n_layer,
            init=init,
            init_std=init_std,
            recurrent=[True] * n_layer,
        )

        def new_block(index: int) -> MixerBlock:
            mixer = StateSpace(
                n_embd, heads, head_dim, state_size, n_groups, norm_eps, conv_kernel, bias, conv_bias
            )
            return MixerBlock(mixer, new_norm("rmsnorm", n_embd, norm_eps))

        self.build(new_block, lambda: new_norm("rmsnorm", n_embd, norm_eps), tie_embeddings)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """None: see the class."""
        return {}

    def sequence_parallel_plan(self) -> dict[str, Any]:
        """None: see the class."""
        return {}
