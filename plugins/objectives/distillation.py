"""Distillation: a network learns the next-token probabilities of a larger one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError, nearest
from core.technique import technique
from core.training.shards import full_tensor
from plugins.objectives.answers import check_above_0, check_at_least
from toolkit.aligned_logits import logits_of
from toolkit.frozen_networks import FrozenNetwork
from toolkit.initial_values import initial_values, named
from toolkit.log_probabilities import CHUNK_TOKENS
from toolkit.token_ids import other_ids

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

SAME_TOKENIZER = (
    "Set --data.tokenizer=PretrainedTokenizer and --data.tokenizer.path=FOLDER/tokenizer.json, with the folder of the teacher, "
    "or the one that `export` writes of it."
)
DIVERGENCES = ("forward", "reverse", "jensen_shannon")


@technique(
    paper="Hinton et al., arXiv:1503.02531, section 2; reverse: MiniLLM, arXiv:2306.08543; Jensen-Shannon: GKD, "
    "arXiv:2306.13649, equation 1 with beta 0.5",
)
class Distillation(Objective):
    """Trains a network to predict what a frozen teacher network predicts at each token that has a label.

    With p the teacher's probabilities of the next token and q the network's, both of logits divided by `temperature`, the
    loss of a token is (1 - label_weight) temperature^2 D(p, q) + label_weight times its cross-entropy with the label at
    temperature 1. D, in nats, is

    - `forward`: KL(p || q), which covers all that the teacher may say;
    - `reverse`: KL(q || p), which keeps to what the teacher is likely to say;
    - `jensen_shannon`: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2.

    Logged are `divergence`, D, and `cross_entropy`. Validation has the cross-entropy alone, comparable with other objectives.
    The teacher is read again by a run that resumes: it is not part of checkpoints. It has no gradients, no optimizer state and no
    activations that are kept. Where the strategy shards the network's weights over ranks with different rows, it shards the
    teacher's, too: a rank keeps 1/n of it, in the data type in which weights are gathered, and gathers one block at a time, and
    for the length of a step embedding and head. Otherwise each rank has all of it: on the device what its parameters take, in
    float32 4 bytes each, and in CPU memory, as it is read in the first step, the same once or twice. It needs the tokenizer of
    the data: before a run it is compared with the one that the teacher has with it.

    Args:
        teacher: A checkpoint, a run folder (its newest checkpoint), or a Hugging Face folder.
        divergence: forward, reverse or jensen_shannon.
        temperature: Divides the logits of both, above 0; 1 to 20 in Hinton et al.
        label_weight: Weight of the labels, from 0 to 1; 1 is `CausalLM`.
        chunk_tokens: Positions whose logits are computed at a time.

    Raises:
        ConfigError: If a value is out of range, there is no such teacher, or it has another tokenizer than the data.

    Example:
        model:
          objective:
            class_path: Distillation
            init_args: {teacher: runs/large, temperature: 2.0, label_weight: 0.1}
    """

    def __init__(
        self,
        teacher: str,
        divergence: str = "forward",
        temperature: float = 1.0,
        label_weight: float = 0.0,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        if divergence not in DIVERGENCES:
            raise ConfigError(
                f"Distillation: divergence is {divergence!r}; it is one of {', '.join(DIVERGENCES)}."
                f"{nearest(divergence, DIVERGENCES)}"
            )
        check_above_0("Distillation", temperature=temperature)
        check_at_least("Distillation", 1, chunk_tokens=chunk_tokens)
        if not 0 <= label_weight <= 1:
            raise ConfigError(f"Distillation takes label_weight from 0 to 1, not {label_weight}.")
        self.path = Path(teacher).expanduser()
        self.divergence, self.temperature, self.label_weight = divergence, temperature, label_weight
        self.chunk_tokens = chunk_tokens
        self._teacher: list[Network] = []  # no submodule: neither trained nor saved
        self._sharded = False

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error where a strategy takes rows or network apart, and for a teacher that is not there."""
        teacher = own.arguments.get("teacher") or ""
        if not run.offline and not Path(teacher).expanduser().exists():
            yield f"teacher is {teacher}: there is no such file or folder"
        for name in ("pipeline", "context"):
            if any((item.arguments.get(name) or 1) > 1 for item in run.selected):
                yield f"Distillation needs whole rows, and both networks on each rank: set {name} to 1"

    def check_tokenizer(self, tokenizer_json: str) -> None:
        """Compares the tokenizer of the data with that of the teacher; see `toolkit.token_ids`."""
        from plugins.checkpoints.initial_weights import tokenizer_of

        check_exists(self.path)
        text = tokenizer_of(self.path)
        try:
            other = text and other_ids(tokenizer_json, text)
        except ValueError as error:
            raise ConfigError(
                f"Distillation: the teacher in {self.path} has a damaged tokenizer: {error}."
            ) from error
        if other:
            raise ConfigError(
                f"Distillation: the teacher in {self.path} has another tokenizer than the data: {other}.\n{SAME_TOKENIZER}"
            )

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of label tokens, and its terms."""
        labels = batch["labels"]
        tokens = (labels != IGNORED_LABEL).sum()
        hidden = network(batch)
        taught = hidden.new_empty(hidden.shape[:2])
        logits_from, expected_from = logits_of(network, hidden), None
        if self.training:
            teacher = self.teacher(network, hidden.device)
            with torch.no_grad():
                taught = teacher(batch)
                expected_from = logits_of(teacher, taught)

        def sums(hidden: Tensor, taught: Tensor, labels: Tensor) -> Tensor:
            logits = _wide(logits_from(hidden))
            found = [F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")]
            if expected_from is not None:
                with torch.no_grad():
                    expected = _wide(expected_from(taught))
                each = divergences(logits, expected, self.divergence, self.temperature)
                found.append(each.where(labels != IGNORED_LABEL, 0.0).sum())
            return torch.stack(found)

        flat = hidden.flatten(0, 1), taught.flatten(0, 1), labels.flatten()
        chunks = zip(*(part.split(self.chunk_tokens) for part in flat), strict=True)
        total = torch.stack(
            [checkpoint(sums, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        ).sum(0)
        if expected_from is None:
            return TokenSum(total[0], tokens), {}
        weight = self.label_weight
        loss = weight * total[0] + (1 - weight) * self.temperature**2 * total[1]
        figures = zip(("cross_entropy", "divergence"), total.detach().unbind(), strict=True)
        return TokenSum(loss, tokens), {name: TokenSum(value, tokens) for name, value in figures}

    def teacher(self, network: Network, device: torch.device) -> Network:
        """Returns the teacher in eval mode on a device; it is read when it is first asked for.

        Raises:
            ConfigError: If it cannot be read, or has another number of token ids than the network.
        """
        if not self._teacher:
            with torch.random.fork_rng(
                devices=[]
            ):  # in the middle of a step, whose random numbers stay the same
                self._keep(load_teacher(self.path), network)
        [teacher] = self._teacher
        return teacher if self._sharded else teacher.to(device)

    def frozen_network(self, network: Network) -> FrozenNetwork:
        """Returns the teacher for a strategy that shards it; see `toolkit.frozen_networks`. Raises as :meth:`teacher` does."""
        with torch.random.fork_rng(devices=[]):
            found = open_teacher(self.path)
        self._keep(found.network, network)
        self._sharded = True
        return found

    def _keep(self, found: Network, network: Network) -> None:
        if found.vocab_size != network.vocab_size:
            raise ConfigError(
                f"Distillation: the teacher in {self.path} has {found.vocab_size:,} token ids, the network "
                f"{network.vocab_size:,}: both need the tokenizer of the data.\n{SAME_TOKENIZER} Set "
                f"--model.network.vocab_size={found.vocab_size}."
            )
        self._teacher = [found.eval().requires_grad_(False)]


def divergences(logits: Tensor, expected: Tensor, kind: str, temperature: float) -> Tensor:
    """Returns the divergence of next-token probabilities at each position, (N,), in nats.

    Args:
        logits: Of the network that is trained, (N, V).
        expected: Of its teacher, (N, V).
        kind: One of `DIVERGENCES`.
        temperature: Divides both.
    """
    q, p = (F.log_softmax(each / temperature, dim=-1) for each in (logits, expected))
    if kind == "forward":
        return _kl(p, q)
    if kind == "reverse":
        return _kl(q, p)
    m = torch.logaddexp(p, q) - torch.log(torch.tensor(2.0, dtype=p.dtype, device=p.device))
    return (_kl(p, m) + _kl(q, m)) / 2


def check_exists(path: Path) -> None:
    """Raises a ConfigError if there is no teacher in a place."""
    if not path.exists():
        raise ConfigError(f"Distillation: teacher is {path}: there is no such file or folder.")


def load_teacher(path: Path) -> Network:
    """Returns the network of a checkpoint, a run folder or a Hugging Face folder, on the CPU.

    Raises:
        ConfigError: If it cannot be read.
    """
    check_exists(path)
    from plugins.checkpoints.finding import resolve
    from plugins.checkpoints.foreign import is_foreign, open_foreign
    from plugins.checkpoints.hf_folder import network_config
    from plugins.checkpoints.initial_weights import InitialWeights
    from plugins.checkpoints.stored_network import build_network, load_without_tokenizer

    if not is_foreign(path):
        return load_without_tokenizer(resolve(str(path), path))
    network: Network = build_network(network_config(open_foreign(path)))
    InitialWeights(str(path)).change_network(network)
    return network


def open_teacher(path: Path) -> FrozenNetwork:
    """Returns the network on the meta device, with its tensors as they are in the files, or, if it does not say how it begins, whole.

    Raises:
        ConfigError: As :func:`load_teacher`, or if the files have not what the network has.
    """
    check_exists(path)
    from plugins.checkpoints.checkpoint import stored_config
    from plugins.checkpoints.finding import resolve
    from plugins.checkpoints.foreign import is_foreign, open_foreign
    from plugins.checkpoints.hf_folder import network_config
    from plugins.checkpoints.initial_weights import InitialWeights
    from plugins.checkpoints.stored_network import build_network

    if is_foreign(path):
        config = network_config(open_foreign(path))
    else:
        config = stored_config(resolve(str(path), path))["model"]["network"]
    with torch.device("meta"):
        network: Network = build_network(config)
    starts = initial_values(network)
    if starts is None:
        return FrozenNetwork(network, {name: tensor.detach() for name, tensor in named(load_teacher(path))})
    return FrozenNetwork(network, starts | InitialWeights(str(path)).tensors(network))


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Returns KL(p || q) of log-probabilities, (N,)."""
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def _wide(logits: Tensor) -> Tensor:
    logits = full_tensor(logits)  # with a head that is sharded along the vocabulary: those of a chunk
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
