"""Data with more tokens than the tiny network knows, which no argument shows: before it is prepared, or after."""

from tests.support.toy import ToyData

TOKENS = 100


class Known(ToyData):
    """Knows its vocabulary when it is constructed."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size: int | None = TOKENS

    def prepare_data(self) -> None:
        """Says that it was called."""
        print("PREPARED")


class Late(Known):
    """Knows its vocabulary once it is prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = None

    def setup(self, stage: str | None = None) -> None:
        """Reads what was prepared."""
        self.vocab_size = TOKENS
