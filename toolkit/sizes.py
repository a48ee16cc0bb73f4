"""Sizes in messages, in the unit that fits."""

from __future__ import annotations


def readable(size: float, binary: bool = False) -> str:
    """Returns a number of bytes with three digits at least: "512 bytes", "1.23 kB", "64.0 MB", "1,234 TB".

    Args:
        size: Bytes; at least 0.
        binary: Whether units are powers of 1,024 (KiB, MiB, ...), as for memory, or of 1,000 (kB, MB, ...).
    """
    base, units = (1024, ("KiB", "MiB", "GiB", "TiB")) if binary else (1000, ("kB", "MB", "GB", "TB"))
    if size < base:
        return f"{size:,.0f} byte{'' if round(size) == 1 else 's'}"
    value, unit = size / base, 0
    while value >= base * 0.9995 and unit + 1 < len(units):
        value, unit = value / base, unit + 1
    digits = max(0, 2 - len(str(int(value * 1.0005))) + 1)
    return f"{value:,.{digits}f} {units[unit]}"
