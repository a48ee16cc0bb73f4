"""What the conformance kit cannot know: a table to read."""

from pathlib import Path

from conformance import Case

TABLE = Path(__file__).with_name("articles.csv")


def pytest_leyden_cases():
    """Returns the cases that differ from the docstrings' examples."""
    return [Case("CsvDocuments", {"column": "body"}, config={"data": {"init_args": {"source": str(TABLE)}}})]
