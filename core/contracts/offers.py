"""What a strategy, precision, checkpoint format, logger, callback, optimizer or data module may offer.

Each class here is one optional ability: a `typing.Protocol`. A technique that has its methods or attributes offers it;
it need not derive from the class, nor declare anything. Callers ask with `isinstance`, which takes some microseconds:
once, when a run begins or where the host waits anyway, never in each step. Part of `core.contracts`.

Example:
    A callback that measures time, and does not count the time in which others interrupt training::

        class Timer(Callback):
            def pause_clock(self) -> None:
                self._start = None

        assert isinstance(Timer(), PausesClock)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from core.contracts.modules import Network

# -- techniques of every kind ---------------------------------------------------------------------------------


@runtime_checkable
class ChecksRun(Protocol):
    """A class of any kind whose arguments may not fit a run; what never fits, `@technique` declares."""

    @classmethod
    def preflight(cls, run: Any, own: Any) -> Iterable[str]:
        """Yields a line for each problem, called before anything is built or any process is started.

        A line that begins with the name of an argument is shown with the place where that was written.

        Args:
            run: The :class:`toolkit.selection.Run`.
            own: This class's :class:`toolkit.selection.Selected` in it.
        """


# -- strategies: which ranks have which tokens, and where gradients are ---------------------------------------


@runtime_checkable
class HasLossGroup(Protocol):
    """A strategy under which several ranks work on the same tokens, as in tensor or pipeline parallelism.

    Attributes:
        loss_group: The process group (`torch.distributed.ProcessGroup`) of the ranks that have different tokens, set
            once the processes are connected. Losses are summed over it, gradients averaged. A strategy without it:
            all ranks have different tokens.
    """

    loss_group: Any


@runtime_checkable
class NormsGradients(Protocol):
    """A strategy that computes the gradient norm of the model, because no rank holds all gradients."""

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """Returns the 2-norm of all gradients of the model, 0-d, the same on every rank; called on every rank."""


@runtime_checkable
class ClipsGradients(Protocol):
    """A strategy that clips gradients for `trainer.gradient_clip_val`, because no rank holds all of them."""

    def clip_gradients(self, optimizer: Any, clip: float | None = None, algorithm: str | None = None) -> None:
        """Clips the gradients of the model in place; called on every rank.

        Args:
            optimizer: Whose gradients.
            clip: Largest norm or value; None or 0: nothing is clipped.
            algorithm: "norm" (or None) or "value".
        """


@runtime_checkable
class ScalesGradients(Protocol):
    """A strategy that keeps gradients where `parameter.grad` does not show them, such as DeepSpeed ZeRO."""

    def scale_gradients(self, optimizer: Any, factor: Tensor) -> None:
        """Multiplies all gradients of the model by a 0-d factor, in place; called on every rank."""


@runtime_checkable
class RunsAsForward(Protocol):
    """A strategy that gathers weights for the forward pass of the whole module, as FSDP does."""

    def run_as_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the LightningModule by name, with the weights gathered; called on every rank."""


@runtime_checkable
class HasStepContext(Protocol):
    """A strategy that needs a context around forward and backward besides the precision's."""

    def step_context(self) -> Any:
        """Returns a new context manager."""


# -- precision ------------------------------------------------------------------------------------------------


@runtime_checkable
class ScalesLosses(Protocol):
    """A precision with a loss scaler, for gradients in fp16.

    Attributes:
        scaler: A `torch.amp.GradScaler`; None: the loss is not scaled.
    """

    scaler: Any


@runtime_checkable
class ChangesNetwork(Protocol):
    """A precision or callback that changes the network in place once it is built; adapters are such callbacks.

    An objective with parameters makes them here, of the network's size, and leaves the network as it is.
    """

    def change_network(self, network: Network) -> None:
        """Changes the network, before weights are loaded, sharded or given to an optimizer.

        The objective comes first, then the precision, then the callbacks in order; `check` and `generate` call it as
        well, except of an objective. Names of parameters stay. Who does not look at values, and says with
        `toolkit.initial_values.start_added` how what it adds begins, declares `offers=("keeps_weights",)`: under strategies
        that shard, each rank then draws its part of the network.

        Args:
            network: May be on the meta device.
        """


# -- checkpoint formats ---------------------------------------------------------------------------------------


