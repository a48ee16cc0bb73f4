"""Rollouts: answers of the network in training to a batch of prompts, with rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from core.contracts import IGNORED_LABEL
from core.errors import ConfigError
from core.technique import Feature, technique
from core.training.figures import log_figures
from core.training.loss_ranks import dp_group, dp_rank, dp_size
from core.training.seeding import mix
from toolkit.answers import Answer, Sampler, as_part, check_answers, sample_answers
from toolkit.generation.rows import evaluating
from toolkit.rewards import Reward, Sample, Scores, score
from toolkit.rollout_figures import rollout_figures
from toolkit.rollouts import (
    RECORDS,
    REWARDS,
    TURNS,
    GivesPrompts,
    OnPolicyObjective,
    Part,
    Rollout,
)
from toolkit.whole_networks import as_forward, gathered, sharding_faults

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

FUNCTION = "answer_prompts"
"""Under this name the LightningModule has what is called as its forward."""

MULTIPLE = 8
"""Rows are padded to a multiple of this number of tokens."""


@technique(
    paper="InstructGPT, arXiv:2203.02155, section 3.5; several steps on a rollout: PPO, arXiv:1707.06347, algorithm 1",
    needs=(Feature("prompts"), Feature("learns_from_rollouts")),
    offers=("rollouts",),
)
class Rollouts(Callback):
    """Has the network answer each batch of prompts, scores the answers, and puts them into the batch for the objective.

    Each prompt gets `samples` answers, drawn from the network's distribution as it is: temperature 1, all tokens. What is drawn
    depends on weights, prompt and its place in the run, not on how ranks and micro-batches share the prompts. The
    log-probabilities that the objective compares with are computed by the forward of training on the same rows: at the first
    step on a rollout, on a CPU, the ratio is exactly 1. Networks are in eval mode meanwhile; set their dropout to 0.

    A rollout is trained on in `mini_batches` micro-batches, `epochs` times: the data module deals out each batch that often.
    Checkpoints hold a rollout that is in use. Validation samples one answer to each prompt, and `val/loss` is the negative
    mean reward, `val/reward`.

    Logged: `rollout/reward`, and `rollout/reward/NAME` of each part of it; `rollout/best`, the mean of the best answer to each
    prompt; `rollout/length` in tokens; `rollout/ended`, the share of answers that the network ended; `rollout/repetition`;
    `rollout/entropy` in nats a token, estimated from the tokens drawn; `rollout/kl` in nats a token, if there is a reference;
    `rollout/gap`, the mean difference between the log-probabilities of decoder and trainer, in nats.

    Each rank needs all weights while it samples, or shares them with ranks that have the same prompts (tensor parallelism). FSDP
    gathers them once for a rollout: a rank then needs memory for the whole network, beside its shards of all else.

    Args:
        reward: What scores answers.
        samples: Answers to each prompt.
        max_new_tokens: The most tokens of an answer, with the one that ends it.
        mini_batches: Micro-batches that a rollout is cut into; divides the batch size.
        epochs: How often each is trained on.
        sampler: What samples the answers; None: the network in training.

    Raises:
        ConfigError: If a number is out of range, network and prompts leave no room for answers, or a sampler returns wrong answers.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward: {class_path: ExactAnswer, init_args: {field: answer}}
                samples: 8
                max_new_tokens: 256
    """

    def __init__(
        self,
        reward: Reward,
        samples: int = 8,
        max_new_tokens: int = 256,
        mini_batches: int = 1,
        epochs: int = 1,
        sampler: Sampler | None = None,
    ) -> None:
        numbers = {"samples": samples, "max_new_tokens": max_new_tokens, "mini_batches": mini_batches, "epochs": epochs}  # fmt: skip
        for name, value in numbers.items():
            if value < 1:
                raise ConfigError(f"Rollouts: {name}={value} must be at least 1.")
        self.reward, self.samples, self.max_new_tokens, self.sampler = (
            reward,
            samples,
            max_new_tokens,
            sampler,
        )
        self.mini_batches, self.turns = mini_batches, mini_batches * epochs
        self._parts: list[Part] = []  # of all ranks, on the CPU, while there are turns left
        self._records: list[int] = []  # numbers of their prompts
        self._sums: dict[str, tuple[float, float]] = {}

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields errors for prompts that leave no room, batches that cannot be cut, and networks that are sharded."""
        room, longest = own.arguments.get("max_new_tokens"), run.argument("data.sequence_length")
        most = run.argument("model.network.max_sequence_length")
        if room and longest and most and longest + room > most:
            yield "max_new_tokens: " + no_room(longest, room, most)
        parts, rows = own.arguments.get("mini_batches") or 1, run.argument("data.batch_size")
        if rows and rows % parts:
            yield f"mini_batches: {parts} do not divide data.batch_size={rows}: set one to fit the other"
        accumulated = run.argument("trainer.accumulate_grad_batches") or 1
        if (own.arguments.get("epochs") or 1) > 1 and parts % accumulated:
            yield (
                f"mini_batches: {parts} is no multiple of trainer.accumulate_grad_batches={accumulated}: with several epochs a "
                "step would hold rows twice"
            )
        yield from sharding_faults(run)

    # -- before training ------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Tells the data module how often each batch is trained on."""
        data = _prompts(trainer)
        data.repeat_batches(self.turns)
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(data.tokenizer_json)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Checks that network, data and objective fit."""
        data, network = _prompts(trainer), pl_module.network
        most = network.max_sequence_length
        if most and data.sequence_length + self.max_new_tokens > most:
            raise ConfigError(f"Rollouts: {no_room(data.sequence_length, self.max_new_tokens, most)}.")
        rows = getattr(data, "batch_size", self.mini_batches)
        if rows % self.mini_batches:
            raise ConfigError(
                f"Rollouts: mini_batches={self.mini_batches} do not divide data.batch_size={rows}."
            )
        _objective(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Gives the reference the weights that a new run begins with."""
        _objective(pl_module).begin(pl_module.network, resumed=bool(trainer.ckpt_path))

    # -- training -------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Replaces the prompts by answers with what the objective needs."""
        records, turn = batch[RECORDS].tolist(), int(batch[TURNS][0])
        ranks, rank = dp_size(trainer), dp_rank(trainer)
        own = slice(rank * len(records), (rank + 1) * len(records))
        if turn == 0 or self._records[own] != records:  # not the same: batches were left out
            parts = self._roll_out(trainer, pl_module, batch, batch_idx)
            self._parts, self._records = [], []
            if turn + 1 < self.turns:
                self._keep(trainer, pl_module, parts, records)
            part = parts[turn % self.mini_batches]
        else:
            kept = self._parts[turn % self.mini_batches]
            size = len(kept["labels"]) // ranks
            rows = slice(rank * size, (rank + 1) * size)
            part = {name: values[rows].to(pl_module.device) for name, values in kept.items()}
        if turn + 1 == self.turns:
            self._parts, self._records = [], []
        batch.clear()
        batch.update(part)

    def _roll_out(
        self, trainer: Trainer, pl_module: Any, batch: Mapping[str, Tensor], batch_idx: int
    ) -> list[Part]:
        prompts, records = _ids(batch), batch[RECORDS].tolist()
        number = -(
            -(batch_idx - int(batch[TURNS][0])) // self.turns
        )  # of the rollout, whatever it is cut into
        first = (number * dp_size(trainer) + dp_rank(trainer)) * len(prompts)
        places = range(first, first + len(prompts))
        seed = pl_module.seed, trainer.current_epoch
        seeds = [mix(*seed, place, which) for place in places for which in range(self.samples)]
        objective = _objective(pl_module)

        def answered() -> list[Part]:
            answers = self._sample(pl_module.network, prompts, seeds, trainer)
            scores = self._score(trainer, "train", records, answers)
            parts = self._parts_of(trainer, pl_module, prompts, answers, scores)
            for part in parts:
                objective.add_log_probabilities(pl_module.network, part)
            self._count(pl_module, answers, scores, parts)
            objective.prepare(pl_module.network, Rollout(parts, self.samples, pl_module.sum_over_ranks))
            return parts

        with evaluating(pl_module.network):
            return as_forward(trainer, pl_module, FUNCTION, answered)

    def _sample(
        self, network: Any, prompts: Sequence[list[int]], seeds: Sequence[int], trainer: Trainer
    ) -> list[Answer]:
        stops = _prompts(trainer).stop_ids
        with gathered(trainer, network):
            sample = self.sampler.sample if self.sampler else sample_answers
            most = self.max_new_tokens
            answers = sample(network, prompts, max_new_tokens=most, seeds=seeds, stop_ids=stops)
        if self.sampler:
            check_answers(answers, type(self.sampler).__name__, len(seeds), most)
        return answers

    def _score(
        self, trainer: Trainer, split: str, records: Sequence[int], answers: Sequence[Answer]
    ) -> Scores:
        data = _prompts(trainer)
        each = len(answers) // max(len(records), 1)
        texts = self._tokenizer.decode_batch([answer.content for answer in answers])
        prompted = [data.prompted(split, record) for record in records]
        samples = [
            Sample(prompted[n // each].text, text, answer.content, answer.ended, prompted[n // each].record)
            for n, (answer, text) in enumerate(zip(answers, texts, strict=True))
        ]
        return _agreed(trainer, score(self.reward, samples))

    def _parts_of(
        self,
        trainer: Trainer,
        pl_module: Any,
        prompts: Sequence[list[int]],
        answers: Sequence[Answer],
        scores: Scores,
    ) -> list[Part]:
        """Returns the rows of each mini-batch: every so many-th prompt, so that ranks do not matter."""
        before = [ids for ids in prompts for _ in range(self.samples)]
        width = self._width(trainer, pl_module, before, answers)
        parts = []
        for number in range(self.mini_batches):
            rows = [n for n in range(len(answers)) if n // self.samples % self.mini_batches == number]
            part = as_part(
                [before[n] for n in rows],
                [answers[n] for n in rows],
                width,
                self.max_new_tokens,
                pl_module.device,
            )
            values = torch.tensor([scores.values[n] for n in rows], dtype=torch.float32)
            parts.append(part | {REWARDS: values.to(pl_module.device)})
        return parts

    def _width(
        self, trainer: Trainer, pl_module: Any, prompts: Sequence[list[int]], answers: Sequence[Answer]
    ) -> int:
        """Returns the length of the longest row of all ranks, rounded up."""
        longest = max(len(ids) + len(answer.ids) - 1 for ids, answer in zip(prompts, answers, strict=True))
        width = -(-longest // MULTIPLE) * MULTIPLE
        width = min(width, pl_module.network.max_sequence_length or width)
        if dp_size(trainer) > 1:
            wide = torch.tensor(width, device=pl_module.device)
            width = int(trainer.strategy.reduce(wide, group=dp_group(trainer), reduce_op="max"))
        return width

    def _keep(self, trainer: Trainer, pl_module: Any, parts: Sequence[Part], records: list[int]) -> None:
        """Keeps a rollout of all ranks, so that a checkpoint holds it: each rank writes and reads the same."""

        def of_all(values: Tensor) -> Tensor:
            if dp_size(trainer) > 1:
                values = cast(Tensor, pl_module.all_gather(values, dp_group(trainer))).flatten(0, 1)
            return values.cpu()

        self._parts = [{name: of_all(values) for name, values in part.items()} for part in parts]
        self._records = of_all(torch.tensor(records, device=pl_module.device)).tolist()

    # -- figures --------------------------------------------------------------------------------------------------

    def _count(
        self, pl_module: Any, answers: Sequence[Answer], scores: Scores, parts: Sequence[Part]
    ) -> None:
        """Adds the figures of a rollout, of all ranks, to those since the last logged step."""
        found, device = rollout_figures(answers, scores, parts, self.samples), pl_module.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        sums = pl_module.sum_over_ranks(torch.tensor(list(found.values()), dtype=wide, device=device))
        for name, (total, weight) in zip(found, sums.tolist(), strict=True):
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + weight

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs means over all answers since the last time, if it is the turn of a step."""
        if pl_module.logging_step and self._sums:
            log_figures(trainer, {name: total / weight for name, (total, weight) in self._sums.items()})
            self._sums = {}

    # -- validation -----------------------------------------------------------------------------------------------

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Replaces the prompts by one answer to each, with its reward."""
        self._answer_once(trainer, pl_module, batch, batch_idx, "validation")

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """As for validation."""
        self._answer_once(trainer, pl_module, batch, batch_idx, getattr(trainer.datamodule, "test_split", "test"))  # type: ignore[attr-defined]  # fmt: skip

    def _answer_once(
        self, trainer: Trainer, pl_module: Any, batch: dict[str, Tensor], batch_idx: int, split: str
    ) -> None:
        numbers = batch[RECORDS].tolist()
        first = (batch_idx * dp_size(trainer) + dp_rank(trainer)) * len(numbers)
        rows = [row for row, record in enumerate(numbers) if record >= 0]
        prompts = [ids for ids in _ids(batch) if ids]
        seeds = [mix(pl_module.seed, first + row) for row in rows]  # the same in each validation
        answers = as_forward(
            trainer, pl_module, FUNCTION, lambda: self._sample(pl_module.network, prompts, seeds, trainer)
        )
        scores = self._score(trainer, split, [numbers[row] for row in rows], answers)
        padding = [Answer([0], [0.0], False)] * (not rows)
        width = max((len(p) + len(a.ids) for p, a in zip(prompts, answers, strict=True)), default=2) - 1
        part = as_part(prompts or [[0]], [*answers, *padding], width, self.max_new_tokens, pl_module.device)
        if not rows:
            part["labels"] = torch.full_like(part["labels"], IGNORED_LABEL)
        batch.clear()
        values = torch.tensor(scores.values or [0.0], dtype=torch.float32, device=pl_module.device)
        batch.update(part | {REWARDS: values})

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the rollout that is in use, of all ranks, and the figures since the last logged step."""
        return {
            "parts": [{name: values.clone() for name, values in part.items()} for part in self._parts],
            "records": list(self._records),
            "sums": {name: list(pair) for name, pair in self._sums.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._parts = [dict(part) for part in state_dict["parts"]]
        self._records = list(state_dict["records"])
        self._sums = {name: (pair[0], pair[1]) for name, pair in state_dict["sums"].items()}


def no_room(longest: int, room: int, most: int) -> str:
    """Returns that prompts leave no room for answers, and what to do."""
    return (
        f"prompts of up to data.sequence_length={longest} tokens and answers of {room} do not fit into the network's "
        f"max_sequence_length={most}: lower one of them, or raise the last"
    )


def _agreed(trainer: Trainer, scores: Scores) -> Scores:
    """Returns the scores of the first of the ranks that share prompts: a test with a time limit may fail on one alone."""
    if trainer.world_size == dp_size(trainer):
        return scores
    module: Any = trainer.lightning_module
    ranks = module.all_gather(torch.tensor(dp_rank(trainer), device=module.device)).tolist()
    first = ranks.index(dp_rank(trainer))

    def of_first(values: list[float]) -> list[float]:
        wide = torch.float32 if module.device.type == "mps" else torch.float64
        every: Any = module.all_gather(torch.tensor(values, dtype=wide, device=module.device))
        found: list[float] = every[first].tolist()
        return found

    return Scores(of_first(scores.values), {name: of_first(values) for name, values in scores.parts.items()})


def _prompts(trainer: Trainer) -> Any:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, GivesPrompts):
        raise ConfigError(
            f"Rollouts answers prompts, and {type(data).__name__} gives none. Take --data=PromptDataModule."
        )
    return data


def _objective(pl_module: Any) -> OnPolicyObjective:
    for part in pl_module.objective.modules():
        if isinstance(part, OnPolicyObjective):
            return part
    raise ConfigError(
        f"Rollouts: {type(pl_module.objective).__name__} does not learn from rewards. Take --model.objective=GRPO, PPO or "
        "RejectionSampling."
    )


def _ids(batch: Mapping[str, Tensor]) -> list[list[int]]:
    """Returns the ids of each prompt of a batch, without padding."""
    inside = (batch["document_ids"] >= 0).tolist()
    return [
        [id for id, kept in zip(ids, mask, strict=True) if kept]
        for ids, mask in zip(batch["input_ids"].tolist(), inside, strict=True)
    ]
