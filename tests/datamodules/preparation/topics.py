"""A quarter of a megabyte of English: the first topics of Python's `help()`, the best part of the built-in text."""

from pydoc_data.topics import topics

TOPICS = tuple(topics[name] for name in sorted(topics)[:60] if topics[name])