@runtime_checkable
class SavesParts(Protocol):
    """A `CheckpointIO` to which each rank hands what it holds, instead of gathering everything on rank 0."""

    def save_parts(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Writes a checkpoint whose sharded tensors are DTensors; called on every rank."""


@runtime_checkable
class ReadsParts(Protocol):
    """A `CheckpointIO` from which each rank reads what it holds of a sharded checkpoint, instead of all of it."""

    def read_parts(self, path: Any) -> dict[str, Any] | None:
        """Returns a sharded checkpoint with stored tensors for those of `state_dict` and `optimizer_states`; on every rank.

        In the states of callbacks those that were sharded are stored ones. A stored tensor has the `shape` of the full tensor and its `dtype`; it has not been read. None: the checkpoint is
        not sharded.

        Raises:
            ConfigError: On every rank, if the checkpoint is not complete or is damaged.
        """

    def fill(self, pairs: Iterable[tuple[Any, Tensor]]) -> None:
        """Reads stored tensors of one checkpoint, without communication between ranks.

        Args:
            pairs: Each stored tensor with a tensor of its full shape to read it into; of a DTensor this rank's shard is
                read.
        """


@runtime_checkable
class ConnectsRanks(Protocol):
    """A `CheckpointIO` that needs process groups of its own."""

    def connect(self) -> None:
        """Called on every rank, once the processes are connected."""


@runtime_checkable
class WaitsForDisk(Protocol):
    """A `CheckpointIO` that writes in the background."""

    def wait(self) -> None:
        """Returns once everything is on the disk; raises what went wrong while it was written."""


@runtime_checkable
class MeasuresStall(Protocol):
    """A `CheckpointIO` that says how long it interrupts training, logged as `checkpoint/stall_s`.

    Attributes:
        stall_s: Seconds for which the last checkpoint interrupted training.
    """

    stall_s: float


# -- loggers and callbacks ------------------------------------------------------------------------------------


@runtime_checkable
class GoesBack(Protocol):
    """A logger that can forget steps."""

    def go_back(self, step: int) -> None:
        """Forgets what was logged after an optimizer step: training goes back to it, later steps come again."""


@runtime_checkable
class SavesBySteps(Protocol):
    """A checkpoint callback that saves at multiples of a number of optimizer steps.

    Attributes:
        every_n_steps: Optimizer steps from one checkpoint to the next.
    """

    every_n_steps: int


@runtime_checkable
class KnowsCheckpoints(Protocol):
    """A checkpoint callback that says which checkpoints there are.

    Attributes:
        last_model_path: Path of the newest; empty: none was saved.
        best_model_path: Path of the best; empty: none was saved.
    """

    last_model_path: str
    best_model_path: str


@runtime_checkable
class PausesClock(Protocol):
    """A callback that measures time."""

    def pause_clock(self) -> None:
        """Leaves out the time until the next batch: another callback does something that is no training."""


# -- optimizers -----------------------------------------------------------------------------------------------


@runtime_checkable
class BindsToLength(Protocol):
    """An optimizer that depends on the length of the run."""

    def bind(self, total_steps: int) -> None:
        """Called once with the number of optimizer steps of the run, before the first one, where that is known."""


@runtime_checkable
class HasGroupState(Protocol):
    """An optimizer that keeps state in `param_groups`, beside its settings.

    Attributes:
        group_state: Those keys, a class attribute. A resumed run takes them from the checkpoint; of all other keys
            what the user wrote counts.
    """

    group_state: Sequence[str]


@runtime_checkable
class AveragesWeights(Protocol):
    """An optimizer whose result is an average of the weights that it trains, such as schedule-free ones."""

    def eval(self) -> None:
        """Puts the average into the parameters, for validation and checkpoints."""

    def train(self) -> None:
        """Puts back the weights that are trained."""


@runtime_checkable
class KnowsItsWeights(AveragesWeights, Protocol):
    """An averaging optimizer that says which weights are in the parameters, and puts back every bit of them.

    Attributes:
        in_training: Whether the parameters are the weights that are trained, not their average.
    """

    in_training: bool


# -- data modules ---------------------------------------------------------------------------------------------


@runtime_checkable
class CountsEpochs(Protocol):
    """A data module that knows how often each of its sources has been read, logged as `epoch/NAME`."""

    def epochs(self) -> Mapping[str, float]:
        """Returns name of the source -> epochs so far."""


@runtime_checkable
class SkipsBatches(Protocol):
    """A data module whose coming training batches can be left out in the middle of a run."""

    def skip_batches(self, batches: int) -> None:
        """Leaves out so many micro-batches of each rank; called on every rank."""


@runtime_checkable
class HasVocabulary(Protocol):
    """A data module, or a tokenizer of one, that knows its vocabulary; a network must have as many token ids.

    Attributes:
        vocab_size: Number of token ids; 0: not known yet.
    """

    vocab_size: int


@runtime_checkable
class HasRows(Protocol):
    """A data module of rows of one length; a network must accept them.

    Attributes:
        sequence_length: Tokens in a row.
    """

    sequence_length: int


@runtime_checkable
class EncodesText(Protocol):
    """A data module that makes its tokens from text.

    Attributes:
        tokenizer: The :class:`core.contracts.Tokenizer`; may offer `HasVocabulary` before `setup`.
    """

    tokenizer: Any


@runtime_checkable
class HasTokenizer(Protocol):
    """A data module of text, after `setup`.

    Attributes:
        tokenizer_json: The tokenizer, for `tokenizers.Tokenizer.from_str`.
    """

    tokenizer_json: str


@runtime_checkable
class MarksEndOfText(Protocol):
    """A data module whose documents end with a token of their own, after `setup`.

    Attributes:
        end_of_text_id: Its id.
    """

    end_of_text_id: int


@runtime_checkable
class HasUnigramLoss(Protocol):
    """A data module that knows how well token frequencies alone predict its validation text, after `setup`.

    Attributes:
        unigram_loss: Nats per validation token, under the training tokens' frequencies.
    """

    unigram_loss: float


__all__ = [n for n, kind in globals().items() if n[0] != "_" and getattr(kind, "__module__", "") == __name__]
