"""Rewards an answer as a reward model does that was trained on people's choices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core import catalog
from core.errors import ConfigError
from core.technique import technique
from plugins.checkpoints.checkpoint import stored_config
from plugins.checkpoints.finding import resolve
from toolkit.chat_template import ChatTemplate, HasTemplate
from toolkit.generation.prompts import PromptEncoder
from toolkit.rewards import Reward, Sample

if TYPE_CHECKING:
    from plugins.checkpoints.stored_objective import StoredObjective


@technique(paper="InstructGPT, arXiv:2203.02155, section 3.5; Christiano et al., arXiv:1706.03741")
class LearnedReward(Reward):
    """Gives what a stored reward model says of an answer: a checkpoint of a run with the objective RewardModel.

    Prompt and answer become a row as in that run, by its chat template and its tokenizer, which may be another than that of the
    network in training. A row that is longer than the reward model sees loses its beginning. An answer that was cut off is
    judged as if it ended there.

    The reward model is read when the first answers are scored, and is on the GPU if there is one, beside the network in
    training. It knows answers such as it was trained on: far from them its values mean little (see RewardWatch).

    Args:
        path: The checkpoint, or a run's folder: its newest.
        prompt_field: The record's field with the prompt, where that is a list of messages.
        batch_size: Rows that are computed together.

    Raises:
        ConfigError: If the checkpoint does not exist, is damaged or none of a reward model, `batch_size` < 1, or its chat
            template cannot be found again or refuses a conversation.

    Example:
        trainer:
          callbacks+:
            - class_path: Rollouts
              init_args:
                reward:
                  class_path: LearnedReward
                  init_args: {path: runs/reward/checkpoints/last.ckpt}
    """

    def __init__(self, path: str, prompt_field: str = "prompt", batch_size: int = 16) -> None:
        if batch_size < 1:
            raise ConfigError(f"LearnedReward.batch_size is {batch_size}; it is at least 1.")
        self.prompt_field, self.batch_size = prompt_field, batch_size
        try:
            self.path = resolve(str(Path(path).expanduser()), Path())
        except ConfigError as error:
            raise ConfigError(f"LearnedReward.path: {str(error).removeprefix('--ckpt_path ')}") from error
        self._check_objective()

    def _check_objective(self) -> None:
        """Refuses, before a run begins, a checkpoint of a run with another objective; one of a class unknown here is read first."""
        from plugins.objectives.reward_model import RewardModel

        objective = (stored_config(self.path).get("model") or {}).get("objective") or {}
        known = catalog.by_class_path(str(objective.get("class_path")))
        if known and not issubclass(kind := known.load(), RewardModel):
            raise ConfigError(_no_reward_model(self.path, kind))

    @cached_property
    def _stored(self) -> StoredObjective:
        import torch

        from plugins.checkpoints.stored_objective import load_objective
        from plugins.objectives.reward_model import RewardModel

        stored = load_objective(self.path)
        if not isinstance(stored.objective, RewardModel):
            raise ConfigError(_no_reward_model(self.path, type(stored.objective)))
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        stored.network.to(device)
        stored.objective.to(device)
        return stored

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self._stored.tokenizer_json)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        """The template of the run; None: it had none."""
        from lightning.pytorch import LightningDataModule

        from plugins.checkpoints.stored_network import build

        data = build(LightningDataModule, self._stored.config["data"], ("data",))
        return data.template if isinstance(data, HasTemplate) else None

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Returns the reward model's value of each sample."""
        rows = [self.row(sample) for sample in samples]
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]))  # little padding
        values = [0.0] * len(rows)
        for at in range(0, len(rows), self.batch_size):
            some = order[at : at + self.batch_size]
            objective: Any = self._stored.objective
            found = objective.score(self._stored.network, [rows[n] for n in some]).tolist()
            for n, value in zip(some, found, strict=True):
                values[n] = value
        return values

    def row(self, sample: Sample) -> list[int]:
        """Returns the token ids of a prompt with its answer, up to the token that ends it."""
        prompt = sample.record.get(self.prompt_field)
        said: Any = prompt if isinstance(prompt, list) else [{"role": "user", "content": sample.prompt}]
        encoder, longest = self._encoder, self._stored.network.max_sequence_length
        if self._template is None:
            ids = encoder.encode(encoder.as_text(sample.prompt) + encoder.as_text(sample.answer))
            end = self._stored.end_of_text_id
            ids += [] if end is None else [end]
        else:
            messages = encoder.as_text([*said, {"role": "assistant", "content": sample.answer}])
            text = self._template.render(messages, add_generation_prompt=False)
            ended = text.rstrip()  # what follows the token that ends a turn is none of the answer
            ids = encoder.encode(ended if ended.endswith(tuple(encoder.special)) else text, leading=False)
        return ids[-longest:] if longest else ids


def _no_reward_model(path: Path, objective: type) -> str:
    return (
        f"LearnedReward.path: {path} was trained with {objective.__name__}.\n"
        "Give a checkpoint of a run with model.objective=RewardModel."
    )
