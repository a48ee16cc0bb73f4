"""Intervals of time: what they have in common, how long they are together. Imports no torch."""

from __future__ import annotations

__all__ = ["Interval", "common", "length", "union"]

Interval = tuple[float, float]
"""Begin and end."""


def union(intervals: list[Interval]) -> list[Interval]:
    """Returns the same points as intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > begin:
            found.append((begin, end))
    return found


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Returns the points that are in both of two lists, each as `union` returns it."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: list[Interval]) -> float:
    """Returns the sum of the lengths."""
    return sum(end - begin for begin, end in intervals)
