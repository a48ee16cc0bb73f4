"""Repetition and diversity of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from core.errors import ConfigError
from core.technique import technique
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured
from toolkit.generation.filters import Sampling
from toolkit.rewards import repetition

ORDERS = (1, 2, 3)
"""Of the n-grams of distinct-n."""

PROMPTS = ("The", "If you", "This is", "In order to", "There are", "When the", "A", "It was")
"""Openings that fit most English text."""


@technique(
    paper="distinct-n: Li et al., arXiv:1510.03055, section 5.3; self-BLEU: Texygen, arXiv:1802.01886, section 3.1; "
    "repetition: Holtzman et al., arXiv:1904.09751"
)
class SampleDiversity(Evaluation):
    """Samples several continuations of each prompt, and says how much they repeat themselves and each other.

    Figures: `repetition`, the share of a sample's token 4-grams that occurred in it before, mean of the samples;
    `distinct_1`, `distinct_2` and `distinct_3`, different word n-grams over all n-grams of the samples of a prompt, mean of the
    prompts; `mean_length_tokens`; with `self_bleu` the BLEU of a sample against the others of its prompt, 0 to 100, mean of the
    samples: high is alike.

    Args:
        prompts: Texts that are continued; by default a few openings of English text. An empty one begins a text, where
            the tokenizer has a token for that.
        samples: Continuations of each prompt; at least 2.
        max_new_tokens: Tokens of a sample at most; distinct-n falls with it.
        temperature: Divides the logits; above 0.
        top_p: Draw among the likeliest tokens of this total probability; None: all.
        self_bleu: Whether it is computed, with sacrebleu: pip install 'leyden[eval]'.
        seed: Of the first sample of each prompt; the next one has the next number.

    Raises:
        ConfigError: If a value is out of range, or sacrebleu is needed and not installed.

    Example:
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                evaluations:
                  samples: {class_path: SampleDiversity, init_args: {samples: 4, max_new_tokens: 32}}
    """

    def __init__(
        self,
        prompts: Sequence[str] = PROMPTS,
        samples: int = 8,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float | None = None,
        self_bleu: bool = False,
        seed: int = 0,
    ) -> None:
        if not prompts or len(set(prompts)) < len(prompts):
            raise ConfigError("SampleDiversity.prompts: give at least one prompt, and each once.")
        if samples < 2 or max_new_tokens < 1:
            raise ConfigError(
                f"SampleDiversity takes samples >= 2 and max_new_tokens >= 1, not {samples} and {max_new_tokens}."
            )
        self.sampling = Sampling(temperature, None, top_p)
        if not temperature > 0 or (fault := self.sampling.fault()):
            raise ConfigError(
                f"SampleDiversity: {fault if temperature > 0 else f'temperature={temperature} must be above 0.'}"
            )
        if self_bleu and find_spec("sacrebleu") is None:
            raise ConfigError(
                "SampleDiversity: self_bleu needs sacrebleu, which is not installed: pip install 'leyden[eval]'"
            )
        self.prompts, self.samples, self.max_new_tokens = tuple(prompts), samples, max_new_tokens
        self.self_bleu, self.seed = self_bleu, seed

    def items(self, model: EvaluatedModel) -> Sequence[Item]:
        """Returns the prompts."""
        model.encode_prompts(self.prompts)
        return [Item(f"prompt {number}", prompt) for number, prompt in enumerate(self.prompts, 1)]

    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
        """Returns the figures of each prompt, and its first sample."""
        drawn = model.generate(
            model.encode_prompts([item.content for item in items]),
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            samples=self.samples,
            seed=self.seed,
        )
        found = []
        for item, samples in zip(items, drawn, strict=True):
            texts = [sample.text for sample in samples]
            sums = {
                "prompts": 1.0,
                "samples": float(len(samples)),
                "length": float(sum(len(sample.ids) for sample in samples)),
                "repetition": sum(repetition(sample.ids) for sample in samples),
                **{f"distinct_{n}": distinct(texts, n) for n in ORDERS},
            }
            if self.self_bleu:
                sums["self_bleu"] = _self_bleu(texts)
            found.append(Measured(sums, {"prompt": item.content, "sample": texts[0]}))
        return found

    @staticmethod
    def figures(sums: Mapping[str, float]) -> dict[str, float]:
        """Returns means over samples, of distinct-n over prompts."""
        prompts, samples = sums.get("prompts"), sums.get("samples")
        if not prompts or not samples:
            return {}
        found = {
            "repetition": sums.get("repetition", 0.0) / samples,
            **{f"distinct_{n}": sums.get(f"distinct_{n}", 0.0) / prompts for n in ORDERS},
            "mean_length_tokens": sums.get("length", 0.0) / samples,
        }
        return found | ({"self_bleu": sums["self_bleu"] / samples} if "self_bleu" in sums else {})


def distinct(texts: Sequence[str], n: int) -> float:
    """Returns how many different word n-grams there are, over all of them, in several texts together; 0 without any."""
    grams = [
        tuple(words[start : start + n])
        for words in (text.split() for text in texts)
        for start in range(len(words) - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else 0.0


def _self_bleu(texts: Sequence[str]) -> float:
    """Returns the sum over texts of the BLEU of each against all others."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(effective_order=True)
    return sum(
        metric.sentence_score(text, [*texts[:number], *texts[number + 1 :]]).score
        for number, text in enumerate(texts)
    )
