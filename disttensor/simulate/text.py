"""Formats figures for people."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines of columns: the first aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def amount(nbytes: float) -> str:
    """Formats bytes with a unit: powers of 1024."""
    if abs(nbytes) < 1024:
        return f"{nbytes:,.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:,.2f} {unit}"
    raise AssertionError


def quantity(n: float) -> str:
    """Formats a number with a prefix: powers of 1000."""
    if abs(n) < 1000:
        return f"{n:,.0f}"
    for prefix in ("k", "M", "G", "T"):
        n /= 1000
        if abs(n) < 1000 or prefix == "T":
            return f"{n:,.2f} {prefix}"
    raise AssertionError


def seconds(t: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if t >= size:
            return f"{t / size:,.2f} {unit}"
    return f"{t * 1e6:,.1f} µs"
