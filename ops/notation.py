"""Factors as text: ``m k, k n -> m n   k: sum``. One line shows which dims a mesh axis may
split."""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_letters
from typing import Any

from ops.factors import Dims, Factors, Letter
from ops.propagation import splittable


def notation(f: Factors) -> str:
    """Returns the letters of each tensor and result, then the properties of some letters.

    ``_`` is a dim that stays whole (or has size 1 and broadcasts), ``(a b)`` a dim that merges two,
    ``[]`` a tensor without dims. ``k: sum``: a split of k leaves a pending sum; ``whole``: never
    split; ``even``: split only without remainder; ``halo``: the call fetches the elements of other
    ranks that its windows read.

    >>> from ops.factors import Arg, letters
    >>> notation(letters("m k, k n -> m n", Arg((4, 6)), Arg((6, 5)), reduced={"k": "sum"}))
    'm k, k n -> m n   k: sum'
    """
    if f.per_item:
        kinds = list(dict.fromkeys(notation(part) for part, _ in f.per_item))
        return "each on its own: " + "; ".join(kinds)
    names = _names(f)

    def spell(dims: Dims) -> str:
        words = (
            "(" + " ".join(names[x] for x in d) + ")" if isinstance(d, tuple) else names[d]
            for d in dims
        )
        return " ".join(words) or "[]"

    text = (
        ", ".join(map(spell, f.inputs)) + " -> " + (", ".join(map(spell, f.outputs)) or "nothing")
    )
    usable = splittable(f)
    special = [
        f"{names[x]}: {'within the call' if op == 'inner' else op}"
        for x, op in f.reduced.items() if x in usable and x in names
    ]  # fmt: skip
    lines = (
        ("whole", names.keys() - usable - {None}),
        ("even", f.divisible_only & usable),
        ("halo", f.halo.keys() & usable),
    )
    for word, some in lines:
        if some:
            special.append(f"{word}: " + " ".join(sorted(names[x] for x in some if x in names)))
    return "   ".join([text, *filter(None, [", ".join(special)])])


def _names(f: Factors) -> dict[Letter, str]:
    """Returns a name for each letter: itself if it is a name, else the next free letter."""
    found = dict.fromkeys(x for dims in (*f.inputs, *f.outputs) for x in _letters(dims))
    taken = {x for x in found if isinstance(x, str) and x.isalpha()}
    free = iter([x for x in ascii_letters if x not in taken] + [f"d{i}" for i in range(99)])
    names = {x: x if x in taken else next(free) for x in found if x is not None}
    return {**names, None: "_"}


def _letters(dims: Dims) -> Iterator[Any]:
    for d in dims:
        if isinstance(d, tuple):
            yield from d
        else:
            yield d
