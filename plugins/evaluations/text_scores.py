"""Scores of an answer against references, as sums that add up to those of a corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

CHARACTERS = 6
"""Orders of character n-grams in chrF."""

BETA = 2
"""How much more recall counts than precision in chrF."""

WORDS = 4
"""Orders of word n-grams in BLEU."""

Sums = dict[str, float]


def squad_sums(answer: str, references: Sequence[str]) -> Sums:
    """Returns exact match and F1 of words with the best reference, both in the form of SQuAD 1.1, 0 to 1."""
    from torchmetrics.functional.text import squad

    found = squad(
        {"prediction_text": answer, "id": "0"},
        {"answers": {"text": list(references), "answer_start": [0] * len(references)}, "id": "0"},
    )
    return {"mean_exact_match": float(found["exact_match"]) / 100, "mean_f1": float(found["f1"]) / 100}


def rouge_sums(answer: str, references: Sequence[str]) -> Sums:
    """Returns the F1 of ROUGE-1, ROUGE-2 and ROUGE-L with the best reference, without stemming, 0 to 1."""
    from torchmetrics.functional.text import rouge_score

    names = ("rouge1", "rouge2", "rougeL")
    found = rouge_score([answer], [list(references)], accumulate="best", rouge_keys=names)
    return {f"mean_{name.lower()}": float(found[f"{name}_fmeasure"]) for name in names}


def bleu_sums(answer: str, references: Sequence[str]) -> Sums:
    """Returns n-grams that match, n-grams, and lengths: what BLEU is computed from."""
    from sacrebleu.metrics import BLEU

    found = BLEU(force=True).corpus_score([answer], [[reference] for reference in references])
    sums = {"bleu_length": float(found.sys_len), "bleu_reference_length": float(found.ref_len)}
    for n, (correct, total) in enumerate(zip(found.counts, found.totals, strict=True), 1):
        sums |= {f"bleu_correct_{n}": float(correct), f"bleu_total_{n}": float(total)}
    return sums


def bleu(sums: Mapping[str, float]) -> float:
    """Returns sacrebleu's BLEU of a corpus (13a tokens, exponential smoothing), 0 to 100."""
    from sacrebleu.metrics import BLEU

    orders = range(1, WORDS + 1)
    found = BLEU.compute_bleu(
        [round(sums.get(f"bleu_correct_{n}", 0.0)) for n in orders],
        [round(sums.get(f"bleu_total_{n}", 0.0)) for n in orders],
        round(sums.get("bleu_length", 0.0)),
        round(sums.get("bleu_reference_length", 0.0)),
        smooth_method="exp",
    )
    return float(found.score)


def chrf_sums(answer: str, references: Sequence[str]) -> Sums:
    """Returns the character n-grams of the answer, of the best reference, and those that match: what chrF is computed from."""
    return max((_chrf_sums(answer, reference) for reference in references), key=chrf)


def _chrf_sums(answer: str, reference: str) -> Sums:
    one, other = "".join(answer.split()), "".join(reference.split())
    sums: Sums = {}
    for n in range(1, CHARACTERS + 1):
        own, wanted = _ngrams(one, n), _ngrams(other, n)
        sums |= {
            f"chrf_answer_{n}": float(own.total()),
            f"chrf_reference_{n}": float(wanted.total()),
            f"chrf_match_{n}": float((own & wanted).total()),
        }
    return sums


def _ngrams(text: str, n: int) -> Counter[str]:
    return Counter(text[start : start + n] for start in range(len(text) - n + 1))


def chrf(sums: Mapping[str, float]) -> float:
    """Returns chrF2 as sacrebleu computes it for a corpus, 0 to 100."""
    precisions, recalls = [], []
    for n in range(1, CHARACTERS + 1):
        answer, reference = sums.get(f"chrf_answer_{n}", 0.0), sums.get(f"chrf_reference_{n}", 0.0)
        if answer and reference:
            match = sums.get(f"chrf_match_{n}", 0.0)
            precisions.append(match / answer)
            recalls.append(match / reference)
    if not any(precisions):
        return 0.0
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    return 100 * (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


SCORES: Mapping[str, Callable[[str, Sequence[str]], Sums]] = {
    "squad": squad_sums,
    "rouge": rouge_sums,
    "bleu": bleu_sums,
    "chrf": chrf_sums,
}
"""Name -> sums of an answer, given its references."""


def figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures of all scores whose sums are there; `items` counts answers."""
    count = sums.get("items", 0.0)
    if not count:
        return {}
    found = {
        name.removeprefix("mean_"): value / count for name, value in sums.items() if name.startswith("mean_")
    }
    found |= {"bleu": bleu(sums)} if "bleu_length" in sums else {}
    return found | ({"chrf": chrf(sums)} if "chrf_answer_1" in sums else {})
