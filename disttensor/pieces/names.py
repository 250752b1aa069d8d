"""Short texts for ranks and ranges."""

from __future__ import annotations

from collections.abc import Sequence

from disttensor.core.layout import Range
from disttensor.simulate.kind import names_of


def span(part: Range | None) -> str:
    """Returns ``2:4``; "" for a dim that is not drawn, and dots for None, a range that is left
    out."""
    return "..." if part is None else "" if part == (0, 0) else f"{part[0]}:{part[1]}"


def listed(ranks: Sequence[int]) -> str:
    """Returns ``rank 2``, ``ranks 0, 2`` or ``ranks 0-7``, and of many at equal distances
    ``ranks 0, 2, ... 62 (32)``, with their number. Dots if there is none."""
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else "..."
    if len(ranks) == 2:
        return f"ranks {ranks[0]}, {ranks[1]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {names_of(ranks)}"
    if len(ranks) <= 4:
        return "ranks " + ", ".join(map(str, ranks))
    if tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])):
        return f"ranks {ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"
    return f"ranks {names_of(ranks)} ({len(ranks)})"
