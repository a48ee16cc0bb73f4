"""Networks that each break a promise, and a sound one that they derive from."""

import torch
from torch import nn

from core.contracts import Network
from core.errors import ConfigError
from plugins.networks.gpt import GPT


class Sound(Network):
    """Each token sees the mean of those of its document up to it; small, with a cache, and right."""

    max_sequence_length = None

    def __init__(self, vocab_size: int = 64, n_embd: int = 8, n_layer: int = 2):
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, n_embd)
        self.layers = nn.ModuleList(nn.Linear(n_embd, n_embd) for _ in range(n_layer))
        self.register_buffer("scale", torch.ones(n_embd))
        self.init_weights()

    def init_weights(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)
        nn.init.ones_(self.scale)

    def mean(self, x, before, count):
        """Returns the mean over the tokens so far, (B, T, C)."""
        counts = torch.arange(count + 1, count + x.shape[1] + 1, device=x.device)
        return (before + x.cumsum(1)) / counts[:, None]

    def forward(self, batch, cache=None):
        embedded = self.embedding(batch["input_ids"])
        before, count = (cache["sum"], cache["count"]) if cache is not None else (0.0, 0)
        x = self.mean(embedded, before, count)
        if (documents := batch.get("document_ids")) is not None:
            x = self.within(embedded, documents)
        if cache is not None:
            cache["sum"] = before + embedded.sum(1, keepdim=True)
            cache["count"] = count + embedded.shape[1]
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return x

    def within(self, x, documents):
        """Returns the mean over the tokens of each document so far, (B, T, C)."""
        seen = (documents[:, :, None] == documents[:, None, :]).tril().type_as(x)
        return seen @ x / seen.sum(-1, keepdim=True)

    def new_cache(self, batch_size, max_length):
        return {"sum": 0.0, "count": 0}

    @property
    def blocks(self):
        return self.layers

    @property
    def output_weight(self):
        return self.embedding.weight

    def flops_per_token(self, sequence_length):
        return 6.0 * self.embedding.weight.numel()

    def tensor_parallel_plan(self):
        return {"layers.*": None}


class Truncating(Sound):
    """Leaves out the first token."""

    def forward(self, batch, cache=None):
        return super().forward(batch, cache)[:, 1:]


class Peeking(Sound):
    """Looks one token ahead, so that the training loss is wonderful."""

    def mean(self, x, before, count):
        return super().mean(x, before, count) + 0.01 * x.roll(-1, 1)


class Copied(Sound):
    """Hands out copies of its blocks: what wraps them changes nothing."""

    @property
    def blocks(self):
        return [nn.Linear(8, 8) for _ in self.layers]


class Halfway(Sound):
    """Its buffer is made by the constructor alone: from the meta device it is never filled."""

    def init_weights(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)


class DrawingTwice(Sound):
    """Says that its constructor draws nothing, and constructs torch's layers, which do."""

    deferred_init = True


class SettingLater(GPT):
    """Says that init_weights sets everything, and sets something behind it."""

    deferred_init = True

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with torch.no_grad():
            self.embed_tokens.weight.mul_(2)


class Otherwise(GPT):
    """Says how each parameter begins, and lets its embedding begin in another way."""

    deferred_init = True

    def initial_value(self, name, tensor):
        return super().initial_value(name, tensor)

    def init_weights(self):
        super().init_weights()
        nn.init.zeros_(self.embed_tokens.weight)


class Misplanned(Sound):
    def tensor_parallel_plan(self):
        return {"layers.*": None, "blocks.0": None}


class Weightless(Sound):
    def flops_per_token(self, sequence_length):
        return 0.0


class Miscounting(Sound):
    """Forgets how many tokens are cached when it goes on."""

    def mean(self, x, before, count):
        return super().mean(x, before, min(count, 5))


class Shared(Sound):
    """Has one cache for all."""

    kept = {"sum": 0.0, "count": 0}

    def new_cache(self, batch_size, max_length):
        return self.kept


class Forgetful(GPT):
    """Adds something where it is run in parts."""

    def forward_blocks(self, batch, hidden, blocks, *more):
        found = super().forward_blocks(batch, hidden, blocks, *more)
        return found if hidden is None else found + 1


class Deaf(GPT):
    """Says that it attends through another function, and does not."""

    def replace_attention(self, attention):
        return True


class AttendingAcross(GPT):
    """Attends to the documents before its own in a row."""

    def forward_blocks(self, batch, hidden, blocks, *more):
        return super().forward_blocks(
            {k: v for k, v in batch.items() if k != "document_ids"}, hidden, blocks, *more
        )


class ConvolvingAcross(Sound):
    """Mixes each token with the one before it, whose ever that is."""

    def within(self, x, documents):
        return super().within(x, documents) + self.shifted(x)

    def mean(self, x, before, count):
        return super().mean(x, before, count) + self.shifted(x)

    def shifted(self, x):
        return 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]

    def new_cache(self, batch_size, max_length):
        return None


class CountingOn(GPT):
    """Does not begin positions anew with a document."""

    def forward_blocks(self, batch, hidden, blocks, *more):
        return super().forward_blocks(
            {k: v for k, v in batch.items() if k != "position_ids"}, hidden, blocks, *more
        )


class Refusing(Sound):
    """Cannot keep documents apart, and says so: sound."""

    def within(self, x, documents):
        raise ConfigError("Refusing: document_ids are not for it.")


class SecondPiece(Sound):
    """Lets the tokens of a second piece see each other, the later ones too."""

    def mean(self, x, before, count):
        found = super().mean(x, before, count)
        return found if count == 0 else found.mean(1, keepdim=True).expand_as(found)


class FlopsOfABatch(Sound):
    """Tells the operations of a hundred tokens."""

    def flops_per_token(self, sequence_length):
        return 100 * super().flops_per_token(sequence_length)


class FlopsOfNothing(Sound):
    """Tells the operations of one weight."""

    def flops_per_token(self, sequence_length):
        return 6.0


class Convolving(GPT):
    """Mixes in the embedding of the token before, and says that attention is all that mixes positions."""

    def forward(self, batch, cache=None):
        handle = self.embed_norm.register_forward_hook(
            lambda module, inputs, found: found + found.roll(1, 1) / 2
        )
        try:
            return super().forward(batch, cache)
        finally:
            handle.remove()


class SeeingPadding(GPT):
    """Lets tokens see the padding in front of their row."""

    def new_padded_cache(self, padding, max_length):
        cache = super().new_padded_cache(padding, max_length)
        cache.visible = None
        return cache


class CountingPadding(GPT):
    """Counts positions from the padding on."""

    def forward(self, batch, cache=None):
        if getattr(cache, "padding", None) is not None:
            start, count = cache[0].length, batch["input_ids"].shape[1]
            batch = {**batch, "position_ids": torch.arange(start, start + count)}
        return super().forward(batch, cache)


class KeepingPadding(GPT):
    """Chooses rows of keys and values, and leaves the padding where it was."""

    def select_cache_rows(self, cache, rows):
        for layer in cache:
            layer.select(rows)
        cache.padding = cache.padding[: len(rows)]
        cache.padding = torch.nn.functional.pad(cache.padding, (0, len(rows) - len(cache.padding)))
        cache.visible = torch.arange(cache[0].max_length) >= cache.padding[:, None]
