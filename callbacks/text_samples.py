"""Text samples: continuations of a few prompts, during a run and at its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.text import Text

from core.contracts import HasTokenizer, MarksEndOfText, Network, PausesClock
from core.errors import ConfigError
from core.technique import technique
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling
from toolkit.generation.prompts import leading_ids
from toolkit.generation.texts import printable
from toolkit.sampling import fault
from toolkit.trials import say

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPTS = ("The", "If you", "This is", "In order to", "There are", "When the")
"""Openings that fit most English text; the first `num_samples` are used."""

Sample = tuple[str, str]
"""A prompt and its continuation."""


@technique(
    paper="top-k sampling: Fan et al., arXiv:1805.04833, section 5; temperature 0 is greedy",
    after=("Throughput",),
    maturity="stable",
    observer=True,
)
class TextSamples(Callback):
    """Prints continuations of prompts and appends them to `samples.txt` in the run folder.

    Sampling does not change training: each sample has its own generator, and every module returns to its
    mode. Only rank 0 samples; the other ranks wait. Without a tokenizer
    (`tokenizer_json` of the data module), and where no rank has the full network, nothing is sampled,
    and a message says so once.

    Args:
        num_samples: How many prompts to continue, at most as many as there are.
        prompts: The prompts; by default a few common openings of English text.
        every_n_steps: Sample after every so many optimizer steps; by default only at the end of `fit`.
        max_new_tokens: Tokens per sample at most; it ends earlier at the end of a text.
        temperature: Divides the logits.
        top_k: Draw from the k most probable tokens only; None: from all.
        seed: Of the first sample; the next one has the next number. The text depends on seed and weights only.

    Raises:
        ConfigError: If a number is out of its range, or `num_samples` is above the number of prompts.

    Example:
        trainer:
          callbacks+:
            - class_path: TextSamples
              init_args: {num_samples: 3, every_n_steps: 1000, temperature: 0.8, top_k: 50}
    """

    def __init__(
        self,
        num_samples: int = 3,
        prompts: list[str] | None = None,
        every_n_steps: int | None = None,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
    ) -> None:
        given = list(PROMPTS) if prompts is None else prompts
        if not 1 <= num_samples <= len(given) or not all(given):
            raise ConfigError(
                f"TextSamples: num_samples is {num_samples}, and there are {len(given)} prompts.\n"
                "Give at least as many `prompts` as samples, none of them empty, and at least 1."
            )
        for name, value in {"every_n_steps": every_n_steps, "max_new_tokens": max_new_tokens}.items():
            if value is not None and value < 1:
                raise ConfigError(f"TextSamples: {name} must be at least 1, not {value}.")
        if wrong := fault(max_new_tokens, temperature, top_k):
            raise ConfigError(f"TextSamples: {wrong}")
        self._prompts = given[:num_samples]
        self._every_n_steps = every_n_steps
        self._options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "seed": seed,
        }
        self._sampled_at = -1
        self._said_why_not = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Notes the first step of the run: it was sampled before, or has random weights."""
        self._sampled_at = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Samples at multiples of `every_n_steps`."""
        if self._every_n_steps is None:
            return
        step = trainer.global_step
        if step % self._every_n_steps == 0 and step != self._sampled_at:
            self._sample(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Samples from the final weights."""
        if trainer.global_step != self._sampled_at:
            self._sample(trainer, pl_module)

    def _sample(self, trainer: Trainer, pl_module: Any) -> None:
        self._sampled_at = trainer.global_step
        if not trainer.is_global_zero or self._cannot(trainer, pl_module):
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PausesClock):
                callback.pause_clock()
        try:
            with trainer.precision_plugin.forward_context():
                samples = self._continuations(trainer, pl_module)
        except ConfigError as error:  # such as weights that are not finite: a sample must not end the run
            print(f"TextSamples, step {trainer.global_step:,}: {error}", file=sys.stderr)
            return
        self._show(trainer, samples)
        self._append(trainer, samples)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                for number, (prompt, continuation) in enumerate(samples):
                    logger.experiment.add_text(
                        f"samples/{number}", f"**{prompt}**{continuation}", trainer.global_step
                    )

    def _continuations(self, trainer: Trainer, pl_module: Any) -> list[Sample]:
        from tokenizers import Tokenizer

        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        tokenizer = Tokenizer.from_str(data.tokenizer_json)
        stop_id = data.end_of_text_id if isinstance(data, MarksEndOfText) else None
        return _continue(pl_module.network, tokenizer, self._prompts, stop_id, self._options)

    def _cannot(self, trainer: Trainer, pl_module: Any) -> bool:
        if not isinstance(trainer.datamodule, HasTokenizer):  # type: ignore[attr-defined]
            reason = "the data module offers no tokenizer_json"
        elif _is_sharded(trainer, pl_module.network):
            reason = "no rank has the full network"
        else:
            return False
        if not self._said_why_not:
            say(trainer, self, f"no samples, because {reason}.")
            self._said_why_not = True
        return True

    def _show(self, trainer: Trainer, samples: list[Sample]) -> None:
        console = Console(highlight=False)
        console.print(f"\nSamples at step {trainer.global_step:,}", style="bold")
        for prompt, continuation in samples:
            console.print(Text.assemble((prompt, "dim"), printable(continuation)), soft_wrap=True)
            console.print()

    def _append(self, trainer: Trainer, samples: list[Sample]) -> None:
        head = f"=== step {trainer.global_step}, " + ", ".join(f"{k} {v}" for k, v in self._options.items())
        texts = [f"--- {prompt}\n{prompt}{continuation}" for prompt, continuation in samples]
        with open(Path(trainer.default_root_dir) / "samples.txt", "a", encoding="utf-8") as file:
            file.write("\n".join([head, *texts]) + "\n\n")


def _continue(
    network: Network, tokenizer: Tokenizer, prompts: list[str], stop_id: int | None, options: dict[str, Any]
) -> list[Sample]:
    begin = leading_ids(tokenizer)
    encoded = [[*begin, *tokenizer.encode(prompt, add_special_tokens=False).ids] for prompt in prompts]
    decoding = Decoding(
        network,
        encoded,
        max_new_tokens=options["max_new_tokens"],
        sampling=Sampling(options["temperature"], options["top_k"]),
        seeds=[options["seed"] + number for number in range(len(prompts))],
        stop_ids=() if stop_id is None else (stop_id,),
    )
    new: list[list[int]] = [[] for _ in prompts]
    for token in decoding:
        new[token.row].append(token.id)
    # decoded together: a token may be part of a character, or mean a space before a word
    return [
        (prompt, tokenizer.decode(ids + more).removeprefix(tokenizer.decode(ids)))
        for prompt, ids, more in zip(prompts, encoded, new, strict=True)
    ]


def _is_sharded(trainer: Trainer, network: torch.nn.Module) -> bool:
    if trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy):
        return True
    if any(p.numel() == 0 for p in network.parameters()):  # DeepSpeed's, which are freed between their uses
        return True
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: there is no DTensor
    return module is not None and any(isinstance(p, module.DTensor) for p in network.parameters())
