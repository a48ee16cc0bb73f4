"""Samples the answers of rollouts with vLLM."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError
from core.technique import Package, technique
from plugins.adapters.lora import NAMES, LoRALinear
from plugins.checkpoints.foreign import CONFIG, read_json
from plugins.checkpoints.matching import form_of
from plugins.precision.layers import weight_of
from toolkit.answers import Answer, Sampler

if TYPE_CHECKING:
    from toolkit.hugging_face import HuggingFaceForm
    from toolkit.selection import Run, Selected


@technique(
    paper="vLLM, arXiv:2309.06180; an engine in the processes of training: HybridFlow, arXiv:2409.19256, section 5",
    needs=(Package("vllm>=0.11", extra="vllm"),),
)
class VLLMSampler(Sampler):
    """Has vLLM sample the answers: continuous batches, paged caches, and kernels for generation.

    Each process has an engine on its device, beside the network in training: for one GPU, or several with DDP or FSDP. Before each
    rollout the engine gets the weights of now, with LoRA merged. Its arithmetic is not the trainer's: `rollout/gap` shows by how
    much the log-probabilities differ, and `importance_cap` of the objective corrects for it. What is drawn follows from the seed
    of each answer, up to the rounding of vLLM's kernels, which may differ with the batch.

    Args:
        path: A Hugging Face folder of the network, as `export` writes it or as `model.weights` names it; its weights are replaced.
        memory_share: Share of the device's memory for the engine, weights and caches, above 0 and below 1.
        dtype: Data type of the engine's weights; the trainer's log-probabilities are nearest with that of the run's precision.

    Raises:
        ConfigError: If the folder has no config.json, or is of another network.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward: {class_path: ExactAnswer, init_args: {field: answer}}
                sampler:
                  class_path: VLLMSampler
                  init_args: {path: SmolLM2-135M}
    """

    def __init__(
        self,
        path: str,
        memory_share: float = 0.3,
        dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    ) -> None:
        if not 0 < memory_share < 1:
            raise ConfigError(f"VLLMSampler: memory_share is {memory_share}; it is above 0 and below 1.")
        self.path = Path(path).expanduser()
        if not (self.path / CONFIG).is_file():
            raise ConfigError(
                f"VLLMSampler: there is no {CONFIG} in {self.path}.\n"
                "Give the Hugging Face folder of the network: python -m core export --ckpt_path RUN --output FOLDER"
            )
        self.memory_share, self.dtype = memory_share, dtype
        self._engine: Any = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields errors where ranks share the weights while they sample, and for adapters that no weight can express for vLLM."""
        if any((item.arguments.get("tensor") or 1) > 1 for item in run.selected):
            yield "VLLMSampler has an engine on each rank, and needs all weights there: set tensor to 1"
        for item in run.selected:
            if item.kind == "adapters" and item.name not in ("LoRA", "Freeze"):
                yield f"VLLMSampler gives vLLM weights, into which LoRA alone is merged: take LoRA for {item.name}, or set sampler to null"

    def sample(
        self,
        network: Network,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        seeds: Sequence[int],
        stop_ids: Collection[int],
    ) -> list[Answer]:
        """Samples with the weights of now; see `toolkit.answers.Sampler`."""
        weights = self._weights(network)
        # the run's autocast would round LoRA's updates; vLLM computes in `dtype`
        with torch.autocast(next(network.parameters()).device.type, enabled=False):
            if self._engine is None:
                self._engine = self._start(network)
            self._engine.collective_rpc(_load, args=(weights,))
            self._engine.reset_prefix_cache()  # keys and values of the weights before
            return self._generated(prompts, max_new_tokens, seeds, sorted(stop_ids)) if prompts else []

    def _generated(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int], stops: list[int]
    ) -> list[Answer]:
        from vllm import SamplingParams

        samples = len(seeds) // len(prompts)
        params = [
            SamplingParams(  # temperature 1 from all tokens are its defaults
                max_tokens=max_new_tokens,
                seed=seed,
                logprobs=0,
                stop_token_ids=stops,
                ignore_eos=True,
                detokenize=False,
            )
            for seed in seeds
        ]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts for _ in range(samples)]
        found = self._engine.generate(asked, params, use_tqdm=False)
        return [_answer(one.outputs[0], stops) for one in found]

    def _weights(self, network: Network) -> Iterator[tuple[str, Tensor]]:
        """Returns the weights under the names of transformers, which vLLM reads; merged when it asks for them, one by one."""
        config = read_json(self.path, CONFIG)
        form = form_of(network, config)
        if form is None:
            raise ConfigError(
                f"VLLMSampler: {self.path / CONFIG} is of {config.get('architectures')}, which {type(network).__name__} is not."
            )
        rows = config.get("vocab_size")
        if rows != network.vocab_size:
            raise ConfigError(
                f"VLLMSampler: {self.path / CONFIG} has a vocab_size of {rows}, the network one of {network.vocab_size}.\n"
                "Export the network, with the same arguments, and give that folder."
            )
        own: dict[str, Any] = dict(network.named_parameters())
        own |= {name: value for name, value in network.named_buffers() if _has_place(form, name)}
        layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
        for name, layer in layers.items():
            if isinstance(layer, LoRALinear):
                for leaf in NAMES:
                    own.pop(f"{name}.{leaf}", None)

        def weight(name: str) -> Tensor:
            layer: Any = layers.get(name.removesuffix(".weight"))
            if layer is None:
                return own[name].detach()
            return layer.merged() if isinstance(layer, LoRALinear) else weight_of(layer)

        return ((one.theirs, one.to_theirs([weight(name) for name in one.ours])) for one in form.tensors(own))

    def _start(self, network: Network) -> Any:
        """Starts an engine in this process, one of as many as there are ranks."""
        from vllm import LLM

        for name, value in _place().items():  # where vLLM looks for it; a launcher may have set it
            os.environ.setdefault(name, value)
        return LLM(
            model=str(self.path),
            skip_tokenizer_init=True,
            dtype=self.dtype,
            max_model_len=network.max_sequence_length,
            gpu_memory_utilization=self.memory_share,
            distributed_executor_backend="external_launcher",  # in this process, whose ranks have engines of their own
            logprobs_mode="processed_logprobs",
        )


def _place() -> dict[str, str]:
    """Returns the place of this process among all, as torchrun would say it."""
    from torch import cuda, distributed

    known = distributed.is_available() and distributed.is_initialized()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {
            "RANK": str(distributed.get_rank() if known else 0),
            "WORLD_SIZE": str(distributed.get_world_size() if known else 1),
            "LOCAL_RANK": str(cuda.current_device() if cuda.is_available() else 0),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),  # of a single process; others are connected already
        }


def _has_place(form: HuggingFaceForm, name: str) -> bool:
    """Returns whether a buffer is stored by transformers, such as the biases of a router; tables of positions are not."""
    try:
        form.tensors((name,))
    except ConfigError:
        return False
    return True


def _load(worker: Any, weights: list[tuple[str, Tensor]]) -> None:
    """Puts weights into the network of vLLM's worker."""
    worker.model_runner.model.load_weights(weights)


def _answer(found: Any, stops: Sequence[int]) -> Answer:
    """Returns an answer of vLLM's, whose tokens have the one that ended it."""
    ids = list(found.token_ids)
    logs = [float(each[id].logprob) for id, each in zip(ids, found.logprobs, strict=True)]
    return Answer(ids, logs, bool(ids) and ids[-1] in stops)
