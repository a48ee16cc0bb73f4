"""Five techniques for leyden, each broken in its own way; the module of Unwritten is missing."""
