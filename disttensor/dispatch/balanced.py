"""Decides calls of tensors with ``Balanced`` rows.

A rule is applied as if the rows were contiguous. The order of rows does not matter for a letter
that the decision splits by an axis which an argument splits as ``Balanced``, if each index of the
letter is independent of the others. All arguments and results with this letter then become
``Balanced``. All other rows become contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from disttensor.core.layout import Layout
from disttensor.core.placement import Balanced
from ops.empty_pieces import ANYWHERE
from ops.factors import Factors, Letter
from ops.propagation import Decision


def without_balanced(layout: Layout) -> Layout:
    """Returns the layout with contiguous rows."""
    return replace(layout, custom=()) if layout.custom else layout


def is_known(layout: Layout) -> bool:
    """Returns True if each custom placement of the layout is ``Balanced``."""
    return all(type(p) is Balanced for _, p in layout.custom)


def keep_balanced(
    f: Factors, decision: Decision, layouts: Sequence[Layout], writes: bool
) -> Decision | None:
    """Returns the decision with ``Balanced`` rows where they are allowed; None if a written tensor
    (``writes``: the targets) could not keep its placement. ``layouts``: of the arguments."""
    kept = dict(_kept(f, decision, layouts))
    firm = {*(f.targets if writes else ()), *f.side_writes}
    for t in firm:
        for a in [a for a, letter in kept.items() if letter in f.inputs[t]]:
            if (a, Balanced(f.inputs[t].index(kept[a]))) not in layouts[t].custom:
                del kept[a]
    inputs = [
        layouts[t] if t in f.metadata_only else _dealt(want, f.inputs[t], kept)
        for t, want in enumerate(decision.input_layouts)
    ]
    if any(inputs[t] != layouts[t] for t in firm):
        return None
    pairs = zip(decision.output_layouts, f.outputs, strict=True)
    return replace(
        decision,
        input_layouts=inputs,
        output_layouts=[_dealt(layout, dims, kept) for layout, dims in pairs],
    )


def _kept(
    f: Factors, decision: Decision, layouts: Sequence[Layout]
) -> Iterator[tuple[int, Letter]]:
    """Yields each axis with ``Balanced`` rows that all may keep, and the letter that it splits."""
    pairs = zip(f.inputs, layouts, strict=True)
    dealing = {
        (a, dims[p.dim])
        for dims, layout in pairs
        for a, p in layout.custom
        if isinstance(p, Balanced)
    }
    merged = {
        x for dims in (*f.inputs, *f.outputs) for d in dims if isinstance(d, tuple) for x in d
    }
    bound = merged | f.divisible_only | f.halo.keys()
    for dims, shape in zip(f.outputs, f.output_shapes(), strict=True):
        bound |= {x for x, n in zip(dims, shape, strict=True) if f.sizes.get(x, n) != n}
    for letter, axes in decision.split.items():
        free = f.local is None or f.local in ANYWHERE or letter in f.independent
        if len(axes) == 1 and (axes[0], letter) in dealing and free and letter not in bound:
            yield axes[0], letter


def _dealt(layout: Layout, dims: tuple[Any, ...], kept: dict[int, Letter]) -> Layout:
    own = sorted((a, dims.index(x)) for a, x in kept.items() if x in dims)
    return replace(layout, custom=tuple((a, Balanced(d)) for a, d in own)) if own else layout
