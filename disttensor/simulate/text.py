"""Formats figures for people."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Returns lines of columns: those numbered in ``left`` aligned to the left, the others to the
    right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def amount(nbytes: float) -> str:
    """Formats bytes with a unit: powers of 1024."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB"))


def quantity(n: float) -> str:
    """Formats a number with a prefix: powers of 1000."""
    return _scaled(n, 1000, ("", "k", "M", "G", "T"))


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    power = next((i for i in range(len(units)) if abs(n) < base ** (i + 1)), len(units) - 1)
    return f"{n / base**power:,.{2 if power else 0}f} {units[power]}".rstrip()


def seconds(t: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if t >= size:
            return f"{t / size:,.2f} {unit}"
    return f"{t * 1e6:,.1f} µs"
