"""Data stages that leave an option out of their fingerprint, and sound ones that they derive from."""

from core import catalog
from tests.conformance.broken.data import BPE, Untouched

JSONLINES = catalog.find("JSONLinesDocuments", "data").load()


class Long(Untouched):
    """Drops documents that are longer than `most`; sound, those below leave an option out of their fingerprint.

    Example:
        data: {init_args: {transforms: [{class_path: Long}]}}
    """

    def __init__(self, most: int = 100_000):
        self.most = most

    def fingerprint(self):
        return {"most": self.most}

    def keeps(self, number, text):
        return len(text) <= self.most


class LongUntold(Long):
    """Does not tell a limit that no document of the usual ones reaches.

    Example:
        data: {init_args: {transforms: [{class_path: LongUntold}]}}
    """

    def fingerprint(self):
        return {}


class Containing(Untouched):
    """Does not tell the text that documents are dropped for.

    Example:
        data: {init_args: {transforms: [{class_path: Containing}]}}
    """

    def __init__(self, without: str | None = None):
        self.without = without

    def keeps(self, number, text):
        return self.without is None or self.without not in text


class Shouting(Untouched):
    """Does not tell the share of capitals that it allows.

    Example:
        data: {init_args: {transforms: [{class_path: Shouting}]}}
    """

    def __init__(self, capitals: float = 1.0):
        self.capitals = capitals

    def keeps(self, number, text):
        return sum(map(str.isupper, text)) <= self.capitals * len(text)


class Lower(BPE):
    """Does not tell that it writes all in small letters.

    Example:
        data: {init_args: {tokenizer: Lower}}
    """

    def __init__(self, vocab_size: int = 300, lower: bool = False):
        super().__init__(vocab_size)
        self.lower = lower

    def encode_batch(self, texts):
        return super().encode_batch([text.lower() if self.lower else text for text in texts])


class Field(JSONLINES):
    """A reader that does not tell the field among its options.

    Example:
        data: {init_args: {reader: Field}}
    """

    def options(self):
        return {}

    def fingerprint(self):
        return {**super().fingerprint(), "text_field": self.text_field, "source_field": self.source_field}


class FieldUntold(JSONLINES):
    """A reader that tells the field nowhere.

    Example:
        data: {init_args: {reader: FieldUntold}}
    """

    def options(self):
        return {}
