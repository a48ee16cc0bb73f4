"""What `generate` computes and writes: one text token by token, or the JSON lines of many."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core import durable
from core.errors import ConfigError
from plugins.commands.generate_network import Loaded
from toolkit.generation.beam_search import beam_search
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling
from toolkit.generation.texts import TextStream, texts


@dataclass(frozen=True)
class Job:
    """What is generated: prompts as texts and token ids, and with what.

    Attributes:
        networks: Name of an adapter -> network with it.
        adapters: Of each prompt; empty: none has one.
    """

    options: argparse.Namespace
    network: Any
    tokenizer: Any
    stops: Sequence[str]
    stop_ids: Sequence[int]
    texts: Sequence[str]
    prompts: Sequence[Sequence[int]]
    networks: Mapping[str, Any] = field(default_factory=dict)
    adapters: Sequence[str | None] = ()

    def adapter_of(self, prompt: int) -> str | None:
        """Returns the name of the adapter that continues a prompt; None: the network has none."""
        return self.adapters[prompt] if self.adapters else None

    def named(self, prompt: int) -> dict[str, str]:
        """Returns what the record of a prompt says of its adapter."""
        adapter = self.adapter_of(prompt)
        return {} if adapter is None else {"adapter": adapter}

    def network_of(self, which: Sequence[int]) -> Any:
        """Returns the network that continues some prompts, all of one adapter."""
        return self.networks.get(self.adapter_of(which[0]) or "", self.network)

    def decoding(self, which: Sequence[int]) -> tuple[Any, list[Any], list[int]]:
        """Returns the loop over some prompts, and for each of its rows the stream of its text and its seed."""
        options, number = self.options, self.options.n
        seeds = [options.seed + prompt * number + sample for prompt in which for sample in range(number)]
        filters = options.top_k, options.top_p, options.min_p, options.repetition_penalty
        decoding = Decoding(
            self.network_of(which),
            [self.prompts[prompt] for prompt in which],
            max_new_tokens=options.max_new_tokens,
            sampling=Sampling(options.temperature, *filters),
            seeds=seeds,
            samples=number,
            stop_ids=self.stop_ids,
            log_probabilities=options.logprobs,
        )
        rows = [prompt for prompt in which for _ in range(number)]
        streams = [TextStream(self.tokenizer, self.prompts[row][-8:], self.stops) for row in rows]
        return decoding, streams, seeds

    def batches(self) -> Iterator[list[int]]:
        """Yields indexes of prompts, those of similar length together: what is shorter is padded."""
        size = max(1, self.options.batch_size // max(self.options.n, self.options.num_beams))
        for adapter in dict.fromkeys(map(self.adapter_of, range(len(self.prompts)))):
            own = [index for index in range(len(self.prompts)) if self.adapter_of(index) == adapter]
            order = sorted(own, key=lambda index: len(self.prompts[index]))
            yield from (order[start : start + size] for start in range(0, len(order), size))


def print_text(job: Job) -> int:
    """Prints prompt and continuation token by token; returns how many tokens there were."""
    decoding, [stream], _ = job.decoding([0])
    sys.stdout.write(job.texts[0])
    count = 0
    for token in decoding:
        sys.stdout.write(stream.add(token.id))
        sys.stdout.flush()
        count += 1
        if stream.stopped:
            decoding.finish(token.row)
    sys.stdout.write(stream.end())
    sys.stdout.flush()
    print(file=sys.stderr)
    return count


def write_lines(job: Job) -> int:
    """Writes the JSON lines of all prompts in their order, or the one text of a beam search; returns the tokens."""
    found: dict[int, list[dict[str, Any]]] = {}
    for which in job.batches():
        found |= _beams(job, which) if job.options.num_beams > 1 else _samples(job, which)
        if len(job.prompts) > 1:
            print(f"# {len(found)} of {len(job.prompts)} prompts", file=sys.stderr)
    records = [record for index in sorted(found) for record in found[index]]
    if not job.options.as_lines:
        print(job.texts[0] + records[0]["text"])
    else:
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        if job.options.output is None:
            sys.stdout.write(lines)
        else:
            try:
                durable.write(Path(job.options.output), lines)
            except OSError as error:
                raise ConfigError(f"--output {job.options.output}: {durable.write_error(error)}") from error
    return sum(len(record["ids"]) for record in records)


def _samples(job: Job, which: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Returns the records of some prompts."""
    decoding, streams, seeds = job.decoding(which)
    drawn: list[list[Any]] = [[] for _ in streams]
    for token in decoding:
        drawn[token.row].append(token)
        streams[token.row].add(token.id)
        if streams[token.row].stopped:
            decoding.finish(token.row)
    found: dict[int, list[dict[str, Any]]] = {}
    for row, (tokens, stream) in enumerate(zip(drawn, streams, strict=True)):
        stream.end()
        index = which[row // job.options.n]
        whole = len(tokens) == job.options.max_new_tokens and not stream.stopped
        record = {
            **job.named(index),
            "prompt": job.texts[index],
            "text": stream.text,
            "ids": [token.id for token in tokens],
            "finish_reason": "length" if whole else "stop",
            "seed": seeds[row],
        }
        if job.options.logprobs:
            record["logprobs"] = [token.log_probability for token in tokens]
        found.setdefault(index, []).append(record)
    return found


def _beams(job: Job, which: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Returns the records of some prompts by beam search: the best `n` of each."""
    options = job.options
    searched = beam_search(
        job.network_of(which),
        [job.prompts[index] for index in which],
        max_new_tokens=options.max_new_tokens,
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
        repetition_penalty=options.repetition_penalty,
        stop_ids=job.stop_ids,
    )
    return {
        index: [
            {
                **job.named(index),
                "prompt": job.texts[index],
                "text": "".join(texts(job.tokenizer, one.ids, job.prompts[index][-8:])),
                "ids": one.ids,
                "finish_reason": "length" if len(one.ids) == options.max_new_tokens else "stop",
                "score": one.score,
            }
            for one in hypotheses[: options.n]
        ]
        for index, hypotheses in zip(which, searched, strict=True)
    }


def encode(model: Loaded, prompts: Sequence[str], special_tokens: bool) -> list[list[int]]:
    """Returns the token ids of prompts; an empty one becomes what a text begins behind: BOS, or the end-of-text token.

    Raises:
        ConfigError: If one has no tokens and there is no such token, or has more than the network sees.
    """
    found, longest = model.encoder.encode_prompts(prompts, special_tokens), model.network.max_sequence_length
    begin = [] if model.end is None else [model.end]
    for number, ids in enumerate(found):
        if not ids and not begin:
            raise ConfigError(
                "The prompt is empty, and the checkpoint's tokenizer has no end-of-text token to begin with."
            )
        found[number] = ids = ids or begin
        if longest is not None and len(ids) > longest:
            raise ConfigError(
                f"Prompt {number + 1} has {len(ids):,} tokens, the network sees {longest:,} at most "
                f"(max_sequence_length): {prompts[number][:40]!r}..."
            )
    return found
