"""A strategy for leyden that shards parameters over ranks."""
