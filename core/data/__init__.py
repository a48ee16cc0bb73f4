"""Data modules of stored tokens, and their loader, which keeps its position."""
