"""Answers to prompts, compared with reference answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

from core.errors import ConfigError
from core.technique import technique
from plugins.evaluations import text_scores
from plugins.evaluations.counts import check_counts
from plugins.evaluations.records import as_texts, record_items
from toolkit.evaluation import EvaluatedModel, Evaluation, Item, Measured

Score = Literal["squad", "rouge", "bleu", "chrf"]


@technique(
    paper="SQuAD, arXiv:1606.05250, section 6.1; BLEU: Papineni et al. 2002 as sacrebleu, arXiv:1804.08771; ROUGE: Lin 2004; "
    "chrF: Popović 2015"
)
class AnswerQuality(Evaluation):
    """Lets the network answer the prompts of a file and compares the answers with those that the file has.

    Always the likeliest token is taken. A network that was trained on conversations gets each prompt as the message of a user,
    by its chat template; any other continues it as text. Of several references the best one counts.

    Figures, by what `scores` names: `squad`: `exact_match` and `f1`, the form of SQuAD without case, punctuation and articles,
    0 to 1; `rouge`: `rouge1`, `rouge2`, `rougel`, F1 without stemming, 0 to 1; `bleu` and `chrf`: those of the corpus as
    sacrebleu computes them, 0 to 100.

    Args:
        source: A .jsonl file of records.
        prompt: The field of the prompt.
        reference: The field of the answer, or of a list of right answers.
        scores: What is computed: `squad`, `rouge`, `bleu`, `chrf`. `bleu` needs sacrebleu: pip install 'leyden[eval]'.
        max_new_tokens: The most tokens of an answer.
        stop: Texts that end an answer, such as a line break.
        max_records: Records that are read, from the first one.
        group_by: The field that names the group of a record; None: no groups.

    Raises:
        ConfigError: If a number is below 1, no score is named, the file cannot be read, or a record lacks a field.

    Example:
        trainer:
          callbacks+:
            - class_path: Evaluate
              init_args:
                evaluations:
                  questions:
                    class_path: AnswerQuality
                    init_args: {source: questions.jsonl, scores: [squad, rouge], max_new_tokens: 32}
    """

    def __init__(
        self,
        source: str,
        prompt: str = "prompt",
        reference: str = "answer",
        scores: Sequence[Score] = ("squad",),
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        max_records: int = 1000,
        group_by: str | None = None,
    ) -> None:
        check_counts("AnswerQuality", max_new_tokens=max_new_tokens, max_records=max_records)
        if not scores:
            raise ConfigError(f"AnswerQuality.scores is empty: name some of {', '.join(text_scores.SCORES)}.")
        if "bleu" in scores and find_spec("sacrebleu") is None:
            raise ConfigError(
                "AnswerQuality: bleu needs sacrebleu, which is not installed: pip install 'leyden[eval]'"
            )
        self.source, self.prompt, self.reference, self.scores = source, prompt, reference, tuple(scores)
        self.max_new_tokens, self.stop = max_new_tokens, tuple(stop)
        self.max_records, self.group_by = max_records, group_by

    def items(self, model: EvaluatedModel) -> Sequence[Item]:
        """Returns the records."""
        fields = self.prompt, self.reference
        found = record_items(self.source, fields, self.max_records, self.group_by, "AnswerQuality")
        for item in found:
            if not as_texts(item.content[self.reference]):
                raise ConfigError(
                    f"{item.id}: the field {self.reference!r} is an empty list: it needs a right answer."
                )
        return found

    def measure(self, model: EvaluatedModel, items: Sequence[Item]) -> list[Measured]:
        """Returns the sums of the scores of each answer, and the answer."""
        asked = [str(item.content[self.prompt]) for item in items]
        prompts = model.encode_prompts(asked)
        answers = model.generate(prompts, max_new_tokens=self.max_new_tokens, stops=self.stop)
        found = []
        for item, prompt, (answer,) in zip(items, asked, answers, strict=True):
            references = as_texts(item.content[self.reference])
            sums = {"items": 1.0}
            for score in self.scores:
                sums |= text_scores.SCORES[score](answer.text.strip(), references)
            found.append(
                Measured(sums, {"prompt": prompt, "answer": answer.text, "reference": references[0]})
            )
        return found

    @staticmethod
    def figures(sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the figures of the scores."""
        return text_scores.figures(sums)
