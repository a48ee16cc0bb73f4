"""What two answers have in common: their prompt, given or found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from datamodules.records.chats import Messages, WrongRecord, checked_messages, field

TURN = re.compile(r"\n\n(Human|Assistant):")
"""What begins a turn in hh-rlhf."""

ROLES = {"Human": "user", "Assistant": "assistant"}


def split_prompt(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns prompt, chosen and rejected of a pair, each a text or a list of messages.

    Raises:
        WrongRecord: If one is missing, or both answers are the same.
    """
    kind = list if isinstance(record.get("chosen"), list) else str
    chosen, rejected = field(record, "chosen", kind), field(record, "rejected", kind)
    if chosen == rejected:
        raise WrongRecord("chosen and rejected are the same")
    if kind is list:
        return _of_messages(record)
    if record.get("prompt") is not None:
        return {"prompt": record["prompt"], "chosen": chosen, "rejected": rejected}
    return _of_texts(chosen, rejected)


def _of_messages(record: Mapping[str, Any]) -> dict[str, Any]:
    chosen, rejected = checked_messages(record, "chosen"), checked_messages(record, "rejected")
    if isinstance(record.get("prompt"), list):
        return {"prompt": checked_messages(record, "prompt"), "chosen": chosen, "rejected": rejected}
    if record.get("prompt") is not None and chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt: Messages = [{"role": "user", "content": field(record, "prompt")}]
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    pairs = zip(
        chosen, rejected, strict=False
    )  # whole dialogues, also where the prompt is given again as a text
    common = next(
        (n for n, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected))
    )
    if not common:
        raise WrongRecord("chosen and rejected have no prompt in common", 'give it in the field "prompt"')
    return {"prompt": chosen[:common], "chosen": chosen[common:], "rejected": rejected[common:]}


def _of_texts(chosen: str, rejected: str) -> dict[str, str]:
    """Returns the parts of two dialogues: the prompt is all up to the last answer, with `Assistant:`."""
    turns = list(TURN.finditer(chosen))
    if not turns or turns[-1][1] != "Assistant" or turns[0].start():
        raise WrongRecord(
            'the object has no field "prompt"',
            'and chosen is no dialogue of "Human:" and "Assistant:" that ends with an answer',
        )
    prompt = chosen[: turns[-1].end()]
    if not rejected.startswith(prompt) or TURN.search(rejected, len(prompt)):
        raise WrongRecord(
            "chosen and rejected differ before the last answer", f"chosen has {prompt[-60:]!r} there"
        )
    return {"prompt": prompt, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :]}


def is_dialogue(prompt: Any) -> bool:
    """Returns whether a prompt is a dialogue of `Human:` and `Assistant:`, as hh-rlhf has it."""
    return isinstance(prompt, str) and TURN.match(prompt) is not None and prompt.endswith("\n\nAssistant:")


def dialogue(prompt: str) -> Messages:
    """Returns the messages of such a prompt."""
    _, *parts = TURN.split(prompt.removesuffix("\n\nAssistant:"))
    return [
        {"role": ROLES[who], "content": text.strip()}
        for who, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def last_turn(answer: str) -> Messages:
    """Returns the message of the answer to such a prompt."""
    return [{"role": "assistant", "content": answer.strip()}]
