"""Techniques that each break one promise, so that it can be seen that the kit notices."""
