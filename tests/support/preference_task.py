"""A task of preferences that a small network learns in seconds: of two answers of 8 letters the one with more a's is better.

The network first learns to answer with letters at random. Its win rate is how often an answer of it is better than one of
the network before, ties counting half: 0.5 for the network itself.
"""

import numpy as np
import torch
from tokenizers import Tokenizer

from callbacks.reference_log_probabilities import ReferenceLogProbabilities
from datamodules.instruction_datamodule import InstructionDataModule
from datamodules.preference_datamodule import PreferenceDataModule
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.kto import KTO
from plugins.objectives.reward_model import RewardModel
from tests.support.chat_checkpoint import bytes_tokenizer
from tests.support.records import build
from tests.support.tiny_training import module, tiny_gpt, trainer
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling
from toolkit.log_probabilities import log_probabilities

LETTERS, LENGTH, MOST, RECORDS = "ab", 8, 16, 600


def goodness(text):
    """Returns how good an answer is."""
    return text.count(LETTERS[0])


def base(folder, seed, steps=200):
    """Returns the weights of a network that answers with letters at random."""
    random = np.random.default_rng(seed)
    records = [{"prompt": f"{n:03}:", "completion": _random(random)} for n in range(RECORDS)]
    data = _data(InstructionDataModule, folder / "base", records, batch_size=8)
    torch.manual_seed(seed)
    return _trained(data, CausalLM(), None, steps, lr=1e-2).network.state_dict()


def preferring(folder, seed, objective, weights, steps=100, lr=1e-3):
    """Returns the weights after training on preferences, from others."""
    callbacks = [ReferenceLogProbabilities()]
    return _preferring(folder, seed, objective, weights, steps, lr, callbacks).network.state_dict()


def ordered(folder, seed, weights, steps=200, lr=3e-3, count=500):
    """Returns how many of so many new pairs a reward model orders right that begins as a network."""
    trained = _preferring(folder, seed, RewardModel(), weights, steps, lr).eval()
    encode = Tokenizer.from_str(bytes_tokenizer()).encode
    rows = [
        [*encode(f"{RECORDS + n % 400}:{text}", add_special_tokens=False).ids, 0]
        for n, pair in enumerate(_pairs(np.random.default_rng(200 + seed), count))
        for text in pair[1:]
    ]
    worse, better = trained.objective.score(trained.network, rows).view(-1, 2).unbind(1)
    return float((better > worse).float().mean())


def _pairs(random, count):
    """Yields number, worse and better answer of random pairs, without equally good ones."""
    for number in range(count):
        worse, better = sorted((_random(random), _random(random)), key=goodness)
        if goodness(worse) != goodness(better):
            yield number, worse, better


def _preferring(folder, seed, objective, weights, steps, lr, callbacks=()):
    records = []
    for number, worse, better in _pairs(np.random.default_rng(100 + seed), RECORDS):
        if isinstance(objective, KTO):
            for text in (better, worse):
                records.append({"prompt": f"{number:03}:", "completion": text, "label": text is better})
        else:
            records.append({"prompt": f"{number:03}:", "chosen": better, "rejected": worse})
    options = {"paired": not isinstance(objective, KTO), "batch_size": 16}
    data = _data(PreferenceDataModule, folder / type(objective).__name__, records, **options)
    return _trained(data, objective, weights, steps, lr, callbacks)


def compared(before, after, seed, count=200):
    """Returns the win rate of the second weights, and their divergence from the first, in nats for each token."""
    old, new = (_answers(weights, count, 10_000 * seed + at) for at, weights in ((0, before), (5_000, after)))
    decode = Tokenizer.from_str(bytes_tokenizer()).decode
    wins = [
        np.sign(goodness(decode(one)) - goodness(decode(other))) / 2 + 0.5
        for one, other in zip(new, old, strict=True)
    ]
    ids = _prompts(count)
    rows = [prompt + answer + [0] * (len(answer) < MOST) for prompt, answer in zip(ids, new, strict=True)]
    tokens = torch.zeros(count, max(map(len, rows)), dtype=torch.long)
    labels = torch.full((count, tokens.shape[1] - 1), -100)
    for line, (row, prompt) in enumerate(zip(rows, ids, strict=True)):
        tokens[line, : len(row)] = torch.tensor(row)
        labels[line, len(prompt) - 1 : len(row) - 1] = torch.tensor(row[len(prompt) :])
    batch = {"input_ids": tokens[:, :-1], "labels": labels}
    with torch.no_grad():
        moved, still = (log_probabilities(_network(weights).eval(), batch) for weights in (after, before))
    return float(np.mean(wins)), float((moved - still).sum() / (labels >= 0).sum())


def _random(random):
    return "".join(random.choice(list(LETTERS), LENGTH))


def _data(kind, folder, records, **options):
    folder.mkdir(parents=True, exist_ok=True)
    return build(kind, folder, records, template="plain", sequence_length=32, **options)


def _network(weights=None):
    network = tiny_gpt(vocab_size=300, max_sequence_length=32)
    if weights is not None:
        network.load_state_dict(weights)
    return network


def _trained(data, objective, weights, steps, lr, callbacks=()):
    made = module(
        lambda: _network(weights),
        objective=objective,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=lr, weight_decay=0.0),
    )
    options = {"max_steps": steps, "limit_val_batches": 0, "log_every_n_steps": steps}
    trainer(data.cache_dir, callbacks=list(callbacks), **options).fit(made, datamodule=data)
    return made


def _prompts(count):
    encode = Tokenizer.from_str(bytes_tokenizer()).encode
    return [encode(f"{n}:", add_special_tokens=False).ids for n in range(RECORDS, RECORDS + count)]


def _answers(weights, count, seed):
    found = [[] for _ in range(count)]
    options = {"max_new_tokens": MOST, "sampling": Sampling(), "stop_ids": [0]}
    for token in Decoding(_network(weights), _prompts(count), seeds=range(seed, seed + count), **options):
        found[token.row].append(token.id)
    return found
