"""Functions that work element by element: every dim is a factor of its own, nothing is reduced.

Where a Partial may flow: ``linear`` functions are linear in their first tensor; add-like ones in all operands together;
mul-like ones are products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops.factors import Arg, Factors, pointwise_factors
from ops.registry import Function, Rule, register


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arg]:
    """The tensor arguments in order of appearance, lists included."""
    out: list[Arg] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Arg):
            out.append(a)
        elif isinstance(a, (list, tuple)):
            out.extend(tensors_of(tuple(a), {}))
    return out


def pointwise(*funcs: Function, linear: str = "none", outputs: int = 1, exact: bool = False) -> None:
    """Register elementwise functions. ``linear``: "none"; "first" (in the first tensor); "joint" (in all of them
    together: x + y; with a plain number the Partial is reduced first); "product" (x * y); "quotient" (x / y)."""

    def factors(*args: Any, **kwargs: Any) -> Factors:
        tensors = tensors_of(args, kwargs)
        f = pointwise_factors(tensors, terms=_terms(linear, args, tensors))
        return f if outputs == 1 else f.but(outputs=f.outputs * outputs)

    register(Rule(funcs[0].__name__, factors, False, "type", False, f"elementwise, linear: {linear}"), *funcs, exact=exact)


def _terms(linear: str, args: tuple[Any, ...], tensors: list[Arg]) -> tuple[frozenset[int], ...]:
    if linear == "none" or not tensors:
        return ()
    if linear == "first":
        return (frozenset({tensors[0].index}),) if isinstance(args[0], Arg) else ()
    if linear == "product":
        return (frozenset(t.index for t in tensors),)
    if linear == "quotient":
        return (frozenset({tensors[0].index}),) if isinstance(args[0], Arg) else ()
    scalars = any(isinstance(a, (int, float, complex)) for a in args[:2])  # x + 3 is affine, not linear
    return () if scalars else tuple(frozenset({t.index}) for t in tensors)


pointwise(torch.add, torch.sub, linear="joint")
pointwise(torch.mul, linear="product")
pointwise(torch.div, linear="quotient")
pointwise(torch.relu, torch.exp, torch.tanh)
pointwise(F.gelu, F.relu, F.silu)
