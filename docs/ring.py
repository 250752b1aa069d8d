"""Draws docs/ring.svg: which rank computes which scores of causal attention, and when, from the
schedule that the ring follows (``ops/nn/ring_schedule.py``).

    python docs/ring.py            writes the picture
    python docs/ring.py --check    exits with 1 where the picture is not that of the schedule
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from disttensor.core.layout import balanced_ranges  # noqa: E402
from ops.nn.ring_schedule import Ring  # noqa: E402

FILE = ROOT / "docs" / "ring.svg"
RANKS, SIDE, LEFT, TOP, APART = 4, 320, 60, 64, 150
COLORS = ("#3066a6", "#c65d10", "#3b8743", "#8a5aa8")
CHUNKS = 2 * RANKS


def rings(even: bool) -> list[Ring]:
    """The ring as each rank has it, over a sequence of CHUNKS."""
    if even:
        rows = tuple(balanced_ranges(CHUNKS, i, RANKS) for i in range(RANKS))
    else:
        rows = tuple(((2 * i, 2 * i + 2),) for i in range(RANKS))
    return [Ring(i, rows, rows, True, lambda *_: None) for i in range(RANKS)]


def triangle(x: float, y: float, side: float) -> str:
    return f'<path d="M{x:g} {y:g} v{side:g} h{side:g} z"'


def scores(left: int, title: str, even: bool) -> list[str]:
    """Queries downwards, keys to the right; a colour for each rank, the step as a number."""
    unit, work = SIDE / CHUNKS, [0.0] * RANKS
    out = [f'<text x="{left}" y="{TOP - 34}" font-size="15">{title}</text>']
    out.append(f'<text x="{left + SIDE / 2}" y="{TOP - 10}" text-anchor="middle">keys</text>')
    out.append(f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="#f5f5f5"/>')
    for ring in rings(even):
        for step in range(RANKS):
            for pair in ring.pairs(ring.me, ring.at(step)):
                x, y = left + pair.key[0] * unit, TOP + pair.row[0] * unit
                wide, high = ((b - a) * unit for a, b in (pair.key, pair.row))
                half = pair.key == pair.row
                work[ring.me] += wide * high / (2 if half else 1)
                if half:
                    shape = triangle(x, y, wide)
                else:
                    shape = f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}"'
                out.append(f'{shape} fill="{COLORS[ring.me]}" stroke="#fff"/>')
                at = x + wide * (0.3 if half else 0.5), y + high * (0.7 if half else 0.5) + 4
                out.append(
                    f'<text x="{at[0]:g}" y="{at[1]:g}" text-anchor="middle" fill="#fff">'
                    f"{step}</text>"
                )
    for i, area in enumerate(work):
        y, length = TOP + SIDE + 22 + 20 * i, area / max(work) * SIDE / 2
        share = 100 * area / sum(work)
        out.append(f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">rank {i}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{length:g}" height="14" fill="{COLORS[i]}"/>')
        out.append(f'<text x="{left + length + 6:g}" y="{y + 11}">{share:.1f} %</text>')
    return out


def picture() -> str:
    width, height = 2 * SIDE + LEFT + APART + 20, TOP + SIDE + 22 + 20 * RANKS + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="20" y="{TOP + SIDE / 2}" transform="rotate(-90 20 {TOP + SIDE / 2})" '
        'text-anchor="middle">queries</text>',
        *scores(LEFT, "pieces as they lie", even=False),
        *scores(LEFT + SIDE + APART, "redistributed: chunks i and 2 n - 1 - i", even=True),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        if not FILE.exists() or FILE.read_text() != picture():
            sys.exit(f"{FILE.name} is not that of the schedule: run python docs/ring.py")
    else:
        FILE.write_text(picture())


if __name__ == "__main__":
    main()
