"""Reuses decisions for calls that differ only in sizes. Pure.

A rule with ``Rule.sizes == "letters"`` gives the same letters to calls whose tensors have dims of
size 1 in the same places, if all dims of a letter have one size. If the decision did not compare
bytes, it is the same too.
"""

from __future__ import annotations

from collections.abc import Sequence

from disttensor.core.layout import Axes
from ops.factors import Factors, Letter
from ops.propagation import Decision


def of_any_size(f: Factors, decision: Decision, shapes: Sequence[Axes]) -> bool:
    """Returns True if the decision is valid for other sizes of the letters."""
    if decision.compared or f.per_item or f.even or f.halo or f.beside or f.shapes is not None:
        return False
    if sizes_of(f, shapes) != f.sizes:
        return False
    for dims, shape in zip(f.inputs, shapes, strict=True):
        for letter, n in zip(dims, shape, strict=True):
            if type(letter) is tuple or (letter is None and n != 1):
                return False
    return not any(type(letter) is tuple for dims in f.outputs for letter in dims)


def sizes_of(f: Factors, shapes: Sequence[Axes]) -> dict[Letter, int] | None:
    """Returns the sizes of the letters in tensors of these shapes; None if a letter has two."""
    sizes: dict[Letter, int] = {}
    for dims, shape in zip(f.inputs, shapes, strict=True):
        for letter, n in zip(dims, shape, strict=True):
            if letter is not None and sizes.setdefault(letter, n) != n:
                return None
    return sizes
